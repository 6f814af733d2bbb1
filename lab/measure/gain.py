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
from itertools import pairwise

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
CAUSES = (  # of both policies alike, each with all causes before it
    "+ partly filled batches",
    "+ attention",
    "+ small operations",
    "+ sampling and scheduling",
)

Piece = Callable[[], object]  # a part of an iteration, run again


@dataclass(frozen=True)
class Step:
    """Milliseconds per token with one more cause counted."""

    name: str
    request_level_ms: float
    sarathi_ms: float

    @property
    def gain(self) -> float:
        """How many times faster sarathi is, so far."""
        return self.request_level_ms / self.sarathi_ms


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

    @property
    def largest_loss(self) -> tuple[Step, Step]:
        """The step that lowers the gain most, behind the one before it."""
        return min(pairwise(self.parts), key=lambda steps: steps[1].gain / steps[0].gain)


def explain_gain(
    runner: Runner, runs: Mapping[str, PolicyRun], chunk: int, batch: int
) -> GainExplanation:
    """Run the batches of COMPARED again, part by part, and add the parts up.

    `runs` are those of a load of at least 2 B + 1 requests, with this chunk size and batch B. The
    runner's cache, with a page for each of B requests, is filled with noise. Raises ValueError for
    fewer requests."""
    runner.cache.data.normal_()
    full = {name: steady(runs[name].run.iterations, batch, rounds=1) for name in COMPARED}
    pieces = {("products", "chunk"): CHUNK_REPEATS * [products_alone(runner.model, chunk, batch)]}
    for name in COMPARED:
        prompt_lens = {c.id: c.prompt_len for c in runs[name].run.completions}
        for part, functions in pieces_of(runner, full[name].iterations, prompt_lens).items():
            pieces[part, name] = functions
    ms, is_busy = time_pieces(pieces, runner)
    slow, fast = (token_costs(ms, name, full[name]) for name in COMPARED)
    prompt_ms = ms["prompts", COMPARED[0]] / full[COMPARED[0]].iterations[0].prefill_tokens
    chunk_ms = ms["products", "chunk"] / CHUNK_REPEATS / chunk
    compared = [runs[name] for name in COMPARED]
    run_ms = [token_ms(row.tokens_per_s) for row in compared]
    whole_run_ms = [token_ms(row.summary.tokens_per_s) for row in compared]
    return GainExplanation(
        parts=[
            Step("products, all rows at a prompt's rate", slow[0], prompt_ms),
            Step("+ a chunk's own rate", slow[0], chunk_ms),
            *(Step(*row) for row in zip(CAUSES, slow, fast, strict=True)),
        ],
        run=Step("the run, its pipeline full", *run_ms),
        whole_run=Step("the whole run, with ramp and tail", *whole_run_ms),
        busy=is_busy or any(row.busy for row in compared),
    )


def token_ms(tokens_per_s: float | None) -> float:
    """The milliseconds of a token. Raises ValueError if the rate is not known."""
    if tokens_per_s is None:
        raise ValueError("requests: too few for a full pipeline")
    return 1e3 / tokens_per_s


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
        products = "products" if iteration.decode_tokens else "prompts"
        pieces[products].append(products_alone(model, rows, logit_rows))
        pieces["attention"].append(timing.attention_alone(runner, spans))
        pieces["flatten"].append(partial(FlatBatch.build, spans, runner.attention))
        pieces["sampling"].append(partial(runner.fetch, logits, params, [0] * logit_rows))
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
    return partial(run_all, [run_layers, run_heads])


def run_all(pieces: Sequence[Piece]) -> None:
    """Run some pieces, one after another."""
    for piece in pieces:
        piece()


def time_pieces(
    pieces: Mapping[tuple[str, str], list[Piece]], runner: Runner
) -> tuple[Mapping[tuple[str, str], float], bool]:
    """The median milliseconds of each list of pieces, {(part, policy): ms}, 0 for one that is not
    there; and whether the machine was busy.

    All are timed in turn, so that what slows the machine down is in both policies.
    """
    device = runner.model.device
    variants = {key: partial(run_all, pieces[key]) for key in sorted(pieces)}
    time_all = partial(timing.interleaved, variants, device, repeats=3, title="explain")
    timings, drift = timing.steadily(time_all, device, tries=1)
    ms = defaultdict(float, {key: timed.ms for key, timed in timings.items()})
    return ms, drift > timing.BUSY


def token_costs(
    ms: Mapping[tuple[str, str], float], policy: str, full: SteadyPart
) -> tuple[float, ...]:
    """What a token of a policy costs in a full pipeline, in milliseconds: with each of CAUSES."""
    products = ms["products", policy] + ms["prompts", policy]
    sampling = ms["sampling", policy]
    forward = ms["all", policy] - ms["flatten", policy] - sampling
    seconds = full.seconds or 0.0
    in_forward_s = sum(i.end - i.launch for i in full.iterations if i.launch is not None)
    outside = 1e3 * (seconds - in_forward_s)
    tokens = 1e3 * seconds / token_ms(full.tokens_per_s)
    causes = (products, products + ms["attention", policy], forward, forward + sampling + outside)
    return tuple(cause / tokens for cause in causes)
