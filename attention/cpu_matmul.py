"""Attention as matrix products, for bfloat16 on a CPU: a backend of attention.py.

A softmax between two products takes a third of the time of torch's fused kernel there."""

from collections import Counter, defaultdict
from itertools import takewhile

import torch

from attention.sdpa import SDPA

KEY_BLOCK = 64  # oneDNN compiles a kernel for each shape: keys are read in whole blocks,
PAGE_BLOCK = 16  # and pages that are copied, too


class Matmul(SDPA):
    """Chunks one by one; all decodes together, each page once for all of its readers.

    Keys are read in whole KEY_BLOCKs, the last ones behind a mask. What lies there must be finite:
    who begins a page puts zeros behind its tokens."""

    def __init__(self, config, cache):
        super().__init__(config, cache, past=0, key_block=KEY_BLOCK)
        self.n_kv_head, self.head_dim = config.n_kv_head, config.head_dim

    def plan(self, spans):
        """See the top of attention.py. Decodes must come first, or they count as chunks."""
        tails = []  # slots behind the tokens of the pages that are begun here: (first, end)
        for span in spans:
            used = (span.end - 1) // self.page_size * self.page_size
            if span.start <= used:
                page = span.pages[used // self.page_size] * self.page_size
                tails.append((page + span.end - used, page + self.page_size))
        decodes = list(takewhile(lambda span: span.length == 1, spans))
        together = self.plan_decodes(decodes) if decodes else None
        n = len(decodes) if together else 0
        one_by_one = super().plan(spans[n:])

        def attend(q, keys, values):
            for first, end in tails:
                keys[:, first:end] = 0
                values[:, first:end] = 0
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if together:
                out[:n] = together(q[:n], keys, values)
            one_by_one(q[n:], keys, values, out[n:])
            return out

        return attend

    def plan_decodes(self, decodes):
        """The plan of decodes, None if they are better computed one by one. There are two products
        over pages; between them the scores of each decode are put side by side for a softmax."""
        size, tables = self.page_size, [span.used_pages(self.page_size) for span in decodes]
        asked = {page for table in tables for page in table}
        width = max(map(len, tables))  # to which all scores are filled up
        too_few = len(asked) < min(PAGE_BLOCK, self.cache.pages / 2)
        if too_few or width * len(tables) > 8 * sum(map(len, tables)):
            return None
        groups, *numbers = arrange(tables, self.cache.pages)
        whose, where = map(torch.tensor, numbers)
        heads = torch.arange(self.n_kv_head)[:, None] * self.cache.pages
        copied = [  # rows of keys and values, or None: all of them, where they are
            None if isinstance(pages, range) else (heads + torch.tensor(pages)).flatten()
            for pages, _ in groups
        ]
        ends = torch.tensor([span.end for span in decodes])
        read = size if width > 1 else min(-(-int(ends.max()) // KEY_BLOCK) * KEY_BLOCK, size)
        if in_order := width == 1 and copied == [None]:  # all scores of a decode are side by side
            ends = torch.zeros(len(whose), dtype=ends.dtype).index_copy_(0, where, ends)
        hidden = torch.arange(width * read) >= ends[:, None, None]  # (decodes, 1, width * read)
        mask = torch.zeros(hidden.shape, dtype=self.bias.dtype).masked_fill_(hidden, float("-inf"))
        used = (torch.arange(width) * read < ends[:, None])[..., None]  # (decodes, width, 1)
        whose = whose.split([places * len(pages) for pages, places in groups])
        asks = [pages // width for pages in whose]  # of which decodes they are
        whose = [None] if in_order else whose

        def product(multiply, x, index, y):
            """multiply(rows of x, pages of y) for each group: (n_kv_head, total, ...)"""
            parts, x = [], x.flatten(2)
            for picked, rows in zip(index, copied):
                mine = x if picked is None else x.index_select(1, picked)
                pages = y if rows is None else y.index_select(0, rows)
                out = multiply(mine.view(len(pages), -1, x.shape[2] // self.group), pages)
                parts.append(out.view(self.n_kv_head, -1, self.group, out.shape[-1]))
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

        def attend(q, keys, values):
            k, v = (x.reshape(-1, size, self.head_dim)[:, :read] for x in (keys, values))
            # k and v (n_kv_head * pages, read, head_dim)
            q_of_heads = q.view(len(q), self.n_kv_head, -1).transpose(0, 1)
            weights = product(self.scores, q_of_heads, asks, k)  # (n_kv_head, total, group, read)
            if not in_order:
                weights = weights.index_select(1, where)
            weights = weights.unflatten(1, (-1, width)).transpose(2, 3).flatten(3).add_(mask)
            weights = weights.softmax(-1)  # (n_kv_head, decodes, group, width * read)
            weights = weights.unflatten(3, (width, read)).transpose(2, 3).flatten(1, 2)
            y = product(torch.bmm, weights, whose, v).flatten(2)
            y = y.index_select(1, where).unflatten(1, (-1, width))
            y = y[:, :, 0] if width == 1 else (y * used).sum(2)  # (n_kv_head, decodes, ...)
            return y.transpose(0, 1).reshape(q.shape)

        return attend

    def scores(self, q, k):
        """q (n, rows, head_dim), k (n, keys, head_dim) -> (n, rows, keys)"""
        scores = q.new_empty(*q.shape[:2], k.shape[1])
        return scores.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=self.head_dim**-0.5)

    def attend_block(self, q, k, v, mask):
        if mask is None:  # a decode on its own
            return super().attend_block(q, k, v, mask)
        scores = self.scores(q, k)
        scores[..., k.shape[1] - mask.shape[-1] :] += mask
        return torch.bmm(scores.softmax(-1), v)


def arrange(tables, all_pages):
    """How decodes with these block tables ask the pages of a cache of `all_pages`: each page is
    read once for all who share it, each of whom has a *place* in its product. Returns

    groups         [(pages, places of each)], for pages with about as many readers
    where          for each page of each decode, as many as the longest has: its place
    whose          for each place: whose page it is, counted as in `where`"""
    readers, groups = Counter(page for table in tables for page in table), defaultdict(list)
    for page, count in readers.items():
        groups[1 << (count - 1).bit_length()].append(page)  # a power of 2: few shapes
    place, total = {}, 0  # page -> its next free place
    for places, pages in sorted(groups.items()):
        if places == 1 and all_pages <= 2 * len(pages):
            pages = groups[places] = range(all_pages)  # most are asked: no copy is made
        else:
            pages += pages[-1:] * (-len(pages) % PAGE_BLOCK)
        place |= {page: total + i * places for i, page in enumerate(pages)}
        total += places * len(pages)
    whose, where, width = [0] * total, [], max(map(len, tables))
    for table in tables:
        for page in table:
            whose[place[page]] = len(where)
            where.append(place[page])
            place[page] += 1
        where += where[-1:] * (width - len(table))  # read, but hidden
    return [(groups[places], places) for places in sorted(groups)], whose, where
