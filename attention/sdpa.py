"""Attention by torch's own kernel, one call for each chunk: a backend for any device."""

import torch
import torch.nn.functional as F

from attention.plan import SIXTEEN_BITS, gather, page_rows, staircase

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query


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
