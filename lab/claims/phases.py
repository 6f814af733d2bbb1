"""Claims about prefill and decode apart: what a token of each costs, and what that depends on.

Each function asks a lab for the times of batches that are made by hand: no scheduler is under test
here. A short one to begin with: s_3_1. To add a claim, write such a function and list it in
claims.py.

S is SARATHI, SS Sarathi-Serve; F is a figure, T a table, a number alone a section. Read first:
claim.py, labs.py, lab/measure/batch_times.py. Read next: batches.py."""

from dataclasses import replace

from lab.claims.checks import Condition, falls, less, rises
from lab.claims.claim import LLAMA_13B, MISTRAL_7B, Finding, claim
from lab.claims.labs import Lab
from lab.claims.table import Line, Table, X, Y, line, over
from lab.measure.batch_times import Batch, TimedChunk, decodes, prompts
from lab.measure.capacity import Bounded
from lab.simulator.cost_model import BYTES, matrices
from lab.simulator.devices import DEVICES, GEOMETRIES
from model import GPTConfig

BATCH_SIZES = (1, 2, 4, 8, 18)  # SARATHI, Figure 3
LESS_AT_256 = 0.125  # of the throughput of 512 tokens of prefill: the paper calls that marginal
SHARED = "All decodes of a batch share one reading of the weights."


