"""Functions that measure the papers' claims about prefill and decode apart, on this device.

Each function times batches that are made by hand: no scheduler is under test here. It plots the
times, checks the trend, and holds the paper's numbers against ours. To add a claim, write such a
function and list it in measured.py. A short one to begin with: s_f7.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F is a figure, T a table. Read first:
finding.py, conditions.py, bench.py, lab/measure/batch_times.py. Read next: measured_batches.py."""

from lab.measure.batch_times import Batch, TimedChunk, decodes, prompts
from lab.measure.capacity import Bounded
from lab.papers.bench import Bench
from lab.papers.checks import Condition, falls, less, rises
from lab.papers.conditions import has_tiles, ridge_above, ridge_below
from lab.papers.finding import Finding, Published
from lab.papers.plot import Line, Plot, over

BATCH_SIZES = (1, 2, 4, 8, 18)  # SARATHI, Figure 3
LLAMA_13B = "LLaMA-13B, A6000"  # the model and GPU of most of SARATHI's figures


def prefill_and_decodes(bench: Bench) -> dict[int, dict[str, list[Batch]]]:
    """{batch size: {"prefill": whole prompts, "decode": as many decodes}}, as in SARATHI's Figures
    3 and 4b. Large batches of prompts are left out where they take long."""
    length = bench.scaled(1024)
    max_prompts = bench.pick(gpu=18, cpu=4, quick=2)
    cases = {}
    for size in BATCH_SIZES:
        case = {"prefill": [prompts(size, length)]} if size <= max_prompts else {}
        cases[size] = case | {"decode": [decodes(size, length)]}
    return cases


def chunk_behind_a_token(tokens: int) -> Batch:
    """A chunk of so many tokens after one that is in the cache.

    On a CPU the first token of a page also costs the zeros that fill the page. A chunk after
    another token does not begin a page, so that its time depends on its tokens alone."""
    return (TimedChunk(tokens, tokens + 1),)


def s_f3(bench: Bench) -> Finding:
    """S-F3: a decode token costs many times what a prefill token does, in the linear layers.

    Sarathi-Serve's Figure 4 says so, too, for Mistral-7B."""
    length = bench.scaled(1024)
    by_operation = {
        kind: Plot(f"{kind} at {length:,}", "batch", "ms per token", ".3f", form="stacked")
        for kind in ("prefill", "decode")
    }
    per_token = Plot("total", x="batch", y="ms per token", spec=".3g", log="xy")
    linear = Plot("linear layers", x="batch", y="ms per token", spec=".3g", log="xy")
    shares = Plot("share of the time", x="batch", y="share", spec=".0%", log="x")
    for size, case in prefill_and_decodes(bench).items():
        times = bench.time_batches(case)
        for kind, time in times.items():
            per_token_ms = {name: ms / time.tokens for name, ms in time.parts_ms.items()}
            by_operation[kind].add_row(size, per_token_ms)
            per_token.add(kind, size, time.total_ms / time.tokens)
            linear.add(kind, size, time.products_ms / time.tokens)
            shares.add_row(
                size,
                {
                    f"{kind}: linear": time.products_ms / time.total_ms,
                    f"{kind}: attention": time.attention_ms / time.total_ms,
                    f"{kind}: other": time.other_ms / time.total_ms,
                },
            )
    decode = per_token["decode"]
    costs = in_prompt_tokens(per_token)
    linear_costs = in_prompt_tokens(linear)
    own_keys = "Decodes share the reading of weights, but each reads keys of its own."
    return Finding(
        plots=[*by_operation.values(), per_token, shares],
        checks=[
            falls(decode, because="All decodes of a batch share one reading of the weights."),
            less(
                10,
                costs,
                at="start",
                because="A decode reads all weights for one row, a prompt for all of its rows.",
                where=ridge_above(bench, 10),
            ),
            falls(shares["decode: linear"], because=own_keys),
            rises(shares["decode: attention"], because=own_keys),
        ],
        published=[
            Published("prefill tokens that cost a decode, B = 1", 200, costs, 1, LLAMA_13B),
            Published("prefill tokens that cost a decode, B = 2", 100, costs, 2, LLAMA_13B),
            Published("prefill tokens that cost a decode, B = 18", 16.7, costs, 18, LLAMA_13B),
            Published(
                "share of the other operations in a prefill",
                Bounded(0.05, "below"),
                shares["prefill: other"],
                1,
                LLAMA_13B,
            ),
            Published(
                "share of the linear layers in a prefill",
                Bounded(0.8, "at least"),
                shares["prefill: linear"],
                1,
                "Mistral-7B, A100",
                within=1.1,
            ),
            Published(
                "prefill tokens whose linear layers cost a decode's",
                128,
                linear_costs,
                1,
                "Mistral-7B, A100",
            ),
        ],
    )


