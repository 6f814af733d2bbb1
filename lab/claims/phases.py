"""Claims about prefill and decode apart: what a token of each costs, and what that depends on.

Each function asks a lab for the times of batches that are made by hand: no scheduler is under test
here. A short one to begin with: s_3_1. To add a claim, write such a function and list it in
claims.py.

S is SARATHI, SS Sarathi-Serve; F is a figure, T a table, a number alone a section. Read first:
claim.py, labs.py, lab/measure/batch_times.py. Read next: batches.py."""

from lab.claims.checks import Condition, falls, less, rises
from lab.claims.claim import LLAMA_13B, MISTRAL_7B, Finding, claim
from lab.claims.labs import Lab
from lab.claims.table import Line, Table, over
from lab.measure.batch_times import Batch, TimedChunk, decodes, prompts
from lab.measure.capacity import Bounded
from lab.simulator.cost_model import BYTES, matrices
from lab.simulator.devices import DEVICES, GEOMETRIES
from model import GPTConfig

BATCH_SIZES = (1, 2, 4, 8, 18)  # SARATHI, Figure 3
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
    finding.expect(falls(shares["decode: linear"]), own_keys)
    finding.expect(rises(shares["decode: attention"]), own_keys)
    for size, paper in {1: 200, 2: 100, 18: 16.7}.items():
        finding.publish(f"prefill tokens that cost a decode, B = {size}", paper, costs, size)
    finding.publish(
        "share of the other operations in a prefill",
        Bounded(0.05, "below"),
        shares["prefill: other"],
        at=1,
    )
    finding.publish(
        "share of the linear layers in a prefill",
        Bounded(0.8, "at least"),
        shares["prefill: linear"],
        at=1,
        device=MISTRAL_7B,
        within=1.1,
    )
    finding.publish(
        "prefill tokens whose linear layers cost a decode's",
        128,
        in_prompt_tokens(linear),
        at=1,
        device=MISTRAL_7B,
    )
    return finding


def times_per_token(lab: Lab, finding: Finding) -> tuple[Table, Table, Table]:
    """Time prompts and as many decodes, over their number. Returns what a token takes in all and in
    the linear layers, and the shares of the operations."""
    length = lab.scaled(1024)
    max_prompts = lab.pick(gpu=18, cpu=4, quick=2)  # more take long
    by_operation = {
        kind: finding.table(
            f"{kind} at {length:,}", x="batch", y="ms per token", spec=".3f", form="stacked"
        )
        for kind in ("prefill", "decode")
    }
    per_token = finding.table("total", x="batch", y="ms per token", spec=".3g", log="xy")
    shares = finding.table("share of the time", x="batch", y="share", spec=".0%", log="x")
    linear = Table("linear layers", x="batch")
    for size in BATCH_SIZES:
        case = {"prefill": [prompts(size, length)]} if size <= max_prompts else {}
        case["decode"] = [decodes(size, length)]
        for kind, time in lab.time(case).items():
            tokens = time.tokens
            by_operation[kind].add(size, {name: ms / tokens for name, ms in time.parts_ms.items()})
            per_token.add(size, {kind: time.total_ms / tokens})
            linear.add(size, {kind: time.products_ms / tokens})
            parts = {"linear": time.products_ms, "attention": time.attention_ms}
            parts["other"] = time.other_ms
            shares.add(size, {f"{kind}: {part}": ms / time.total_ms for part, ms in parts.items()})
    return per_token, linear, shares


