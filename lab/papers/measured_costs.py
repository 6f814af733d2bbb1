"""Functions that measure what decodes and chunks cost each other in a hybrid batch, on this device.

Each function times batches that are made by hand: no scheduler is under test here. Two of them hold
posts against the device, where these contradict themselves or the paper that they tell of.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers, C a Chinese post, "SARATHI 之 Chunked
Prefill"; F is a figure. Read first: finding.py, conditions.py, bench.py and measured_batches.py.
Read next: measured.py."""

from lab.measure.batch_times import TimedChunk, decodes
from lab.measure.capacity import Bounded
from lab.papers.bench import Bench
from lab.papers.checks import falls, less, rises
from lab.papers.conditions import ridge_above, ridge_below, riding_pays
from lab.papers.finding import Finding, Published
from lab.papers.measured_batches import request_level_over_sarathi
from lab.papers.measured_phases import LLAMA_13B
from lab.papers.plot import Plot, over


def s_f10b(bench: Bench) -> Finding:
    """S-F10b: chunks of 512 save less in the linear layers than chunks of 256: fewer decodes ride.

    The lower half of Figure 10. At P:D = C / (B - 1) a prompt of two chunks has half as many
    decodes as one of four, and only decodes are made cheaper. The 1.6x is of the upper half."""
    quarters = request_level_over_sarathi(bench, pieces=4).ratios
    halves = request_level_over_sarathi(bench, pieces=2).ratios
    linear = Plot("linear layers", x="batch", y="times less")
    for batch in halves.xs:
        linear.add_row(
            batch,
            {
                "chunks of 256": quarters["linear"].at(batch),
                "chunks of 512": halves["linear"].at(batch),
            },
        )
    attention = halves["attention"]
    ffn = halves["ffn_ln1"]
    first = int(halves.xs[0])
    length = bench.scaled(1024)
    pays = riding_pays(bench, first, length // 2)
    half_ride = "Half as many decodes are spared a reading of the weights."
    same_keys = "Even four pieces would read the keys of a prompt 2.5 times at most."
    return Finding(
        plots=[halves, linear],
        checks=[
            less(
                linear["chunks of 512"],
                linear["chunks of 256"],
                at="start",
                because=half_ride,
                where=ridge_below(bench, length // 4),
            ),
            less(1.02, linear["chunks of 512"], because=half_ride, where=pays),
            less(0.4, attention, because=same_keys),
        ],
        published=[
            Published("ffn in chunks of 256, up to", 1.6, quarters["ffn_ln1"], first, LLAMA_13B),
            Published("ffn in chunks of 512", Bounded(1.6, "below"), ffn, first, LLAMA_13B),
        ],
    )


def ss_f9b(bench: Bench) -> Finding:
    """SS-F9b: a chunk makes decodes wait for less, relative to their time, the more they read.

    The caption of Figure 9: the relative impact of a chunk falls with batch size and context."""
    short = bench.scaled(512)
    contexts = [short, 4 * short]
    batch_sizes = bench.pick(gpu=[2, 6, 18], cpu=[2, 8, 32], quick=[2, 16])
    budget = bench.scaled(256)
    plot = Plot(
        "a batch with a chunk over the decodes alone",
        x="decodes",
        y="times as long",
        log="x",
    )
    for context in contexts:
        for size in batch_sizes:
            riding = decodes(size, context)
            chunk = TimedChunk(budget - size, short)
            times = bench.time_batches({"alone": [riding], "chunk": [(chunk, *riding)]})
            ratio = times["chunk"].total_ms / times["alone"].total_ms
            plot.add(f"context {context:,}", size, ratio)
    at_short, at_long = plot.all_lines()
    return Finding(
        plots=[plot],
        checks=[
            falls(at_long, because="More decodes take longer, and leave the chunk fewer tokens."),
            less(
                at_long,
                at_short.times(1.05),
                at="end",
                because="Decodes at a longer context read more keys; the chunk does not.",
            ),
        ],
        published=[
            Published(
                "with a chunk over decodes alone, at most: a reader's note to Figure 9",
                3,
                at_short,
                batch_sizes[0],
                within=None,
            )
        ],
    )


# The post's table of token budgets: prompt tokens beside 32 decodes -> ms of an iteration of a 70B
# model on an H100. It allows 2 * 1.7e9 * 80 flops a token, of 136e9 parameters, at 800 TFLOP/s.
BUDGET_TABLE_MS = {0: 21, 128: 72, 256: 126, 512: 237, 1024: 460}
TIMELINE_MS = {0: 30, 256: 35}  # its timeline of chunks of 256, the same model


def b_3(bench: Bench) -> Finding:
    """B-3: an iteration takes longer the more prompt tokens it has, from the ridge on.

    The post contradicts itself: a chunk of 256 adds 105 ms to 21 in its table of token budgets, and
    5 ms to 30 in its timeline (B-2). The table counts 1.7B parameters a layer, 136B of a 70B model,
    and no reading of weights: 10.9 ms for the products of 32 rows, a fifth of those of 160, where
    140 GB take 42 ms at an H100's 3.35 TB/s."""
    context = bench.scaled(512)
    riding = decodes(32, context)
    ms = Plot("an iteration with 32 decodes", x="prompt tokens", y="ms", spec=".1f")
    times_as_long = Plot("over 32 decodes alone", x="prompt tokens", y="times")
    products = Plot("products of 160 rows over those of 32", x="", y="times")
    cases = {"0": [riding]}
    for tokens in BUDGET_TABLE_MS:
        if tokens:
            chunk = TimedChunk(tokens, tokens)
            cases[str(tokens)] = [(chunk, *riding)]
    times = bench.time_batches(cases)
    for tokens, table_ms in BUDGET_TABLE_MS.items():
        time = times[str(tokens)]
        ms.add("here", tokens, time.total_ms)
        times_as_long.add_row(
            tokens,
            {
                "here": over(time.total_ms, times["0"].total_ms),
                "the post's table": table_ms / BUDGET_TABLE_MS[0],
            },
        )
        timeline_ms = TIMELINE_MS.get(tokens)
        times_as_long.add("the post's timeline", tokens, over(timeline_ms, TIMELINE_MS[0]))
    products.add("here", "rows", over(times["128"].products_ms, times["0"].products_ms))
    here = times_as_long["here"]
    return Finding(
        plots=[times_as_long, ms, products],
        checks=[
            rises(here, because="Each token is a row more for all products."),
            less(
                products["here"],
                4.9,
                because="The weights are read once, for 32 rows or for five times as many.",
                where=ridge_above(bench, 32),
            ),
        ],
        published=[
            Published("256 tokens beside 32 decodes, its table", 126 / 21, here, 256, "70B, H100"),
            Published(
                "256 tokens beside 32 decodes, its timeline",
                35 / 30,
                here,
                256,
                "70B",
                within=None,
            ),
            Published("1,024 tokens, its table", 460 / 21, here, 1024, "70B, H100"),
            Published("32 decodes alone", 21, ms["here"], 0, "70B, H100", within=None, unit=" ms"),
        ],
    )


def c_1(bench: Bench) -> Finding:
    """C-1: riding saves a decode its reading of the weights, not that of its keys and values.

    The Chinese post says that decodes become cheaper by reusing the KV cache of the chunk, and that
    the load of their own is spread over chunks. SARATHI says neither (section 4.3.1): attention
    costs as before, 1.73 ms a decode riding and 1.42 alone in its Table 2; linear layers cost a
    decode 11.07 ms alone and nothing that can be measured riding."""
    chunk = bench.scaled(256)
    batches = bench.pick(  # {context: the largest batch of S-F8}
        gpu={1024: 18, 2048: 10, 3072: 6},
        cpu={512: 18, 1024: 18, 2048: 18},
        quick={256: 18, 512: 18},
    )
    riding_over_alone = Plot("a decode riding over alone", x="context", y="times", spec=".2f")
    for context, batch in batches.items():
        table = bench.decode_maximal(context=context, batch=batch, chunk=chunk)
        alone = table.decode_only
        hybrid = table.decode_maximal
        prefill = table.prefill_only
        riding = batch - 1
        attention_ms = (hybrid.attention_ms - prefill.attention_ms) / riding
        products_ms = (hybrid.products_ms - prefill.products_ms) / riding
        riding_over_alone.add_row(
            context,
            {
                "attention": over(attention_ms, alone.attention_ms / batch),
                "linear": over(products_ms, alone.products_ms / batch),
            },
        )
    attention = riding_over_alone["attention"]
    linear = riding_over_alone["linear"]
    longest = max(batches)
    own_keys = "A decode reads its own keys and values, whoever shares its batch."
    return Finding(
        plots=[riding_over_alone],
        checks=[
            less(0.5, attention, 2, at="end", because=own_keys),
            less(
                linear,
                0.8,
                because="Riding decodes are rows beside a chunk that reads the weights anyway.",
                where=ridge_above(bench, max(batches.values())),
            ),
        ],
        published=[
            Published(
                "attention of a decode, riding over alone, Table 2",
                (15.2 - 10) / 3 / (5.68 / 4),
                attention,
                longest,
                LLAMA_13B,
            ),
        ],
    )
