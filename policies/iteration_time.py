"""How long will an iteration take? The model behind the dynamic token budget. Plain Python.

Sarathi-Serve §4.3 finds the token budget that meets the TBT SLO once, from a profile (see
token_budget.py). But the prefill that fits changes with the decodes, their contexts, the cached
part of the prompt, and the machine. So `IterationTime` predicts the time of a batch from its
contents, instead of an average per token. It learns from each batch that ran.

Read first: dynamic.py."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler import Request

KEEP = 0.98  # weight of an iteration after one more of its kind: about 50 of each kind count
PACE = 0.15  # share of the last error that goes into the scale, which follows about 7 iterations
SWEEPS = 2  # of the fit over its coefficients after each iteration; the next one goes on from there
PROFILE_SWEEPS = 500  # of the fit to a profile
FORGOTTEN = 1e-9  # squared weight below which a coefficient has no evidence and keeps its value
SPREAD_PACE = 0.05  # the spread is taken over about 20 iterations
STANDARD_OVER_MEAN = 1.25  # of normal errors: standard deviation over mean deviation
SMALLEST_SPREAD = 0.01
OUTLIER = 3  # errors count as at most so many spreads
ALARM = 1.5  # the caution grows by this factor, at least, if a full batch exceeds the margin
ALLOWED = 0.005  # share of the gaps between tokens that may exceed it: half of what P99 allows
LARGEST_MARGIN = 1.5  # of the predicted time
FIRST_PREFILL = 16  # tokens that may be tried before any were timed, or one tile


class BatchShape(NamedTuple):
    """The features of a batch on which its time depends."""

    prefill_tokens: int = 0  # in all chunks that are not decodes
    decodes: int = 0
    context_tokens: int = 0  # keys that the decodes read, all together, their own included
    prefill_pairs: int = 0  # (query, key) pairs of the chunks: each token with all up to itself

    @classmethod
    def of(cls, batch: Sequence[tuple[Request, int, int]]) -> "BatchShape":
        """The shape of a Batch, or of any chunks (request, start, length) that come next."""
        shape = cls.of_decodes([request for request, _, _ in batch if request.is_decoding])
        for request, start, length in batch:
            if not request.is_decoding:
                shape = shape.with_chunk(start, length)
        return shape

    @classmethod
    def of_decodes(cls, requests: Sequence[Request]) -> "BatchShape":
        """The shape of a batch in which each of these requests decodes."""
        context_tokens = sum([len(request.tokens) for request in requests])
        return cls(decodes=len(requests), context_tokens=context_tokens)

    def with_chunk(self, start: int, length: int) -> "BatchShape":
        """This shape with one more chunk: `length` tokens after `start` tokens of its request."""
        pairs = self.prefill_pairs + length * start + length * (length + 1) // 2
        return BatchShape(self.prefill_tokens + length, self.decodes, self.context_tokens, pairs)


class IterationTime:
    """Predicts the seconds of an iteration, and learns from each one that is observed:

        scale * (base + a * prefill_tokens + b * decodes + c * context_tokens + d * prefill_pairs)

    **Coefficients.** They are the least squares fit to the iterations so far, and at least 0. Each
    iteration has the weight 1 / seconds, so that relative errors count. Older iterations fade, but
    each kind, with and without prefill, only by its own. So iterations of decodes alone do not
    erase the lessons of the last chunks.

    **Scale.** The fit is slow and gives the proportions. The scale is quick: it follows a machine
    that slows down, and goes back to 1 as the fit catches up. An outlier moves neither by much.

    **Margin.** It is `caution` times `spread`, the relative standard deviation of the errors of
    hybrid batches. It serves a percentile over all gaps between tokens, and each decode of an
    iteration is one gap. The caution rises with the decodes in hybrid batches that took longer than
    the prediction and the margin. It falls with all others, by a two-hundredth as much.

    **Profile.** A list of (BatchShape, seconds) to begin with, which should reach beyond the SLO.
    Without one, nothing is known at first, and `prefill_that_fits` goes up in steps."""

    def __init__(self, profile: Iterable[tuple[BatchShape, float]] = ()) -> None:
        self.scale = 1.0
        self.spread = 0.1  # wide, before there are errors
        self.caution = 3.0
        self.largest_prefill = 0  # tokens in one batch so far
        self.most_decodes = 0  # in one batch so far
        self._coefficients = [0.0] * 5
        # The normal equations, one row for each coefficient: its feature's products with all
        # features and with the target. One set is of batches of decodes alone, the other of hybrid.
        self._decode_equations = [[0.0] * 6 for _ in range(5)]
        self._hybrid_equations = [[0.0] * 6 for _ in range(5)]
        profile = list(profile)
        for shape, seconds in profile:
            self._remember(shape, seconds, keep=1.0)  # a profile has no order
        if profile:
            self._fit(PROFILE_SWEEPS)

    @property
    def margin(self) -> float:
        """By which fraction an iteration may take longer than predicted."""
        return self.caution * self.spread

    def predict(self, shape: BatchShape) -> float:
        """Seconds that such a batch is expected to take; 0 before the first observation."""
        base, prefill, decode, context, pair = self._coefficients
        seconds = base + prefill * shape.prefill_tokens + decode * shape.decodes
        seconds += context * shape.context_tokens + pair * shape.prefill_pairs
        return self.scale * seconds

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a batch of this shape. A time that no clock can have measured is ignored."""
        if not 1e-9 <= seconds < math.inf:  # an engine may run on a clock that stands still
            return
        predicted = self.predict(shape)
        if predicted > 0:
            largest_error = OUTLIER * self.spread
            error = max(-largest_error, min(largest_error, math.log(seconds / predicted)))
            self.scale *= math.exp(PACE * error)  # follow the machine's speed
            if shape.decodes:
                self._learn_margin(shape, error, excess=seconds / predicted - 1)
        self._remember(shape, seconds, KEEP)
        self._fit(SWEEPS)

    def prefill_that_fits(
        self, seconds: float, shape: BatchShape, start: int, limit: int, tile: int = 1
    ) -> int:
        """How many tokens of a prefill fit into a batch of this shape that may take `seconds`.

        The chunk comes after `start` tokens of its request. Prediction and margin decide. The
        tokens of the whole batch are a multiple of `tile`, the tile of the matrix products (§4.3),
        or the result is 0 or `limit`.

        It is at most half as much again as the largest prefill that was ever timed, or one tile
        more (16 tokens at first). So the unknown is tried in steps."""
        slowest = 1 + self.margin
        largest = self.largest_prefill
        limit = max(0, limit)
        reach = max(3 * largest // 2, largest + tile, FIRST_PREFILL) - shape.prefill_tokens

        def slowest_seconds(length: int) -> float:
            return slowest * self.predict(shape.with_chunk(start, length))

        if limit <= reach and slowest_seconds(limit) <= seconds:
            return limit
        first = tile - (shape.decodes + shape.prefill_tokens) % tile
        sizes = range(first, min(limit, reach) + 1, tile)  # the time grows with the size
        fitting = bisect_right(sizes, seconds, key=slowest_seconds)
        return sizes[fitting - 1] if fitting else 0

    def _learn_margin(self, shape: BatchShape, error: float, excess: float) -> None:
        """Learn from a batch with decodes, which took `excess` longer than predicted."""
        factor = ALARM**-ALLOWED  # for the caution; the power is less if decodes are few
        if shape.prefill_tokens:  # the margin is for these; others are easier to predict
            if excess > self.margin:
                factor = max(ALARM, excess / self.margin)
            deviation = STANDARD_OVER_MEAN * abs(error)
            spread = self.spread + SPREAD_PACE * (deviation - self.spread)
            self.spread = max(SMALLEST_SPREAD, spread)
        self.most_decodes = max(self.most_decodes, shape.decodes)
        caution = self.caution * factor ** (shape.decodes / self.most_decodes)
        self.caution = min(max(1.0, caution), LARGEST_MARGIN / self.spread)

    def _remember(self, shape: BatchShape, seconds: float, keep: float) -> None:
        """Add a batch to the equations of its kind, of which the older part fades to `keep`."""
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        equations = self._hybrid_equations if shape.prefill_tokens else self._decode_equations
        features = [feature / seconds for feature in (1, *shape)]
        row = [*features, 1.0]  # the target is seconds / seconds
        for x, equation in zip(features, equations, strict=True):
            equation[:] = [keep * total + x * y for total, y in zip(equation, row, strict=True)]

    def _fit(self, sweeps: int) -> None:
        """Coordinate descent: set each coefficient in turn to its best value beside the others."""
        coefficients = self._coefficients
        pairs = zip(self._decode_equations, self._hybrid_equations, strict=True)
        equations = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        for _ in range(sweeps):
            for i, (*products, target) in enumerate(equations):
                if products[i] > FORGOTTEN:
                    terms = [a * b for a, b in zip(products, coefficients, strict=True)]
                    other_terms = sum(terms) - terms[i]
                    coefficients[i] = max(0.0, (target - other_terms) / products[i])