def in_prompt_tokens(per_token: Table) -> Line:
    """What a decode costs, in tokens of a prefill of as many prompts, or of one where these take
    too long to measure: the tokens of several prompts cost as much."""
    table = Table(per_token.title, x="B =", y="prefill tokens", spec=".3g")
    prefill = per_token["prefill"]
    for size, decode_ms in per_token["decode"].values.items():
        prefill_ms = prefill.at(size) or prefill.at(1)
        table.add(size, {"decode / prefill": over(decode_ms, prefill_ms)})
    return table["decode / prefill"]


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
    context = lab.scaled(1024)
    quick_sizes = [1, 16, 64, 256, 512]
    chunk_sizes = lab.pick(gpu=powers_of_two(4096), cpu=powers_of_two(2048), quick=quick_sizes)
    one_layer = lab.pick(gpu=powers_of_two(512), quick=[1, 16, 64, 256])  # leaves memory for more
    all_layers = lab.pick(gpu=powers_of_two(16), cpu=powers_of_two(64), quick=[])
    finding = Finding(LLAMA_13B)
    for name, layers, counts in (("one layer", 1, one_layer), ("all layers", None, all_layers)):
        if not counts:
            continue
        table = finding.table(name, x="tokens", y="tokens per ms", spec=".3g", log="xy")
        chunks = {str(tokens): [first_chunk(lab, tokens)] for tokens in chunk_sizes}
        for tokens, time in lab.time(chunks, layers).items():
            table.add(int(tokens), {"prefill": time.tokens_per_ms})
        for count in counts:
            times = lab.time({"batch": [decodes(count, context)]}, layers)
            table.add(count, {"decode": times["batch"].tokens_per_ms})
    prefill = finding.tables[0]["prefill"]
    share = Table("one layer", x="tokens")
    for tokens in prefill.table.xs:
        share.add(tokens, {"prefill": over(prefill.at(tokens), prefill.at(512))})
    few = Table("one layer", x="of")
    few.add("prefill", {"16 over 512 tokens": share["prefill"].at(16)})
    saturation = Table("one layer", x="of", y="tokens", spec=",.0f")
    for kind in ("prefill", "decode"):
        saturation.add(kind, {"saturates": saturation_of(finding.tables[0][kind])})
    saturates = saturation["saturates"]
    for table in finding.tables:
        finding.expect(rises(table["decode"]), SHARED)
    finding.expect(
        less(few["16 over 512 tokens"], 0.5),
        "A chunk of 16 rows reads all weights, as one of a thousand does.",
        lab.ridge_above(32),
    )
    finding.publish(
        "throughput of 256 tokens of prefill over that of 512", 0.875, share["prefill"], 256
    )
    finding.publish("tokens at which prefill saturates", 512, saturates, "prefill")
    finding.publish("batch at which decode saturates, contexts of 1,024", 256, saturates, "decode")
    for tokens, paper in {256: 180 * (1 - 0.125), 512: 180}.items():
        finding.publish(
            f"throughput of {tokens} tokens of prefill in one layer",
            paper,
            prefill,
            tokens,
            within=None,
            unit=" tokens/ms",
        )
    return finding


