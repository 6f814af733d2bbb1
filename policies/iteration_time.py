"""How long will an iteration take? The model behind the dynamic token budget. Plain Python.

Sarathi-Serve §4.3 finds the token budget that meets the TBT SLO once, from a profile (slo.py). But
the prefill that fits changes with the decodes, their contexts, what of the prompt is cached, and
the machine. So `IterationTime` predicts the time of a batch from what is in it, not from an average
per token, and learns from each that ran. Read next: dynamic.py."""

import math
from bisect import bisect_right
from typing import NamedTuple

KEEP = 0.98  # of what an iteration taught, after one more of its kind: about 50 of each count
PACE = 0.15  # of the last error that goes into the scale: that of about 7 iterations
SWEEPS = 2  # of the fit over its coefficients after each iteration; the next one goes on from there
FORGOTTEN = 1e-9  # squared weight below which a coefficient has no evidence and keeps its value
SPREAD_PACE = 0.05  # the spread is taken over about 20 iterations
OUTLIER = 3  # errors count as at most so many spreads
ALARM = 1.5  # times as many, at least, once a full batch took longer than that
ALLOWED = 0.005  # of the gaps between tokens: half of those that P99 lets be longer
LARGEST_MARGIN = 1.5  # of the predicted time
FIRST_PREFILL = 16  # tokens that may be tried before any were timed, or one tile


class BatchShape(NamedTuple):
    """What the time of a batch depends on."""

    prefill_tokens: int = 0  # in all chunks that are not decodes
    decodes: int = 0
    context_tokens: int = 0  # keys that the decodes read, all together, their own included
    prefill_pairs: int = 0  # (query, key) pairs of the chunks: each token, all before it and itself

    @classmethod
    def of(cls, batch):
        """That of a Batch, or of any (request, start, length) that have not moved on."""
        shape = cls.of_decodes([request for request, _, _ in batch if request.is_decoding])
        for request, start, length in batch:
            if not request.is_decoding:
                shape = shape.with_chunk(start, length)
        return shape

    @classmethod
    def of_decodes(cls, requests):
        """The shape of a batch in which each of these requests decodes."""
        return cls(0, len(requests), sum([len(request.tokens) for request in requests]))

    def with_chunk(self, past, length):
        """This and one more chunk of `length` tokens, after `past` tokens of its request."""
        pairs = self.prefill_pairs + length * past + length * (length + 1) // 2
        return BatchShape(self.prefill_tokens + length, self.decodes, self.context_tokens, pairs)


