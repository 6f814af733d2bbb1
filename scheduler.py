"""The policies: which tokens to compute next. Plain Python, no tensors.

A batch is a list of chunks. A whole prefill is a chunk that covers the prompt. A decode is a chunk
of length 1. So every scheduler of SARATHI and Sarathi-Serve is one function, `schedule()`, from the
waiting and running requests to a batch. All policies here serve requests in order of arrival and
never skip the first in the queue. Decodes may exceed the token budget.

policies/ has all others, and the names of all. Read first: request.py. Read next: bookkeeping.py,
what they share."""

import math
from typing import Any

from bookkeeping import Admission, Bookkeeping  # noqa: F401
from request import Batch, Chunk, Request  # noqa: F401


class Scheduler(Bookkeeping):
    """What policies are made of. A policy is a subclass that defines `schedule`.

    self.waiting, self.running   the queue, and the requests that have memory
    self.chunk                   C, the chunk size or token budget
    self.max_batch               B, the number of requests that may run at once
    self.max_len                 the length of the longest request, prompt and output"""

    cuts_prompts = False  # into chunks of at most `chunk` tokens: for reports
    # for policies/referee.py: a batch may leave out decodes it has no room for,
    drops_decodes = False
    # admit requests in another order than that of arrival,
    reorders = False
    # or read pages that it computes itself
    shares_in_batch = False
    only_decodes = False  # an instance of two pools, see lab/simulator/two_pools.py

    def grow_decodes(self) -> list[Request]:
        """The running requests that decode, each with a page for its next token.

        If memory runs out, running requests are preempted, the one of the highest rank first."""
        decodes = [request for request in self.running if request.is_decoding]
        for request in decodes:
            if request.num_computed == len(request.pages) * self.pages.page_size:
                self.grow(request, request.num_computed + 1)
        return [request for request in decodes if request.pages]

    def prefilling(self) -> list[Request]:
        """The running requests whose prompt is not yet computed to its end."""
        return [request for request in self.running if not request.is_decoding]

    def admit(self) -> Request | None:
        """Give the first waiting request its pages and let it run.

        Returns None if no request waits, or if there is no room for the first one. A policy with
        another order of the queue moves its choice to the front first, see policies/template.py."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        admission = self.room_for(request)
        if admission is None:
            return None
        self.pages.take(admission.cached_pages)
        new_pages = self.pages.allocate(admission.new_pages)
        assert new_pages is not None, "room_for() has counted pages that are not free"
        request.pages = admission.cached_pages + new_pages
        request.num_computed = len(admission.cached_pages) * self.pages.page_size
        request.cached_tokens += request.num_computed
        self.running.append(request)
        self.waiting.remove(request)
        if request.scheduled is None:
            request.scheduled = self.clock()
        return request

    def cached_tokens_of_head(self) -> int:
        """How many tokens of the first waiting request need not be computed."""
        if not self.waiting:
            return 0
        return len(self.plan_admission(self.waiting[0]).cached_pages) * self.pages.page_size


class RequestLevel(Scheduler):
    """FasterTransformer, Sarathi-Serve's Algorithm 1: a batch runs to its end, then the next."""

    def schedule(self) -> Batch:
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)  # the whole prompt the first time, then one token
        return batch


class Orca(Scheduler):
    """Iteration-level scheduling with hybrid batches: whole prompts join the running decodes."""

    most_prefills: float = math.inf  # that may begin in one batch

    def schedule(self) -> Batch:
        batch = Batch()
        admitted = 0
        while admitted < self.most_prefills and self.admit():
            admitted += 1
        for request in self.running:
            batch.add(request)  # max_len is reserved: no decode needs another page
        return batch


class OrcaBest(Orca):
    """SARATHI's best case for Orca (§5.2): one whole prompt at a time beside the decodes."""

    most_prefills = 1


class VLLM(Scheduler):
    """vLLM's scheduler of 2023, Sarathi-Serve's Algorithm 2: prompts first and alone."""

    watermark_percent = 1  # or the next decode would often preempt the request just admitted

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def schedule(self) -> Batch:
        batch = Batch(self.max_len)  # §5.1: max_len tokens in whole prompts
        while self.head_fits(batch) and (request := self.admit()):
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch

    def head_fits(self, batch: Batch) -> bool:
        """Whether the first waiting request has a prompt that fits into the batch uncut."""
        if not self.waiting:
            return False
        return len(self.waiting[0].tokens) - self.cached_tokens_of_head() <= batch.left


class Sarathi(Scheduler):
    """SARATHI §4.3, decode-maximal: all decodes and one chunk, `chunk` tokens together.

    A GPU multiplies matrices in tiles: if these are of 128 rows, 129 rows cost as much as 256
    (§4.4). So `chunk` is rounded down to a multiple of `tile` tokens, but not to 0."""

    cuts_prompts = True

    def __init__(self, *args: Any, tile: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budget = self.chunk // tile * tile or self.chunk

    def schedule(self) -> Batch:
        batch = Batch(self.budget)
        batch.add_decodes(self.grow_decodes())
        if batch.left > 0:
            prefills = self.prefilling()
            request = prefills[0] if prefills else self.admit()
            if request:
                batch.add(request)
        return batch


class SarathiServe(Scheduler):
    """Sarathi-Serve's Algorithm 3, stall-free: decodes first, then prefills in what is left."""

    cuts_prompts = True
    watermark_percent = 1

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        """How many tokens a batch with these decodes may have; `prefills` have begun before."""
        return self.chunk

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        prefills = self.prefilling()
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)  # a running decode never waits
        for request in prefills:
            batch.add(request)  # finish what was started
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)  # then let new requests in
        return batch
