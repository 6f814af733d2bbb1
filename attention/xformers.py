"""FlashAttention and Triton split-K through xformers, on CUDA: a backend of attention.py."""

from functools import partial
from itertools import accumulate, chain, takewhile

import torch

from attention.plan import SIXTEEN_BITS, gather, page_rows
from kv_cache import Span


class XFormers:
    """All decodes in one call, all longer chunks in another.

    xformers sees the cache of a layer as one long sequence of keys. With one page for each request
    a block-diagonal mask with *gappy keys* says where in it each request's keys begin and how many
    there are, so the pages may lie in any order, and nothing is copied. With `split_k` the decodes
    go to Triton split-K, which cuts the keys into pieces so that a few decodes fill the GPU.

    With small pages they go there in any case, with a *paged* mask, which follows the block tables.
    The kernel for chunks does not know these: the pages of the chunks' requests are copied side by
    side first, little beside what a chunk computes."""

    def __init__(self, config, cache, split_k=False):
        """Raises ImportError without xformers, ValueError where its operators do not run."""
        self.device, self.cache = cache.data.device, cache
        self.page_size, self.paged = cache.page_size, cache.page_size < cache.max_len
        self.group, dtype = config.n_head // config.n_kv_head, cache.data.dtype
        split_k = split_k or self.paged
        if dtype not in SIXTEEN_BITS or torch.cuda.get_device_capability(self.device) < (8, 0):
            raise ValueError("attention='xformers': needs 16 bits and a GPU of sm80 or newer")
        if self.paged and cache.page_size % 64:
            raise ValueError(f"page_size={cache.page_size}: must be max_len or a multiple of 64")
        if config.head_dim not in ((16, 32, 64, 128, 256) if split_k else range(8, 257, 8)):
            raise ValueError(f"attention='xformers': head_dim={config.head_dim} is not supported")
        from xformers.ops import fmha  # imported only where it is used: it has no CPU operator

        if fmha.flash.FLASH_VERSION == "0.0.0":
            raise ValueError("attention='xformers': this torch was built without FlashAttention")
        # The operators are applied directly: xformers' own dispatch refuses them all when its C++
        # extension was built for another torch, though torch's FlashAttention and Triton need none.
        self.inputs, self.chunk_operator = fmha.Inputs, fmha.flash.FwOp
        self.decode_operator = fmha.triton_splitk.FwOp if split_k else fmha.flash.FwOp
        probe = torch.zeros(3, config.n_head, config.head_dim, device=self.device, dtype=dtype)
        spans = [Span([0], 0, [0]), Span([cache.pages - 1], 0, [0, 0])]
        self.plan(spans)(probe, *cache.layer(0))  # fails here if at all

    def plan(self, spans):
        """See the top of attention.py. Decodes must come first, or they count as chunks."""
        decodes = list(takewhile(lambda span: span.length == 1, spans))
        chunks, pages = spans[len(decodes) :], self.cache.pages
        calls, copied = [], None  # (rows of q, mask, operator, page_rows that are copied or None)
        if decodes:
            if self.paged:
                mask = paged_bias(decodes, self.page_size, self.cache.max_len, self.device)
            else:
                mask = gappy_bias(decodes, pages, self.page_size, self.device)
            calls.append((slice(len(decodes)), mask, self.decode_operator, None))
        if chunks:
            if self.paged:  # the mask is that of the copy
                used = [span.used_pages(self.page_size) for span in chunks]
                *firsts, pages = accumulate(map(len, used), initial=0)
                chunks = [span._replace(pages=[first]) for span, first in zip(chunks, firsts)]
                copied = page_rows(list(chain.from_iterable(used)), self.cache)
            mask = gappy_bias(chunks, pages, self.page_size, self.device)
            calls.append((slice(len(decodes), None), mask, self.chunk_operator, copied))
        return partial(self.attend, calls)

    def attend(self, calls, q, keys, values):
        """Attention of all rows of q, in the `calls` of a plan."""
        parts = []
        for rows, mask, operator, copied in calls:
            read = keys, values
            if copied is not None:
                read = [gather(x, copied, self.page_size) for x in read]
            of_rows = q[None, rows].unflatten(2, (-1, self.group))
            # of_rows (1, n, n_kv_head, group, head_dim)
            inputs = self.inputs(of_rows, *map(self.merge, read), attn_bias=mask)
            with torch.cuda.device_of(q):  # where Triton launches its kernels
                y, _ = operator.apply(inputs, needs_gradient=False)
            parts.append(y.reshape(-1, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def merge(self, x):
        """(n_kv_head, slots, head_dim) -> (1, slots, n_kv_head, group, head_dim), a view: heads of
        a group are the same memory, with a stride of 0, which the operators recognise."""
        return x.transpose(0, 1)[None, :, :, None].expand(-1, -1, -1, self.group, -1)


def gappy_bias(spans, pages, page_size, device=torch.device("cpu")):
    """xformers' mask of some spans over the keys of `pages` pages, (sum of their lengths, slots):
    each sees its own, from its first page on, causally, aligned at its last query."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

    mask = BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        q_seqlen=[span.length for span in spans],
        kv_seqstarts=[span.pages[0] * page_size for span in spans] + [pages * page_size],
        kv_seqlen=[span.end for span in spans],
        device=device,
    )
    # Only a bound, and Triton split-K compiles a kernel for each value: one, not one per decode.
    mask.k_seqinfo.max_seqlen = max(page_size, mask.k_seqinfo.max_seqlen)
    return mask


def paged_bias(decodes, page_size, max_len, device=torch.device("cpu")):
    """xformers' mask of some decodes over all pages, which it finds through their block tables."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask

    width = -(-max_len // page_size)  # the same in every iteration: Triton compiles one for each
    tables = [(span.used_pages(page_size) + [0] * width)[:width] for span in decodes]
    tables = torch.tensor(tables, dtype=torch.int32, pin_memory=device.type == "cuda")
    return PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * len(decodes),
        kv_seqlen=[span.end for span in decodes],
        block_tables=tables.to(device, non_blocking=True),
        page_size=page_size,
        device=device,
    )