def first_chunk(lab: Lab, tokens: int) -> Batch:
    """A chunk of so many tokens, after as few as the lab can time it."""
    return (TimedChunk(tokens, lab.cached_tokens + tokens),)


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... up to `last`."""
    return [2**exponent for exponent in range(last.bit_length())]


def saturation_of(throughput: Line) -> float:
    """The fewest tokens with 87.5 % of the largest throughput: the paper calls that marginal."""
    known = throughput.known
    return min(float(x) for x, y in known.items() if y >= 0.875 * max(known.values()))


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
    operations = ("preproj", "attention", "postproj", "ffn_ln1", "ffn_ln2", "products")
    ridge = lab.ridge * 2 / lab.model.dtype.itemsize  # in flops per byte
    finding = Finding(LLAMA_13B)
    for kind, batch_of in (("prefill", prompts), ("decode", decodes)):
        table = finding.table(
            f"{kind} at {length:,}",
            x="batch",
            y="flops per byte",
            spec=",.1f",
            log="xy",
            timed=False,
        )
        for size in (*BATCH_SIZES, 64, 256, 512):
            intensity = lab.intensities([batch_of(size, length)])
            table.add(size, {name: intensity[name] for name in operations} | {"ridge": ridge})
    prefill, decode = finding.tables
    products = prefill["products"].over(decode["products"], spec=",.0fx")
    attention = prefill["attention"].over(decode["attention"], spec=",.0fx")
    n_embd = lab.model.config.n_embd
    is_wide = Condition("rows have 256 numbers or more", n_embd >= 256, f"they have {n_embd}")
    finding.expect(
        less(100, products, at="start"),
        "A prompt uses each weight for all its rows, a decode for one.",
        is_wide,
    )
    finding.expect(
        less(10, attention), "A prompt uses each key for all queries behind it, a decode for one."
    )
    finding.expect(
        rises(decode["products"]), "All decodes of a batch use each weight that is read."
    )
    hundred = Bounded(100, "at least")
    finding.publish(
        "intensity of the linear layers, prefill over decode, B = 1", hundred, products, 1
    )
    finding.publish("intensity of attention, prefill over decode, B = 1", hundred, attention, 1)
    finding.publish(
        "ridge of an A6000 without tensor cores",
        53,
        decode["ridge"],
        at=1,
        within=None,
        unit=" flops per byte",
    )
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
    unit = {"x": "decodes", "y": "flops per byte", "spec": ".3g", "log": "xy", "timed": False}
    intensity = finding.table("of LLaMA-13B", **unit)
    over_ridge = finding.table(
        "over the ridge of an A6000", x="decodes", y="times", spec=".2f", log="x", timed=False
    )
    of_this_model = finding.table("of the model here", **unit)
    for batch in (1, 2, 4, 8, 18, 64, 256, 512):
        linear = linear_intensity(config, batch)
        attention = decode_attention_intensity(config)
        intensity.add(batch, {"linear layers": linear, "attention": attention, "ridge": ridge})
        over_ridge.add(batch, {"linear layers": linear / ridge})
        products = lab.intensities([decodes(batch, 1)])["products"]
        of_this_model.add(batch, {"linear layers": products})
    compared = over_ridge["linear layers"]
    finding.expect(rises(intensity["linear layers"]), SHARED)
    finding.expect(rises(of_this_model["linear layers"]), SHARED)
    finding.expect(
        less(0.99, intensity["attention"], 1.01),
        "Each decode reads keys and values of its own, so that a batch shares nothing of them.",
    )
    finding.publish(
        "256 decodes, where they start to be compute-intensive",
        Bounded(1.0, "at least"),
        compared,
        256,
        within=1,
    )
    finding.publish("18 decodes, memory-bound", Bounded(1.0, "below"), compared, 18, within=1)
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
    sizes = [1, 4, 16, 32, 64, 96, 127, 128, 129, 130, 192, 255, 256, 257, 258, 384, 512, 1024]
    sizes = lab.pick(gpu=sizes, quick=[1, 16, 64, 127, 128, 129, 255, 256, 257, 512])
    chunks = {str(tokens): [first_chunk(lab, tokens)] for tokens in sizes}
    times = lab.time(chunks, repeats=9)
    finding = Finding(LLAMA_13B)
    iteration = finding.table(x="tokens", y="ms", spec=".1f", ticks=(1, 128, 256, 384))
    for tokens in sizes:
        time = times[str(tokens)]
        iteration.add(tokens, {"iteration": time.total_ms, "linear layers": time.products_ms})

    def over_fewer(title: str, pairs: dict[int, int]) -> Table:
        """How many times as long so many tokens take as fewer: {tokens: fewer tokens}."""
        table = Table(title, x="tokens")
        for tokens, fewer in pairs.items():
            lines = iteration.all_lines()
            table.add(tokens, {line.name: over(line.at(tokens), line.at(fewer)) for line in lines})
        return table

    step = over_fewer("one token more", {256: 255, 257: 256})["iteration"]
    doubling = over_fewer("twice the tokens", {128: 64, 256: 128, 512: 256})
    few = over_fewer("16 tokens over one", {16: 1})["linear layers"]
    twice = less(1.5, doubling["linear layers"], at="end")
    finding.expect(
        less(1.1, step, at="end"),
        "The 257th row begins a third tile, which is computed whole.",
        lab.has_tiles(),
    )
    finding.expect(
        less(step, 1.1, at="start"), "The 256th row fills a tile that is computed whole anyway."
    )
    finding.expect(
        less(few, 2),
        "Below the ridge the linear layers take as long as their weights to read.",
        lab.ridge_above(16),
    )
    finding.expect(
        twice, "Above the ridge each row is computed, and takes its time.", lab.ridge_below(256)
    )
    total = iteration["iteration"]
    finding.publish("257 tokens over 256", 1.32, step, 257)
    finding.publish("256 tokens over 128", 1.27, doubling["iteration"], 256)
    for tokens, paper_ms in {128: 55, 256: 69.8, 257: 92.33}.items():
        finding.publish(
            f"iteration of {tokens} tokens", paper_ms, total, tokens, within=None, unit=" ms"
        )
    return finding