def in_prompt_tokens(per_token: Plot) -> Line:
    """What a decode costs, in tokens of a prefill of one prompt.

    The tokens of several prompts cost as much, and take long to measure."""
    prefill_ms = per_token["prefill"].at(1)
    assert prefill_ms is not None
    plot = Plot(per_token.title, x="B =", y="prefill tokens", spec=".3g")
    decode = per_token["decode"]
    for size in decode.xs:
        plot.add("decode / prefill", size, over(decode.at(size), prefill_ms))
    return plot["decode / prefill"]


def s_f4a(bench: Bench) -> Finding:
    """S-F4a: a few hundred tokens of prefill use the device fully; it takes as many decodes.

    Sarathi-Serve's Figure 3 shows, for prompts of 1,024, that the throughput of decodes grows about
    as the batch does, and that of prefill hardly."""
    context = bench.scaled(1024)
    chunk_sizes = bench.pick(
        gpu=powers_of_two(4096), cpu=powers_of_two(2048), quick=[1, 16, 64, 256, 512]
    )
    decode_counts = {  # one layer leaves memory for more
        "one layer": bench.pick(
            gpu=powers_of_two(512), cpu=powers_of_two(512), quick=[1, 16, 64, 256]
        ),
        "all layers": bench.pick(gpu=powers_of_two(16), cpu=powers_of_two(64), quick=[]),
    }
    throughputs = []
    for name, counts in decode_counts.items():
        if not counts:
            continue
        layers = 1 if name == "one layer" else None
        throughput = Plot(name, x="tokens", y="tokens per ms", spec=".3g", log="xy")
        chunks = {str(tokens): [chunk_behind_a_token(tokens)] for tokens in chunk_sizes}
        for tokens, time in bench.time_batches(chunks, layers).items():
            throughput.add("prefill", int(tokens), time.tokens_per_ms)
        for count in counts:
            time = bench.time_batch([decodes(count, context)], layers)
            throughput.add("decode", count, time.tokens_per_ms)
        throughputs.append(throughput)
    prefill = throughputs[0]["prefill"]
    decode = throughputs[0]["decode"]
    share = Plot("one layer", x="tokens", y="of the throughput of 512")
    for tokens in prefill.xs:
        share.add("prefill", tokens, over(prefill.at(tokens), prefill.at(512)))
    few = Plot("one layer", x="of", y="share of the throughput")
    few.add("16 over 512 tokens", "prefill", over(prefill.at(16), prefill.at(512)))
    saturation = Plot("one layer", x="of", y="tokens", spec=",.0f")
    saturation.add("saturates", "prefill", saturation_of(prefill))
    saturation.add("saturates", "decode", saturation_of(decode))
    return Finding(
        plots=throughputs,
        checks=[
            *(
                rises(
                    throughput["decode"],
                    because="All decodes of a batch share one reading of the weights.",
                )
                for throughput in throughputs
            ),
            less(
                few["16 over 512 tokens"],
                0.5,
                because="A chunk of 16 rows reads all weights, as one of a thousand does.",
                where=ridge_above(bench, 32),
            ),
        ],
        published=[
            Published(
                "throughput of 256 tokens of prefill over that of 512",
                0.875,
                share["prefill"],
                256,
                LLAMA_13B,
            ),
            Published(
                "tokens at which prefill saturates",
                512,
                saturation["saturates"],
                "prefill",
                LLAMA_13B,
            ),
            Published(
                "batch at which decode saturates, contexts of 1,024",
                256,
                saturation["saturates"],
                "decode",
                LLAMA_13B,
            ),
            Published(
                "throughput of 512 tokens of prefill",
                180,
                throughputs[-1]["prefill"],
                512,
                LLAMA_13B,
                within=None,
                unit=" tokens/ms",
            ),
        ],
    )


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... up to `last`."""
    return [2**exponent for exponent in range(last.bit_length())]


def saturation_of(throughput: Line) -> float:
    """The fewest tokens with 87.5 % of the largest throughput: the paper calls that marginal."""
    known = throughput.known
    return min(float(x) for x, y in known.items() if y >= 0.875 * max(known.values()))


def s_f4b(bench: Bench) -> Finding:
    """S-F4b: decodes compute little for each byte that they read. Arithmetic; nothing is timed.

    The paper's ridge of an A6000, 53 flops per byte, is that without tensor cores. Its own Table 2
    has them: 1,024 tokens in 224.8 ms and four decodes in 44.28 ms make a ridge of 199 rows.
    Sarathi-Serve's Figure 5 shows the same over tokens, for LLaMA2-70B on four A100."""
    length = bench.scaled(1024)
    sizes = [*BATCH_SIZES, 64, 256, 512]
    operations = ("preproj", "attention", "postproj", "ffn_ln1", "ffn_ln2", "products")
    by_kind = {
        kind: Plot(
            f"{kind} at {length:,}",
            x="batch",
            y="flops per byte",
            spec=",.1f",
            log="xy",
            timed=False,
        )
        for kind in ("prefill", "decode")
    }
    for size in sizes:
        for kind, batch in (("prefill", prompts(size, length)), ("decode", decodes(size, length))):
            intensity = bench.intensities([batch])
            for operation in operations:
                by_kind[kind].add(operation, size, intensity[operation])
            by_kind[kind].add("ridge", size, bench.machine.flops_per_s / bench.machine.bytes_per_s)
    prefill = by_kind["prefill"]
    decode = by_kind["decode"]
    products_ratio = prefill["products"].over(decode["products"], spec=",.0fx")
    attention_ratio = prefill["attention"].over(decode["attention"], spec=",.0fx")
    n_embd = bench.model.config.n_embd
    is_wide = Condition("rows have 256 numbers or more", n_embd >= 256, f"they have {n_embd}")
    return Finding(
        plots=list(by_kind.values()),
        checks=[
            less(
                100,
                products_ratio,
                at="start",
                because="A prompt uses each weight for all its rows, a decode for one.",
                where=is_wide,
            ),
            less(
                10,
                attention_ratio,
                because="A prompt uses each key for all queries behind it, a decode for one.",
            ),
            rises(
                decode["products"],
                because="All decodes of a batch use each weight that is read.",
            ),
        ],
        published=[
            Published(
                "intensity of the linear layers, prefill over decode, B = 1",
                Bounded(100, "at least"),
                products_ratio,
                1,
                LLAMA_13B,
            ),
            Published(
                "intensity of attention, prefill over decode, B = 1",
                Bounded(100, "at least"),
                attention_ratio,
                1,
                LLAMA_13B,
            ),
            Published(
                "ridge of an A6000 without tensor cores",
                53,
                decode["ridge"],
                1,
                LLAMA_13B,
                within=None,
                unit=" flops per byte",
            ),
        ],
    )