class IterationTime:
    """Predicts the seconds of an iteration, and learns from each one that is observed:

        scale * (base + a * prefill_tokens + b * decodes + c * context_tokens + d * prefill_pairs)

    The coefficients, at least 0, are the least squares fit to the iterations so far, each weighed
    by 1 / seconds, so that relative errors count. Older ones fade, but each kind, with and without
    prefill, only by its own: decode-only iterations leave in place what the last chunks taught. The
    fit is slow and gives the proportions. `scale` is quick: it follows a machine that is slowed
    down, and goes back to 1 as the fit catches up. An outlier moves neither by much.

    The margin is `caution` times `spread`, the relative standard deviation of the errors for hybrid
    batches. It is for a percentile over all gaps between tokens, and each decode of an iteration is
    one: the caution rises with those in hybrid batches that took longer than predicted and the
    margin, up to what they took, and falls with all others, by a two-hundredth as much.

    `profile`, a list of (BatchShape, seconds) to begin with, should reach past the SLO. Without
    one, learning starts at nothing, and `prefill_that_fits` goes up in steps."""

    def __init__(self, profile=()):
        self.scale, self.spread, self.caution = 1.0, 0.1, 3.0  # wide, before any error was seen
        self.largest_prefill = self.most_decodes = 0  # in one batch so far
        self._coefficients = [0.0] * 5
        # the normal equations, [products, target] of each feature, for decodes alone and for others
        self._equations = [[[0.0] * 6 for _ in range(5)] for _ in range(2)]
        for shape, seconds in profile:
            self._remember(shape, seconds, keep=1.0)  # a profile has no order
        self._fit(sweeps=500 if profile else 0)

    @property
    def law(self):
        """Seconds: the base, of a prefill token, a decode, a key of a decode, a pair of a chunk."""
        return [self.scale * coefficient for coefficient in self._coefficients]

    @property
    def margin(self):
        """How much longer than predicted an iteration may take, as a fraction."""
        return self.caution * self.spread

    def predict(self, shape):
        """Seconds that such a batch is expected to take; 0 before anything was observed."""
        base, prefill, decode, context, pair = self._coefficients
        seconds = base + prefill * shape.prefill_tokens + decode * shape.decodes
        seconds += context * shape.context_tokens + pair * shape.prefill_pairs
        return max(0.0, self.scale * seconds)

    def observe(self, shape, seconds):
        """Learn that a batch of this shape took so long, if a clock can have measured that."""
        if not 1e-9 <= seconds < math.inf:  # an engine may run on a clock that stands still
            return
        predicted = self.predict(shape)
        if predicted > 0:
            most = OUTLIER * self.spread
            error = max(-most, min(most, math.log(seconds / predicted)))
            self.scale *= math.exp(PACE * error)
            if shape.decodes:
                rise, excess, margin = ALARM**-ALLOWED, seconds / predicted - 1, self.margin
                if shape.prefill_tokens:  # what the margin is for; others are easier
                    rise = max(ALARM, excess / margin) if excess > margin else rise
                    deviation = 1.25 * abs(error)  # 1.25: standard over mean deviation
                    self.spread = max(0.01, self.spread + SPREAD_PACE * (deviation - self.spread))
                self.most_decodes = max(self.most_decodes, shape.decodes)
                caution = self.caution * rise ** (shape.decodes / self.most_decodes)
                self.caution = min(max(1.0, caution), LARGEST_MARGIN / self.spread)
        self._remember(shape, seconds, KEEP)
        self._fit(SWEEPS)

    def prefill_that_fits(self, seconds, shape, past, limit, tile=1):
        """The most tokens that a chunk may have, after `past` tokens of its request, for it and a
        batch of this shape to take at most `seconds`, as predicted and with the margin: at most
        `limit`, and whole tiles of the matrix products (§4.3), or all of `limit`.

        It takes the batch at most half as far again, or one tile, beyond the most prefill ever
        timed (16 tokens at first), so that who knows little finds out in steps."""
        slowest, most, limit = 1 + self.margin, self.largest_prefill, max(0, limit)
        time = lambda length: slowest * self.predict(shape.with_chunk(past, length))
        reach = max(3 * most // 2, most + tile, FIRST_PREFILL) - shape.prefill_tokens
        if limit <= reach and time(limit) <= seconds:
            return limit
        sizes = range(tile, min(limit, reach) + 1, tile)  # the time grows with the size
        return tile * bisect_right(sizes, seconds, key=time)

    def _remember(self, shape, seconds, keep):
        """Add a row to the normal equations of its kind; those that are there fade to `keep`."""
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        row = [feature / seconds for feature in (1, *shape)] + [1.0]  # the target: itself / seconds
        for x, equation in zip(row, self._equations[shape.prefill_tokens > 0]):
            equation[:] = [keep * total + x * y for total, y in zip(equation, row)]

    def _fit(self, sweeps):
        """Coordinate descent: each coefficient in turn where it is best beside the others."""
        w = self._coefficients
        equations = [[a + b for a, b in zip(*kinds)] for kinds in zip(*self._equations)]
        for _ in range(sweeps):
            for i, (*products, target) in enumerate(equations):
                if products[i] > FORGOTTEN:
                    rest = sum(a * b for a, b in zip(products, w)) - products[i] * w[i]
                    w[i] = max(0.0, (target - rest) / products[i])
