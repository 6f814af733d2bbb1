"""Sarathi-Serve with a token budget that changes. Read next: iteration_time.py, which predicts."""

import math

from errors import check_positive, check_whole
from policies.iteration_time import BatchShape, IterationTime
from scheduler import SarathiServe


class Dynamic(SarathiServe):
    """Algorithm 3 with as much prefill beside the decodes as is predicted to meet `tbt_slo`, of the
    time between tokens, in seconds (None: the budget is `chunk`), in whole tiles of `tile` tokens.
    `profile` is what the prediction begins with, [(BatchShape, seconds)], see slo.py."""

    def __init__(self, *args, tbt_slo=None, profile=(), tile=1, **options):
        super().__init__(*args, **options)
        self.tbt_slo = None if tbt_slo is None else check_positive("tbt_slo", tbt_slo)
        self.tile, self.iteration_time = check_whole("tile", tile, least=1), IterationTime(profile)
        self.past = math.inf  # the budget is for prefills that start behind at most so many tokens

    def observe(self, batch, seconds):
        self.iteration_time.observe(BatchShape.of(batch), seconds)

    def tbt_slo_of(self, decodes):
        """What the time between their tokens must not exceed, in seconds; None: the budget is C."""
        return self.tbt_slo

    def token_budget(self, decodes, prefills):
        """The decodes and the prefill that fits beside them: that of the slowest of `prefills`, or
        if there are none of the head of the queue. Where nobody can be stalled, max_len."""
        tbt_slo, self.past = self.tbt_slo_of(decodes), math.inf
        if tbt_slo is None:
            return self.chunk
        if not decodes:
            return self.max_len
        left_s = tbt_slo - (self.clock() - max([r.token_times[-1] for r in decodes]))
        self.past = max([r.num_computed for r in prefills] or [self.cached_tokens_of_head()])
        shape, fits = BatchShape.of_decodes(decodes), self.iteration_time.prefill_that_fits
        return len(decodes) + fits(left_s, shape, self.past, self.max_len, self.tile)

    def admit(self):
        """As in Scheduler, but who would start behind more tokens than `past` waits."""
        return super().admit() if self.cached_tokens_of_head() <= self.past else None
