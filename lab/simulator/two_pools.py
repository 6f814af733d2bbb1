"""Two pools: some instances only prefill, others only decode, and keys and values are sent between.

    pools = TwoPools(Pools.parse("2:2"), prefill_pages, decode_pages, chunk=2048, ...)
    batch = pools.prefills[0].next_batch()      an instance computes it, and then advances, as ever
    for transfer in pools.start_transfers():    send transfer.tokens keys and values, from the
        ...                                     pages of transfer.request to transfer.target_pages
        pools.end_transfer(transfer)            when they are there: the request may decode

DistServe (Zhong et al. 2024, arXiv 2401.09670) and Splitwise (Patel et al. 2024, arXiv 2311.18677)
decide so, and this module follows them where they agree:

- Requests are served first come, first served (DistServe §4.3, Splitwise §IV-B). Here all wait in
  one queue. In both papers each instance has its own, and a request goes to the shortest. An
  instance prefills whole prompts, several together up to `chunk` tokens, which keep a GPU busy:
  L_m in DistServe §4.3; 2,048 in Splitwise §IV-B. Or it cuts them into chunks, `cuts_prompts`.
- A request leaves the prefill instance with its first output token. Its pages stay there until its
  keys and values are sent: the memory of prefill is the buffer between the pools (DistServe §4.3).
- The decode instance pulls (DistServe §4.3): a transfer starts when there is memory for it, which
  is reserved first, on the instance with most free pages. The first in line blocks the others.
- `announce` puts a request in line when its last chunk begins, so that each layer may be sent when
  it is computed (Splitwise §IV-C). Without it that is when its first token is known.
- A decode instance never prefills. If its memory runs out, it preempts the newest request, which is
  sent back: to the front of the queue, to be prefilled with its output so far, and sent again.
  DistServe §4.3 leaves preemption out, and its code swaps to the memory of the CPU; Splitwise §IV-B
  lets requests wait before memory runs out. Recomputing on the decode instance, as vLLM does, would
  stall all others there, which is what two pools are to prevent.

One request has pages of both instances while it is sent. An abort frees them when the transfer has
ended, not before: a link still reads the ones and writes the others.

Read first: scheduler.py. Read next: pools.py, which counts the time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_cache import Pages
from policies.parts import output_left
from scheduler import Batch, Request, Scheduler


@dataclass(frozen=True)
class Pools:
    """How many instances of a model prefill, and how many decode. Raises ValueError."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Pools:
        """The Pools of a text such as "2:2", prefill first. Raises ValueError for another."""
        pair = re.fullmatch(r"0*([1-9]\d{0,3}):0*([1-9]\d{0,3})", text)
        if not pair:
            raise ValueError(
                f"pools={text!r}: must be PREFILL:DECODE, two whole numbers, as in 2:2"
            )
        return cls(int(pair[1]), int(pair[2]))

    @property
    def instances(self) -> int:
        """All of them."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(eq=False)
class Transfer:
    """A request on its way from a prefill to a decode instance.

    Without a target it is in line, and waits for memory there; its prefill may still run."""

    request: Request
    source: PrefillInstance
    tokens: int  # whose keys and values are sent
    target: DecodeInstance | None = None
    target_pages: list[int] = field(default_factory=list)  # reserved there
    abandoned_pages: list[int] = field(default_factory=list)  # of the source, after an abort


class Instance(Scheduler):
    """What both kinds of instances share: `transfers`, by request, in the order of the line."""

    transfers: dict[Request, Transfer]

    def finish(self, request: Request, reason: str) -> None:
        """End a request. If it is being sent, its pages are freed when the transfer has ended."""
        transfer = self.transfers.get(request)
        if transfer is not None and transfer.target is not None:
            transfer.abandoned_pages = request.pages
            request.pages = []
        elif transfer is not None:
            del self.transfers[request]
            if request not in transfer.source.running:
                transfer.source.pages.free(request.pages)
                request.pages = []
        super().finish(request, reason)

    def check_progress(self) -> None:
        """An empty batch is no mistake: there may be no memory until a transfer has ended."""


class PrefillInstance(Instance):
    """Prefills whole prompts, as many together as have `chunk` tokens, but at least one."""

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def schedule(self) -> Batch:
        batch = Batch()
        left = self.chunk
        while self.waiting:
            left -= len(self.waiting[0].tokens) - self.cached_tokens_of_head()
            request = None if batch and left < 0 else self.admit()
            if request is None:
                break
            batch.add(request)
        return batch

    def announce(self, batch: Batch) -> None:
        """Put the requests in line whose prefill ends with this batch, before it is computed."""
        for chunk in batch:
            if chunk.yields_token and output_left(chunk.request) > 1:
                self.queue_transfer(chunk.request, chunk.end)

    def queue_transfer(self, request: Request, tokens: int) -> None:
        """Put a request in line, whose first tokens are to be sent, unless it is in it."""
        self.transfers.setdefault(request, Transfer(request, source=self, tokens=tokens))

    def advance(
        self, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[tuple[Request, int]]:
        """As of Scheduler. A request with a token has ended, or runs no more and is in line."""
        new_tokens = super().advance(batch, tokens, now)
        for request, _ in new_tokens:
            if request in self.running:
                self.queue_transfer(request, request.num_computed)
                self.running.remove(request)
        return new_tokens


class ChunkedPrefillInstance(PrefillInstance):
    """Prefills in chunks of `chunk` tokens, several prompts in one."""

    cuts_prompts = True

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        for request in self.running:
            batch.add(request)  # finish what was started
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch


class DecodeInstance(Instance):
    """Decodes all requests that were sent to it, one token each."""

    only_decodes = True
    watermark_percent = 1

    def schedule(self) -> Batch:
        batch = Batch()
        batch.add_decodes(self.grow_decodes())  # may preempt: to the front of the one queue
        return batch

    def reserve(self, tokens: int) -> list[int] | None:
        """Pages for the keys and values of a request that is sent, and of its first decode.

        Returns None if memory is short, or as many requests run, or come, as may."""
        coming = sum(transfer.target is self for transfer in self.transfers.values())
        requests = len(self.running) + coming
        needed_pages = self.pages.needed(tokens + 1)
        kept_free = self.pages.total * self.watermark_percent // 100 if requests else 0
        if requests >= self.max_batch or needed_pages + kept_free > self.pages.num_free:
            return None
        return self.pages.allocate(needed_pages)


class TwoPools:
    """The schedulers of both pools, on one queue, and the requests that are sent between them.

    There is one Pages for each instance. `sizes` and the clock are as of Scheduler."""

    def __init__(
        self,
        prefill_pages: Sequence[Pages],
        decode_pages: Sequence[Pages],
        *,
        cuts_prompts: bool = False,
        **sizes: Any,
    ) -> None:
        kind = ChunkedPrefillInstance if cuts_prompts else PrefillInstance
        self.prefills = [kind(pages, **sizes) for pages in prefill_pages]
        self.decodes = [DecodeInstance(pages, **sizes) for pages in decode_pages]
        self.schedulers: list[Instance] = [*self.prefills, *self.decodes]
        self.transfers: dict[Request, Transfer] = {}
        for scheduler in self.schedulers:
            scheduler.share_queue(self.schedulers)
            scheduler.transfers = self.transfers

    def start_transfers(self) -> list[Transfer]:
        """Reserve memory for the first in line, as long as there is some: these are to be sent.

        The link sends them, not before their prefill has written them."""
        started: list[Transfer] = []
        for transfer in self.transfers.values():
            if transfer.target is not None:
                continue
            if not self._reserve(transfer):
                break
            started.append(transfer)
        return started

    def _reserve(self, transfer: Transfer) -> bool:
        """Reserve memory on the least loaded instance that has it (DistServe §4.3). False: none."""
        for target in sorted(self.decodes, key=lambda each: each.pages.num_free, reverse=True):
            target_pages = target.reserve(transfer.tokens)
            if target_pages is not None:
                transfer.target = target
                transfer.target_pages = target_pages
                return True
        return False

    def end_transfer(self, transfer: Transfer) -> bool:
        """Let a request decode whose keys and values are in its target pages.

        Returns False if it has ended meanwhile: then its pages are free."""
        request = transfer.request
        source = transfer.source
        target = transfer.target
        assert target is not None  # it was started
        del self.transfers[request]
        if request.finish_reason is not None:
            source.pages.free(transfer.abandoned_pages)
            target.pages.free(transfer.target_pages)
        else:
            source.pages.free(request.pages)
            request.pages = transfer.target_pages
            target.running.append(request)
        return request.finish_reason is None
