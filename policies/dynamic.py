"""Sarathi-Serve with a token budget that changes. Read next: iteration_time.py, which predicts."""

import math
from collections.abc import Sequence
from typing import Any

from kv_cache import Pages
from policies.cards import card
from policies.iteration_time import BatchShape, IterationTime
from scheduler import Batch, Request, SarathiServe


@card(
    "dynamic",
    "#000000",
    note="sarathi-serve, with as much prefill as is predicted to meet an SLO",
)
class Dynamic(SarathiServe):
    """Algorithm 3 with as much prefill beside the decodes as the SLO allows.

    `tbt_slo` limits the time between tokens, in seconds; without it the budget is `chunk`. With it,
    a batch beside decodes has a multiple of `tile` tokens, or room for all of max_len: with
    `tile=8 max_len=8` a decode rides with chunks of 7 and 1 tokens. IterationTime predicts how long
    a batch takes. It may begin with a `profile`, a list of (BatchShape, seconds), see
    token_budget.py."""

    # The budget is right for prefills that start after at most so many tokens of their request.
    max_start: float = math.inf

    def __init__(
        self,
        pages: Pages,
        *,
        tbt_slo: float | None = None,
        profile: Sequence[tuple[BatchShape, float]] = (),
        tile: int = 1,
        **sizes: Any,
    ) -> None:
        super().__init__(pages, **sizes)
        self.tbt_slo = tbt_slo
        self.tile = tile
        self.iteration_time = IterationTime(profile)

    def observe(self, batch: Batch, seconds: float) -> None:
        self.iteration_time.observe(BatchShape.of(batch), seconds)

    def tbt_slo_of(self, decodes: list[Request]) -> float | None:
        """The limit of the time between tokens of these decodes, in seconds; None: no limit."""
        return self.tbt_slo

    def latest_start(self, prefills: list[Request]) -> int:
        """After how many tokens of its request the slowest prefill of the next batch starts.

        The first waiting request counts only if no prefill has begun."""
        if not prefills:
            return self.cached_tokens_of_head()
        return max([request.num_computed for request in prefills])

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        """The decodes, and the prefill that fits beside them.

        The prefill is that of the slowest of `prefills`, or else of the first waiting request.
        Without decodes nothing can stall, and the budget is max_len."""
        self.max_start = math.inf
        tbt_slo = self.tbt_slo_of(decodes)
        if tbt_slo is None:
            return self.chunk
        if not decodes:
            return self.max_len
        last_token_time = max(request.token_times[-1] for request in decodes)
        seconds_left = tbt_slo - (self.clock() - last_token_time)
        self.max_start = self.latest_start(prefills)
        prefill_tokens = self.iteration_time.prefill_that_fits(
            seconds_left,
            BatchShape.of_decodes(decodes),
            start=self.max_start,
            limit=self.max_len,
            tile=self.tile,
        )
        return len(decodes) + prefill_tokens

    def admit(self) -> Request | None:
        """As in Scheduler. A request that would start after more than `max_start` tokens waits."""
        if self.cached_tokens_of_head() > self.max_start:
            return None
        return super().admit()