@claim("Time per token of prefill and decode, by operation", seconds=(10, 95), covers=("SS-F4",))
def s_f3(lab: Lab) -> Finding:
    """S-F3: a decode token costs many times what a prefill token does, in the linear layers.

    Sarathi-Serve's Figure 4 says so, too, for Mistral-7B."""
    finding = Finding(LLAMA_13B)
    per_token, linear, shares = times_per_token(lab, finding)
    costs = in_prompt_tokens(per_token)
    own_keys = "Decodes share the reading of weights, but each reads keys of its own."
    finding.expect(falls(per_token["decode"]), SHARED)
    finding.expect(
        less(10, costs, at="start"),
        "A decode reads all weights for one row, a prompt for all of its rows.",
        lab.ridge_above(10),
    )
    length = lab.scaled(1024)
    cases = {
        "several prompts": [prompts(32, length // 32)],
        "one": [prompts(1, length)],
    }
    several, one = lab.time(cases).values()
    ratio = over(several.total_ms, one.total_ms)
    several_over_one = line("several prompts over one", {length: ratio})
    finding.expect(
        less(several_over_one, 2), "Rows of all prompts of a batch are rows of the same products."
    )
    finding.expect(falls(shares["decode: linear"]), own_keys)
    finding.expect(rises(shares["decode: attention"]), own_keys)
    published = {1: 200, 2: 100, 18: 16.7}  # batch -> tokens
    for size, paper in published.items():
        finding.publish(f"prefill tokens that cost a decode, B = {size}", paper, costs, size)
    a_twentieth = Bounded(0.05, "below")
    text = "share of the other operations in a prefill"
    finding.publish(text, a_twentieth, shares["prefill: other"], 1)
    four_fifths = Bounded(0.8, "at least")
    text = "share of the linear layers in a prefill"
    linear_share = shares["prefill: linear"]
    finding.publish(text, four_fifths, linear_share, 1, device=MISTRAL_7B, within=1.1)
    text = "prefill tokens whose linear layers cost a decode's"
    finding.publish(text, 128, in_prompt_tokens(linear), 1, device=MISTRAL_7B)
    return finding


def times_per_token(lab: Lab, finding: Finding) -> tuple[Table, Table, Table]:
    """Time prompts and as many decodes, over their number. Returns what a token takes in all and in
    the linear layers, and the shares of the operations."""
    length = lab.scaled(1024)
    max_prompts = lab.pick(18, cpu=4, quick=2)  # more take long
    unit = "ms per token"
    by_operation = {
        kind: finding.table(f"{kind} at {length:,}", "batch", unit, ".3f", form="stacked")
        for kind in ("prefill", "decode")
    }
    per_token = finding.table("total", "batch", unit, ".3g", "xy")
    shares = finding.table("share of the time", "batch", "share", ".0%", "x")
    linear = Table("linear layers", x="batch")
    for size in BATCH_SIZES:
        case = {"decode": [decodes(size, length)]}
        if size <= max_prompts:
            case = {"prefill": [prompts(size, length)]} | case
        for kind, time in lab.time(case).items():
            for name, ms in time.parts_ms.items():
                by_operation[kind].add(size, {name: ms / time.tokens})
            per_token.add(size, {kind: time.total_ms / time.tokens})
            linear.add(size, {kind: time.products_ms / time.tokens})
            operations_ms = {
                "linear": time.products_ms,
                "attention": time.attention_ms,
                "other": time.other_ms,
            }
            for name, ms in operations_ms.items():
                shares.add(size, {f"{kind}: {name}": ms / time.total_ms})
    return per_token, linear, shares


def in_prompt_tokens(per_token: Table) -> Line:
    """What a decode costs, in tokens of a prefill of as many prompts, or of one where these take
    too long to measure: the tokens of several prompts cost as much."""
    prefill = per_token["prefill"]
    decode = per_token["decode"]
    costs: dict[X, Y] = {}
    for batch, decode_ms in decode.values.items():
        prefill_ms = prefill.at(batch) or prefill.at(1)
        costs[batch] = over(decode_ms, prefill_ms)
    return line("decode / prefill", costs, title=per_token.title, x="B =", spec=".3g")


@claim(
    "Throughput of prefill and decode over their tokens, in one layer and in all",
    seconds=(5, 80),
    covers=("SS-F3",),
)
def s_f4a(lab: Lab) -> Finding:
    """S-F4a: a few hundred tokens of prefill use the device fully; it takes as many decodes.

    Sarathi-Serve's Figure 3 shows, for prompts of 1,024, that the throughput of decodes grows about
    as the batch does, and that of prefill hardly.

    The paper: about 180 tokens/ms from 512 on, and 12.5 % less at 256. In Table 2 40 layers take
    234.8 ms for 1,024 tokens, which are 174 for one. In the cost model 256 tokens are whole tiles,
    at full rate."""
    chunk_sizes = lab.pick(
        powers_of_two(4096),
        cpu=powers_of_two(2048),
        quick=[1, 16, 64, 256, 512],
    )
    one_layer = lab.pick(powers_of_two(512), quick=[1, 16, 64, 256])  # leaves memory for more
    all_layers = lab.pick(powers_of_two(16), cpu=powers_of_two(64), quick=[])
    finding = Finding(LLAMA_13B)
    add_throughput(lab, finding, "one layer", chunk_sizes, one_layer, layers=1)
    if all_layers:
        add_throughput(lab, finding, "all layers", chunk_sizes, all_layers)
    of_a_layer = finding.tables[0]
    title = of_a_layer.title
    prefill = of_a_layer["prefill"]
    of_512 = prefill.at(512)
    shares = {tokens: over(y, of_512) for tokens, y in prefill.values.items()}
    few = line("16 over 512 tokens", {"prefill": shares[16]}, title=title)
    saturations = {each.name: saturation_of(each) for each in of_a_layer}
    saturates = line("saturates", saturations, title=title, x="of", spec=",.0f")
    for table in finding.tables:
        finding.expect(rises(table["decode"]), SHARED)
    finding.expect(
        less(few, 0.5),
        "A chunk of 16 rows reads all weights, as one of a thousand does.",
        lab.ridge_above(32),
    )
    share = line("prefill", shares, title=title, x="tokens")
    text = "throughput of 256 tokens of prefill over that of 512"
    finding.publish(text, 1 - LESS_AT_256, share, 256)
    finding.publish("tokens at which prefill saturates", 512, saturates, "prefill")
    finding.publish("batch at which decode saturates, contexts of 1,024", 256, saturates, "decode")
    peak = 180
    published = {256: peak * (1 - LESS_AT_256), 512: peak}
    for tokens, paper in published.items():
        text = f"throughput of {tokens} tokens of prefill in one layer"
        finding.publish(text, paper, prefill, tokens, within=None, unit=" tokens/ms")
    return finding


def add_throughput(
    lab: Lab,
    finding: Finding,
    title: str,
    chunk_sizes: list[int],
    batch_sizes: list[int],
    layers: int | None = None,
) -> None:
    """Add a table of the throughput of chunks and of decodes, in so many layers or in all."""
    table = finding.table(title, "tokens", "tokens per ms", ".3g", "xy")
    chunks = first_chunks(lab, chunk_sizes)
    for tokens, time in lab.time(chunks, layers).items():
        table.add(int(tokens), {"prefill": time.tokens_per_ms})
    context = lab.scaled(1024)
    for count in batch_sizes:
        batch = decodes(count, context)
        times = lab.time({"batch": [batch]}, layers)
        table.add(count, {"decode": times["batch"].tokens_per_ms})


def first_chunks(lab: Lab, sizes: list[int]) -> dict[str, list[Batch]]:
    """Chunks of so many tokens, by their sizes, after as few as the lab can time them."""
    chunks = [TimedChunk(tokens, lab.cached_tokens + tokens) for tokens in sizes]
    return {str(chunk.tokens): [(chunk,)] for chunk in chunks}


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... up to `last`."""
    return [2**exponent for exponent in range(last.bit_length())]


def saturation_of(throughput: Line) -> float:
    """The fewest tokens with a throughput that is marginally below the largest."""
    tokens_per_ms = throughput.known
    threshold = (1 - LESS_AT_256) * max(tokens_per_ms.values())
    return min(float(x) for x, y in tokens_per_ms.items() if y >= threshold)


@claim(
    "Arithmetic intensity by operation, computed, beside the ridge of this device",
    seconds=(5, 10),
    covers=("SS-F5",),
)
def s_f4b(lab: Lab) -> Finding:
    """S-F4b: decodes compute little for each byte that they read. Arithmetic; nothing is timed.

    The paper's ridge of an A6000, 53 flops per byte, is that without tensor cores. Its own Table 2
    has them: 1,024 tokens in 224.8 ms and four decodes in 44.28 ms make a ridge of 199 rows.
    Sarathi-Serve's Figure 5 shows the same over tokens, for LLaMA2-70B on four A100."""
    length = lab.scaled(1024)
    ridge = lab.ridge * 2 / lab.model.dtype.itemsize  # in flops per byte
    finding = Finding(LLAMA_13B)
    for kind, batch_of in {"prefill": prompts, "decode": decodes}.items():
        title = f"{kind} at {length:,}"
        table = finding.table(title, "batch", "flops per byte", ",.1f", "xy", timed=False)
        for size in (*BATCH_SIZES, 64, 256, 512):
            intensity = lab.intensities([batch_of(size, length)])
            for name in ("preproj", "attention", "postproj", "ffn_ln1", "ffn_ln2", "products"):
                table.add(size, {name: intensity[name]})
            table.add(size, {"ridge": ridge})
    prefill, decode = finding.tables
    products = replace(prefill["products"] / decode["products"], spec=",.0fx")
    attention = replace(prefill["attention"] / decode["attention"], spec=",.0fx")
    n_embd = lab.model.config.n_embd
    finding.expect(
        less(100, products, at="start"),
        "A prompt uses each weight for all its rows, a decode for one.",
        Condition("rows have 256 numbers or more", n_embd >= 256, f"they have {n_embd}"),
    )
    finding.expect(
        less(10, attention), "A prompt uses each key for all queries behind it, a decode for one."
    )
    finding.expect(
        rises(decode["products"]), "All decodes of a batch use each weight that is read."
    )
    for name, ratio in (("the linear layers", products), ("attention", attention)):
        text = f"intensity of {name}, prefill over decode, B = 1"
        finding.publish(text, Bounded(100, "at least"), ratio, 1)
    text = "ridge of an A6000 without tensor cores"
    ridge_here = decode["ridge"]
    finding.publish(text, 53, ridge_here, 1, within=None, unit=" flops per byte")
    return finding


@claim(
    "Arithmetic intensity of 1 to 512 decodes, computed for LLaMA-13B on an A6000", seconds=(1, 1)
)
def s_3_1(lab: Lab) -> Finding:
    """S-3.1: only some 256 decodes compute as long as they read; 18 decodes a tenth of that.

    Computed for LLaMA-13B on an A6000, at the rates that SARATHI's Table 2 implies."""
    config = GEOMETRIES["llama-13b"]
    device = DEVICES["a6000"]
    ridge = device.flops_per_s / device.bytes_per_s
    finding = Finding(LLAMA_13B)
    axes = {
        "x": "decodes",
        "y": "flops per byte",
        "spec": ".3g",
        "log": "xy",
        "timed": False,
    }
    intensity = finding.table("of LLaMA-13B", **axes)
    over_ridge = finding.table(
        "over the ridge of an A6000", "decodes", "times", ".2f", "x", timed=False
    )
    of_this_model = finding.table("of the model here", **axes)
    name = "linear layers"
    attention = decode_attention_intensity(config)
    for batch in (*BATCH_SIZES, 64, 256, 512):
        linear = linear_intensity(config, batch)
        intensity.add(batch, {name: linear, "attention": attention, "ridge": ridge})
        over_ridge.add(batch, {name: linear / ridge})
        intensities = lab.intensities([decodes(batch, 1)])
        of_this_model.add(batch, {name: intensities["products"]})
    finding.expect(rises(intensity[name]), SHARED)
    finding.expect(rises(of_this_model[name]), SHARED)
    finding.expect(
        less(0.99, intensity["attention"], 1.01),
        "Each decode reads keys and values of its own, so that a batch shares nothing of them.",
    )
    linear_over_ridge = over_ridge[name]
    computing = Bounded(1.0, "at least")
    reading = Bounded(1.0, "below")
    text = "256 decodes, where they start to be compute-intensive"
    finding.publish(text, computing, linear_over_ridge, 256, within=1)
    finding.publish("18 decodes, memory-bound", reading, linear_over_ridge, 18, within=1)
    return finding


def linear_intensity(config: GPTConfig, tokens: int) -> float:
    """Flops per byte of the linear layers of a batch, in 16 bits. All is moved once: weights,
    inputs and outputs."""
    flops = 0
    moved_bytes = 0
    for rows, columns in matrices(config):
        flops += 2 * tokens * rows * columns
        moved_bytes += BYTES * (rows * columns + tokens * (rows + columns))
    return flops / moved_bytes


def decode_attention_intensity(config: GPTConfig) -> float:
    """Flops per byte of the attention of decodes, in 16 bits: two for each number of a key and a
    value, by each query head that shares it."""
    flops = 4 * config.n_head * config.head_dim
    kv_bytes = 2 * BYTES * config.n_kv_head * config.head_dim
    return flops / kv_bytes


@claim(
    "Time of an iteration, over its tokens: are there steps?", seconds=(15, 75), covers=("SS-F6",)
)
def s_f7(lab: Lab) -> Finding:
    """S-F7: a chunk that is not a multiple of the tile costs as much as the next one that is.

    Sarathi-Serve's Figure 6: the linear layers of LLaMA2-70B take as long for few tokens as for
    one, and from the ridge on twice as long for twice the tokens.

    The cost model has 4 ms for what is not in the operations of S-T2: these three times leave that
    on average. The steps are predicted."""
    sizes = lab.pick(
        [1, 4, 16, 32, 64, 96, 127, 128, 129, 130, 192, 255, 256, 257, 258, 384, 512, 1024],
        quick=[1, 16, 64, 127, 128, 129, 255, 256, 257, 512],
    )
    finding = Finding(LLAMA_13B)
    ticks = (1, 128, 256, 384)
    table = finding.table(x="tokens", y="ms", spec=".1f", ticks=ticks)
    chunks = first_chunks(lab, sizes)
    for tokens, time in lab.time(chunks, repeats=9).items():
        table.add(int(tokens), {"iteration": time.total_ms})
        table.add(int(tokens), {"linear layers": time.products_ms})
    iteration, linear = table
    doubling = {128: 64, 256: 128, 512: 256}
    one_less = {256: 255, 257: 256}
    step = over_fewer(iteration, "one token more", one_less)
    few_over_one = over_fewer(linear, "16 tokens over one", {16: 1})
    doubled_linear = over_fewer(linear, "twice the tokens", doubling)
    finding.expect(
        less(1.1, step, at="end"),
        "The 257th row begins a third tile, which is computed whole.",
        lab.has_tiles(),
    )
    finding.expect(
        less(step, 1.1, at="start"), "The 256th row fills a tile that is computed whole anyway."
    )
    finding.expect(
        less(few_over_one, 2),
        "Below the ridge the linear layers take as long as their weights to read.",
        lab.ridge_above(16),
    )
    finding.expect(
        less(1.5, doubled_linear, at="end"),
        "Above the ridge each row is computed, and takes its time.",
        lab.ridge_below(256),
    )
    finding.publish("257 tokens over 256", 1.32, step, 257)
    doubled = over_fewer(iteration, "twice the tokens", doubling)
    finding.publish("256 tokens over 128", 1.27, doubled, 256)
    published_ms = {128: 55, 256: 69.8, 257: 92.33}
    for tokens, paper_ms in published_ms.items():
        text = f"iteration of {tokens} tokens"
        finding.publish(
            text,
            paper_ms,
            iteration,
            tokens,
            within=None,
            unit=" ms",
            fitted=True,
        )
    return finding


def over_fewer(times: Line, title: str, pairs: dict[int, int]) -> Line:
    """How many times as long so many tokens take as fewer: {tokens: fewer tokens}."""
    ratios: dict[X, Y] = {}
    for tokens, fewer in pairs.items():
        ratios[tokens] = over(times.at(tokens), times.at(fewer))
    return line(times.name, ratios, title=title, x="tokens")
