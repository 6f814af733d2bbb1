"""Where the gain goes that SARATHI's matrix products promise.

Decodes that ride with a chunk cost what rows of a whole prompt cost, and need no pass over the
weights of their own (SARATHI §4.4). So the products alone promise a gain over request-level, and a
run shows less. `explain_gain` runs the batches of both policies again: products, attention and the
whole apart. Read first: timing.py, metrics.steady. Read next: lab/commands/offline.py.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lab.measure import timing
from lab.measure.metrics import SteadyPart, steady
from lab.measure.offline_load import PolicyRun
from model import GPT, FlatBatch
from policies.observers import Iteration
from request import Chunk
from runtime.lone_chunk import lone_chunk
from runtime.runner import Runner
from sampling import SamplingParams

COMPARED = ("request-level", "sarathi")
CHUNK_REPEATS = 8  # the products of a full chunk are timed together, as one is too short

Piece = Callable[[], object]  # a part of an iteration, run again
PieceKey = tuple[str, str]  # (part, policy)


@dataclass(frozen=True)
class Step:
    """Milliseconds per token with one more cause counted."""

    step: str
    request_level_ms: float
    sarathi_ms: float

    @property
    def gain(self) -> float:
        """How many times faster sarathi is, so far."""
        return self.request_level_ms / self.sarathi_ms

    def to_json(self) -> dict[str, str | float]:
        """The step as --json writes it."""
        times = dict(zip(COMPARED, (self.request_level_ms, self.sarathi_ms), strict=True))
        return {"step": self.step, **times, "gain": self.gain}


@dataclass(frozen=True)
class GainExplanation:
    """The gain of sarathi over request-level, from what the products promise to the whole run."""

    parts: list[Step]  # each has all causes of those before
    run: Step  # measured, the pipeline full
    whole_run: Step  # measured, with ramp and tail
    busy: bool

    @property
    def steps(self) -> list[Step]:
        """All rows of the table."""
        return [*self.parts, self.run, self.whole_run]

    @property
    def difference(self) -> float:
        """How far the gain that the parts add up to is from that of the run, a fraction."""
        return self.parts[-1].gain / self.run.gain - 1

    def to_json(self) -> dict[str, object]:
        """The explanation as --json writes it."""
        steps = [step.to_json() for step in self.steps]
        return {"steps": steps, "difference": self.difference, "busy": self.busy}


@dataclass(frozen=True)
class TokenCost:
    """Milliseconds per token of a policy; each has all that is in those before."""

    products: float
    with_attention: float
    forward: float
    everything: float


def explain_gain(
    runner: Runner, runs: Mapping[str, PolicyRun], chunk: int, batch: int
) -> GainExplanation:
    """Run the batches of COMPARED again, part by part, and add the parts up.

    `runs` are those of a load of at least 2 B + 1 requests, with this chunk size and batch B. The
    runner's cache, with a page for each of B requests, is filled with noise.
    """
    runner.cache.data.normal_()
    full = {name: steady(runs[name].run.iterations, batch, rounds=1) for name in COMPARED}
    pieces: dict[PieceKey, list[Piece]] = {
        ("products", "chunk"): CHUNK_REPEATS * [products_alone(runner.model, chunk, batch)]
    }
    for name in COMPARED:
        prompt_lens = {c.request_id: len(c.prompt) for c in runs[name].run.completions}
        parts = pieces_of(runner, full[name].iterations, prompt_lens)
        pieces |= {(part, name): functions for part, functions in parts.items()}
    ms, is_busy = time_pieces(pieces, runner)
    slow, fast = (token_cost(ms, name, full[name]) for name in COMPARED)
    prompt_ms = ms["prompts", COMPARED[0]] / full[COMPARED[0]].iterations[0].prefill_tokens
    chunk_ms = ms["products", "chunk"] / CHUNK_REPEATS / chunk
    return GainExplanation(
        parts=[
            Step("products, all rows at a prompt's rate", slow.products, prompt_ms),
            Step("+ a chunk's own rate", slow.products, chunk_ms),
            Step("+ partly filled batches", slow.products, fast.products),
            Step("+ attention", slow.with_attention, fast.with_attention),
            Step("+ small operations", slow.forward, fast.forward),
            Step("+ sampling and scheduling", slow.everything, fast.everything),
        ],
        run=Step(
            "the run, its pipeline full",
            *(1e3 / measured(runs[name].tokens_per_s) for name in COMPARED),
        ),
        whole_run=Step(
            "the whole run, with ramp and tail",
            *(1e3 / measured(runs[name].summary.tokens_per_s) for name in COMPARED),
        ),
        busy=is_busy or any(runs[name].busy for name in COMPARED),
    )


def measured(value: float | None) -> float:
    """The value. Raises ValueError if there is none: the load has fewer than 2 B + 1 requests."""
    if value is None:
        raise ValueError("requests: too few for a full pipeline")
    return value


def pieces_of(
    runner: Runner, iterations: Sequence[Iteration], prompt_lens: Mapping[int, int]
) -> dict[str, list[Piece]]:
    """The parts of all iterations of a policy, each to be run alone: {part: [piece]}.

    The products of batches with decodes are "products", those of prefill alone "prompts".
    """
    model = runner.model
    pieces = defaultdict(list)
    for iteration in iterations:
        spans = spans_of(iteration, prompt_lens)
        rows = sum(span.length for span in spans)
        logit_rows = sum(span.yields_token for span in spans)
        logits = runner.cache.data.new_zeros(logit_rows, model.config.vocab_size)
        params = [SamplingParams()] * logit_rows
        positions = [0] * logit_rows
        products = "products" if iteration.decode_tokens else "prompts"
        pieces[products].append(products_alone(model, rows, logit_rows))
        pieces["attention"].append(timing.attention_alone(runner, spans))
        pieces["flatten"].append(partial(FlatBatch.build, spans, runner.attention))
        pieces["sampling"].append(partial(runner.fetch, logits, params, positions))
        pieces["all"].append(partial(runner.greedy, spans))
    return pieces


def spans_of(iteration: Iteration, prompt_lens: Mapping[int, int]) -> list[Chunk]:
    """The chunks of an iteration, each in a page of its own: all pages hold noise."""
    return [
        lone_chunk(
            pages=[page],
            start=start,
            tokens=[1] * length,
            yields_token=start + length >= prompt_lens[request_id],
        )
        for page, (request_id, start, length, _) in enumerate(iteration.chunks)
    ]


def products_alone(model: GPT, rows: int, logit_rows: int) -> Piece:
    """A function that runs the matrix products of an iteration alone, with those of the head."""
    heads = [model.head] if logit_rows and model.head else []
    run_layers = timing.bare_products(model, rows, timing.linear_layers(model))
    run_heads = timing.bare_products(model, logit_rows, heads)

    def run() -> None:
        run_layers()
        run_heads()

    return run


def time_pieces(
    pieces: Mapping[PieceKey, list[Piece]], runner: Runner
) -> tuple[Mapping[PieceKey, float], bool]:
    """The median milliseconds of each list of pieces, 0 for one that is not there; and whether the
    machine was busy.

    All are timed in turn, so that what slows the machine down is in both policies.
    """
    device = runner.model.device

    def run_all(runs: list[Piece]) -> None:
        for run in runs:
            run()

    variants = {key: partial(run_all, runs) for key, runs in sorted(pieces.items())}
    time_all = partial(timing.interleaved, variants, device, repeats=3, title="explain")
    timings, drift = timing.steadily(time_all, device, tries=1)
    ms: defaultdict[PieceKey, float] = defaultdict(float)
    for key, timed in timings.items():
        ms[key] = timed.ms
    return ms, drift > timing.BUSY


def token_cost(ms: Mapping[PieceKey, float], policy: str, full: SteadyPart) -> TokenCost:
    """What a token of a policy costs in a full pipeline, part by part."""
    products = ms["products", policy] + ms["prompts", policy]
    sampling = ms["sampling", policy]
    forward = ms["all", policy] - ms["flatten", policy] - sampling
    seconds = measured(full.seconds)
    tokens_per_s = measured(full.tokens_per_s)
    in_forward_s = sum(i.end - i.launch for i in full.iterations if i.launch is not None)
    outside = 1e3 * (seconds - in_forward_s)

    def per_token(total_ms: float) -> float:
        return total_ms / tokens_per_s / seconds

    return TokenCost(
        products=per_token(products),
        with_attention=per_token(products + ms["attention", policy]),
        forward=per_token(forward),
        everything=per_token(forward + sampling + outside),
    )