def s_f7(bench: Bench) -> Finding:
    """S-F7: a chunk that is not a multiple of the tile costs as much as the next one that is.

    Sarathi-Serve's Figure 6: the linear layers of LLaMA2-70B take as long for few tokens as for
    one, and from the ridge on twice as long for twice the tokens."""
    sizes = [1, 4, 16, 32, 64, 96, 127, 128, 129, 130, 192, 255, 256, 257, 258, 384, 512, 1024]
    quick_sizes = [1, 16, 64, 127, 128, 129, 255, 256, 257, 512]
    sizes = bench.pick(gpu=sizes, cpu=sizes, quick=quick_sizes)
    chunks = {str(tokens): [chunk_behind_a_token(tokens)] for tokens in sizes}
    times = bench.time_batches(chunks, repeats=9)
    iteration = Plot("", x="tokens", y="ms", spec=".1f", ticks=(1, 128, 256, 384))
    for tokens in sizes:
        iteration.add_row(
            tokens,
            {
                "iteration": times[str(tokens)].total_ms,
                "linear layers": times[str(tokens)].products_ms,
            },
        )
    total = iteration["iteration"]
    products = iteration["linear layers"]
    steps = Plot("one token more", x="tokens", y="times as long")
    for tokens in (256, 257):
        steps.add("iteration", tokens, over(total.at(tokens), total.at(tokens - 1)))
    doubling = Plot("twice the tokens", x="tokens", y="times as long")
    for tokens in (128, 256, 512):
        half = tokens // 2
        doubling.add_row(
            tokens,
            {
                "iteration": over(total.at(tokens), total.at(half)),
                "linear layers": over(products.at(tokens), products.at(half)),
            },
        )
    few = Plot("16 tokens over one", x="tokens", y="times as long")
    few.add("linear layers", 16, over(products.at(16), products.at(1)))
    return Finding(
        plots=[iteration],
        checks=[
            less(
                1.1,
                steps["iteration"],
                at="end",
                because="The 257th row begins a third tile, which is computed whole.",
                where=has_tiles(bench),
            ),
            less(
                steps["iteration"],
                1.1,
                at="start",
                because="The 256th row fills a tile that is computed whole anyway.",
            ),
            less(
                few["linear layers"],
                2,
                because="Below the ridge the linear layers take as long as their weights to read.",
                where=ridge_above(bench, 16),
            ),
            less(
                1.5,
                doubling["linear layers"],
                at="end",
                because="Above the ridge each row is computed, and takes its time.",
                where=ridge_below(bench, 256),
            ),
        ],
        published=[
            Published("257 tokens over 256", 1.32, steps["iteration"], 257, LLAMA_13B),
            Published("256 tokens over 128", 1.27, doubling["iteration"], 256, LLAMA_13B),
            Published(
                "iteration of 257 tokens", 92.33, total, 257, LLAMA_13B, within=None, unit=" ms"
            ),
        ],
    )
