"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are three backends. Each is made once for a cache and makes a *plan* once per iteration: masks
and index tensors depend on the batch only, so they are not built again for each layer. A plan is

    attend(q, keys, values) -> out

    q, out         (num_tokens, n_head, head_dim), the rows of all spans one after the other
    keys, values   (n_kv_head, slots, head_dim), one layer of the cache

Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.
Read next: model.py, which calls the plan."""

import warnings

import torch
import torch.nn.functional as F

from checks import check_one_of

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query
BACKENDS = ("auto", "sdpa", "matmul", "xformers", "xformers-split-k")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
BY_MATMUL = (torch.bfloat16,)  # on a CPU; the scores of float16 could overflow


def make_attention(config, cache, backend="auto"):
    """The backend for a cache: `sdpa`, `matmul`, `xformers`, `xformers-split-k`, or `auto`.

    `auto` is xformers for 16 bits on CUDA, matmul for bfloat16 on a CPU, else sdpa; if xformers
    cannot run it says so, and takes sdpa. Raises what `XFormers` raises."""
    from kernels.matmul import Matmul  # which import this file
    from kernels.xformers import XFormers

    if backend == "auto" and cache.data.is_cuda and cache.data.dtype in SIXTEEN_BITS:
        try:
            return XFormers(config, cache)
        except (ImportError, ValueError, RuntimeError) as error:
            slower = "attention runs on torch alone, one call per chunk, which is slower"
            warnings.warn(f"{slower}: {error}", stacklevel=2)
    if "xformers" in backend:
        return XFormers(config, cache, "split-k" in backend)
    if backend == "auto" and not cache.data.is_cuda and cache.data.dtype in BY_MATMUL:
        backend = "matmul"
    return Matmul(config, cache) if backend == "matmul" else SDPA(config, cache)


def check_backend(backend, device):
    """Raise ValueError for an unknown name, or one that is not for this device."""
    check_one_of("attention", backend, BACKENDS)
    own = "cuda" if "xformers" in backend else "cpu" if backend == "matmul" else device.type
    if device.type != own:
        raise ValueError(f"attention={backend!r}: runs on {own} alone, 'sdpa' anywhere")


def page_rows(pages, cache):
    """What `gather` needs to copy these pages: a tensor whose last dimension goes with `pages`."""
    rows = torch.tensor(pages, pin_memory=cache.data.is_cuda)  # or the copy would wait
    rows = rows.to(cache.data.device, non_blocking=True)
    if cache.layer(0)[0].is_contiguous():  # head h keeps page p in row h * cache.pages + p
        heads = torch.arange(cache.data.shape[2], device=rows.device)
        rows = heads[:, None] * cache.pages + rows
    return rows


def gather(x, rows, page_size):
    """Copy pages of a layer's keys or values side by side, as rows of a matrix: the fastest way.

    x (n_kv_head, slots, head_dim), in either layout of KVCache; `rows` are those of n pages
    -> (n_kv_head, n * page_size, head_dim)."""
    heads, _, head_dim = x.shape
    if x.is_contiguous():
        x = x.view(-1, page_size * head_dim)
        return x.index_select(0, rows.flatten()).view(heads, -1, head_dim)
    x = x.transpose(0, 1).view(-1, page_size * heads * head_dim)
    return x.index_select(0, rows).view(-1, heads, head_dim).transpose(0, 1)


def staircase(queries, past, group, dtype, device="cpu", beyond=0):
    """The mask of every possible chunk, as an additive bias: 0 = attend, -inf = do not.

    Shape (queries * group, past + queries + beyond). Row i * group + g belongs to query i; column
    `past + i` is the query's own key. A chunk of `length` at `start` sees the window

        staircase[: length * group, past - start : past + length]

    of it, which is SARATHI's Figure 6 for that chunk, every row repeated for the group's heads. The
    window may go on to the right, up to `beyond` more columns: keys that nobody attends to."""
    column = torch.arange(past + queries + beyond, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(len(row), len(column), dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))


class SDPA:
    """One `scaled_dot_product_attention` call per chunk, or per block of QUERY_BLOCK queries of it.

    Each call reads exactly the keys it needs. Pages that follow each other are read in place, as a
    view of the cache; scattered ones are first copied side by side, for one request at a time, so
    that the copy stays in the processor's cache. The query heads that share a KV head are folded
    into the query length, (length, n_kv_head, group, head_dim) -> (n_kv_head, length * group,
    head_dim), so keys and values are read once per group and not once per head."""

    def __init__(self, config, cache, past=None, key_block=1):
        """Keys are read in whole blocks, behind a mask that is cut from a staircase with `past`."""
        self.cache, self.key_block, self.group = cache, key_block, config.n_head // config.n_kv_head
        self.page_size, self.device = cache.page_size, cache.data.device
        self.past = cache.max_len if past is None else past
        if self.device.type == "cuda":  # cuDNN plans for each new number of keys: for each decode
            torch.backends.cuda.enable_cudnn_sdp(False)
        sizes = min(QUERY_BLOCK, cache.max_len), self.past, self.group
        self.bias = staircase(*sizes, cache.data.dtype, self.device, beyond=key_block - 1)

    def mask(self, start, length, keys):
        """The additive mask of some queries, (length * group, keys), or of the last keys, if all
        queries see those before; None if they see all."""
        if start + 1 == keys:
            return None
        first = self.past - start  # the column of key 0
        window = self.bias[: length * self.group, max(0, first) : first + keys]
        return window.contiguous() if window.is_cuda else window  # CUDA wants aligned rows

    def plan(self, spans):
        """See the top of this file. `spans` are in the order of the rows of q."""
        chunks, scattered, row = [], [], 0
        for span in spans:
            pages, blocks = span.used_pages(self.page_size), []  # (row of q, queries, keys, mask)
            whole = self.key_block if span.length > 1 else 1
            for start in range(span.start, span.end, QUERY_BLOCK):
                n = min(QUERY_BLOCK, span.end - start)
                keys = min(-(-(start + n) // whole) * whole, len(pages) * self.page_size)
                blocks.append((row, n, keys, self.mask(start, n, keys)))
                row += n
            if pages == list(range(pages[0], pages[0] + len(pages))):  # one piece of memory
                chunks.append((pages[0] * self.page_size, None, blocks))
            else:
                chunks.append((0, slice(len(scattered), len(scattered) + len(pages)), blocks))
                scattered += pages
        if scattered:
            rows = page_rows(scattered, self.cache)
            chunks = [(first, c and rows[..., c].flatten(), blocks) for first, c, blocks in chunks]

        def attend(q, keys, values, out=None):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
            head_dim = q.shape[2]
            for first, copied, blocks in chunks:
                if copied is None:
                    k, v = keys[:, first:], values[:, first:]
                else:
                    k, v = (gather(x, copied, self.page_size) for x in (keys, values))
                for row, n, read, mask in blocks:
                    folded = q[row : row + n].view(n, -1, self.group, head_dim).transpose(0, 1)
                    folded = folded.reshape(-1, n * self.group, head_dim)
                    y = self.attend_block(folded, k[:, :read], v[:, :read], mask)
                    # y (n_kv_head, n * group, head_dim)
                    y = y.unflatten(1, (n, self.group)).transpose(0, 1)
                    out[row : row + n].view(n, -1, self.group, head_dim).copy_(y)
            return out

        return attend

    def attend_block(self, q, k, v, mask):
        """q (n_kv_head, rows, head_dim), k and v (n_kv_head, keys, head_dim), `mask` as made above
        -> (n_kv_head, rows, head_dim)"""
        # torch's CPU kernel is slow for one query in 16 bits: two of them take half the time
        twice = q.shape[1] == 1 and q.dtype in SIXTEEN_BITS and not q.is_cuda
        rows = q.expand(-1, 2, -1) if twice else q
        y = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask)[0]
        return y[:, :1] if twice else y
