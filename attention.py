"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are two backends. Each is made once for a cache and makes a *plan* once per iteration: masks and
index tensors depend on the batch only, so they are not built again for each layer. A plan is a function

    attend(q, keys, values) -> out

    q, out         (num_tokens, n_head, head_dim), the rows of all chunks one after the other
    keys, values   (n_kv_head, pages * page_size, head_dim), one layer of the cache

Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.

Read next: model.py, which calls the plan.
"""

import warnings
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query


BACKENDS = ("auto", "sdpa", "xformers", "xformers-split-k")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Extent(NamedTuple):
    """Where a chunk's keys lie: tokens 0 … start + length - 1 of the request that has the block table `pages`."""

    pages: list
    start: int
    length: int

    def used_pages(self, page_size):
        """The pages that hold these keys, in order."""
        return self.pages[: -(-(self.start + self.length) // page_size)]


def follow_each_other(pages):
    """Whether these pages are one piece of memory."""
    return pages == list(range(pages[0], pages[0] + len(pages)))


def make_attention(config, cache, backend="auto"):
    """The backend for a cache: `sdpa`, `xformers`, `xformers-split-k`, or `auto`.

    `auto` is xformers for 16 bits on CUDA and sdpa elsewhere; where xformers cannot run it says so, and takes sdpa.
    Raises what `check_backend` and `XFormers` raise if another was asked for.
    """
    check_backend(backend, cache.data.device)
    if backend == "auto" and cache.data.is_cuda and cache.data.dtype in SIXTEEN_BITS:
        try:
            return XFormers(config, cache)
        except (ImportError, ValueError, RuntimeError) as error:
            warnings.warn(f"attention runs on torch alone, one call per chunk, which is slower: {error}", stacklevel=2)
    return XFormers(config, cache, "split-k" in backend) if "xformers" in backend else SDPA(config, cache)


def check_backend(backend, device):
    """Raise ValueError for an unknown name, or for xformers anywhere but on CUDA."""
    if backend not in BACKENDS:
        raise ValueError(f"attention={backend!r}: must be one of {', '.join(BACKENDS)}")
    if "xformers" in backend and device.type != "cuda":
        raise ValueError(f"attention={backend!r}: xformers has no CPU operator, use 'sdpa' or a CUDA device")


def page_rows(pages, cache):
    """What `gather` needs to copy these pages, an index tensor whose last dimension goes with `pages`."""
    rows = torch.tensor(pages).to(cache.data.device, non_blocking=True)
    if cache.layer(0)[0].is_contiguous():  # every head has all pages: head h keeps page p in row h * cache.pages + p
        heads = torch.arange(cache.data.shape[2], device=rows.device)
        rows = heads[:, None] * cache.pages + rows
    return rows


def gather(x, rows, page_size):
    """Copy pages of a layer's keys or values side by side, as whole rows of a matrix, which is the fastest way.

    x (n_kv_head, cells, head_dim), in either layout of KVCache; `rows` are n pages' -> (n_kv_head, n * page_size,
    head_dim).
    """
    heads, _, head_dim = x.shape
    if x.is_contiguous():
        return x.view(-1, page_size * head_dim).index_select(0, rows.flatten()).view(heads, -1, head_dim)
    x = x.transpose(0, 1).view(-1, page_size * heads * head_dim)
    return x.index_select(0, rows).view(-1, heads, head_dim).transpose(0, 1)


# -----------------------------------------------------------------------------------------------------
# everywhere: torch's scaled_dot_product_attention


def staircase(queries, past, group, dtype, device="cpu"):
    """The mask of every possible chunk, as an additive bias: 0 = attend, -inf = do not.

    Shape (queries * group, past + queries). Row i * group + g belongs to query i; column `past + i` is
    the query's own key. A chunk of `length` at `start` sees the window

        staircase[: length * group, past - start : past + length]

    of it, which is SARATHI's Figure 6 for that chunk with every row repeated for the group's heads.
    """
    column = torch.arange(past + queries, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(queries * group, past + queries, dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))


class SDPA:
    """One `scaled_dot_product_attention` call per chunk, or per block of QUERY_BLOCK queries of it.

    Each call reads exactly the keys it needs. Pages that follow each other are read in place, as a view of the cache;
    scattered ones are first copied side by side, for one request at a time, so that the copy stays in the processor's
    cache. The query heads that share a KV head are folded into the query length, (length, n_kv_head, group, head_dim)
    -> (n_kv_head, length * group, head_dim), so keys and values are read once per group and not once per head.
    """

    def __init__(self, config, cache):
        self.group, self.cache = config.n_head // config.n_kv_head, cache
        self.past, self.device, self.page_size = cache.max_len, cache.data.device, cache.page_size
        if self.device.type == "cuda":  # cuDNN builds a plan for each new number of keys, which is each decode
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.bias = staircase(min(QUERY_BLOCK, self.past), self.past, self.group, cache.data.dtype, self.device)

    def mask(self, start, length):
        """The additive mask of a block of queries, (length * group, start + length). None for a decode."""
        if length == 1:
            return None  # the last query sees every key
        window = self.bias[: length * self.group, self.past - start : self.past + length]
        return window.contiguous() if window.is_cuda else window  # CUDA kernels want aligned rows

    def plan(self, extents):
        """See the top of this file. `extents` are in the order of the rows of q."""
        chunks, scattered, row = [], [], 0
        for extent in extents:
            pages, (_, start, length) = extent.used_pages(self.page_size), extent
            blocks = []
            for offset in range(0, length, QUERY_BLOCK):
                n = min(QUERY_BLOCK, length - offset)
                blocks.append((row + offset, n, start + offset + n, self.mask(start + offset, n)))
            row += length
            if follow_each_other(pages):
                chunks.append((pages[0] * self.page_size, None, blocks))
            else:
                chunks.append((0, slice(len(scattered), len(scattered) + len(pages)), blocks))
                scattered += pages
        rows = page_rows(scattered, self.cache) if scattered else None
        chunks = [(first, rows[..., part].flatten() if part else None, blocks) for first, part, blocks in chunks]

        def attend(q, keys, values):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            head_dim = q.shape[2]
            # torch's CPU kernel takes a slow path for a single query in 16 bits: computing it twice takes half the time
            twice = q.dtype in SIXTEEN_BITS and not q.is_cuda
            for first, copied, blocks in chunks:
                k, v = (x[:, first:] if copied is None else gather(x, copied, self.page_size) for x in (keys, values))
                for row, n, kv_len, mask in blocks:
                    folded = q[row : row + n].view(n, -1, self.group, head_dim).transpose(0, 1)
                    folded = folded.reshape(1, -1, n * self.group, head_dim)  # (1, n_kv_head, n * group, head_dim)
                    if twice and folded.shape[2] == 1:
                        folded = folded.expand(-1, -1, 2, -1)
                    y = F.scaled_dot_product_attention(folded, k[None, :, :kv_len], v[None, :, :kv_len], attn_mask=mask)
                    y = y[0, :, : n * self.group].unflatten(1, (n, self.group))  # (n_kv_head, n, group, head_dim)
                    out[row : row + n].view(n, -1, self.group, head_dim).copy_(y.transpose(0, 1))
            return out

        return attend


# -----------------------------------------------------------------------------------------------------
# CUDA: xformers


class XFormers:
    """FlashAttention through xformers: all decodes in one call, all longer chunks in another.

    xformers sees the cache of a layer as one long sequence of keys. With one page for each request a block-diagonal
    mask with *gappy keys* says where in it each request's keys begin and how many there are, so the pages may lie in
    any order, with holes, and nothing is copied. With `split_k` the decodes go to Triton split-K instead, which cuts
    the keys into pieces so that a few decodes with long contexts fill the GPU.

    Small pages: the decodes go to Triton split-K with a *paged* mask, which follows the block tables. The kernel for
    chunks does not know block tables: there the pages of the chunks' requests are copied side by side first, little
    beside what a chunk computes.
    """

    def __init__(self, config, cache, split_k=False):
        """Raises ImportError without xformers, ValueError where its operators do not run."""
        self.device, self.max_len, self.cache = cache.data.device, cache.max_len, cache
        self.page_size, self.paged = cache.page_size, cache.page_size < cache.max_len
        self.group = config.n_head // config.n_kv_head
        split_k = split_k or self.paged
        if cache.data.dtype not in SIXTEEN_BITS or torch.cuda.get_device_capability(self.device) < (8, 0):
            raise ValueError("attention='xformers': needs 16 bits and a GPU of compute capability 8.0 or more")
        if self.paged and cache.page_size % 64:
            raise ValueError(f"page_size={cache.page_size}: must be max_len or a multiple of 64 for xformers")
        sizes = (16, 32, 64, 128, 256) if split_k else range(8, 257, 8)
        if config.head_dim not in sizes:
            raise ValueError(f"attention='xformers': head_dim={config.head_dim} is not supported")
        from xformers.ops import fmha  # imported only where it is used: it has no CPU operator

        if fmha.flash.FLASH_VERSION == "0.0.0":
            raise ValueError("attention='xformers': this torch was built without FlashAttention")
        # The operators are applied directly. xformers' own dispatch refuses them all when its C++ extension was
        # built for another torch, though these two do not use it: one is torch's, the other is Triton.
        self.inputs, self.chunk_operator = fmha.Inputs, fmha.flash.FwOp
        self.decode_operator = fmha.triton_splitk.FwOp if split_k else fmha.flash.FwOp
        probe = torch.zeros(3, config.n_head, config.head_dim, device=self.device, dtype=cache.data.dtype)
        last = cache.pages - 1
        self.plan([Extent([0], 0, 1), Extent([last], 0, 2)])(probe, *cache.layer(0))  # fails here if at all

    def plan(self, extents):
        """See the top of this file. Decodes must come first in `extents`, or they count as chunks."""
        num_decodes = 0
        while num_decodes < len(extents) and extents[num_decodes].length == 1:
            num_decodes += 1
        decodes, chunks = extents[:num_decodes], extents[num_decodes:]
        calls = []  # (rows of q, mask, operator, pages to copy or None)
        if decodes:
            if self.paged:
                mask = paged_bias(decodes, self.page_size, self.max_len, self.device)
            else:
                firsts = [extent.pages[0] for extent in decodes]
                mask = gappy_bias(decodes, firsts, self.cache.pages, self.page_size, self.device)
            calls.append((slice(0, num_decodes), mask, self.decode_operator, None))
        if chunks:
            rows = slice(num_decodes, num_decodes + sum(extent.length for extent in chunks))
            firsts, pages, table = [extent.pages[0] for extent in chunks], self.cache.pages, None
            if self.paged:  # the mask is that of the copy
                used = [extent.used_pages(self.page_size) for extent in chunks]
                firsts, pages = list(accumulate(map(len, used[:-1]), initial=0)), sum(map(len, used))
                table = page_rows(list(chain.from_iterable(used)), self.cache)
            mask = gappy_bias(chunks, firsts, pages, self.page_size, self.device)
            calls.append((rows, mask, self.chunk_operator, table))

        def attend(q, keys, values):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            for rows, mask, operator, table in calls:
                queries = q[None, rows].unflatten(2, (-1, self.group))  # (1, n, n_kv_head, group, head_dim)
                k, v = (self.merge(x if table is None else gather(x, table, self.page_size)) for x in (keys, values))
                y, _ = operator.apply(self.inputs(queries, k, v, attn_bias=mask), needs_gradient=False)
                out[rows] = y.reshape(-1, *q.shape[1:])
            return out

        return attend

    def merge(self, x):
        """(n_kv_head, cells, head_dim) -> (1, cells, n_kv_head, group, head_dim), a view.

        All heads of a group are the same memory: their stride is 0, which the operators recognise.
        """
        return x.transpose(0, 1)[None, :, :, None].expand(-1, -1, -1, self.group, -1)


def gappy_bias(extents, firsts, pages, page_size, device="cpu"):
    """xformers' mask of some chunks over the keys of `pages` pages, (sum of their lengths, pages * page_size).

    The keys of chunk i begin with page firsts[i] and go on from there. Each chunk sees those of its own request up to
    its end, causally, aligned at its last query.
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

    mask = BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        q_seqlen=[extent.length for extent in extents],
        kv_seqstarts=[first * page_size for first in firsts] + [pages * page_size],
        kv_seqlen=[extent.start + extent.length for extent in extents],
        device=torch.device(device))
    # Only a bound, and Triton split-K compiles a kernel for each of its values: one, not one per decode.
    mask.k_seqinfo.max_seqlen = max(page_size, mask.k_seqinfo.max_seqlen)
    return mask


def paged_bias(decodes, page_size, max_len, device="cpu"):
    """xformers' mask of some decodes over the keys of all pages, which it finds through their block tables."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask

    width = -(-max_len // page_size)  # the same in every iteration: Triton compiles a kernel for each
    tables = [(extent.used_pages(page_size) + [0] * width)[:width] for extent in decodes]
    return PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * len(decodes),
        kv_seqlen=[extent.start + 1 for extent in decodes],
        block_tables=torch.tensor(tables, dtype=torch.int32).to(device, non_blocking=True),
        page_size=page_size,
        device=torch.device(device))
