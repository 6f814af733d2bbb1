"""Claims about chunks and hybrid batches: what decodes and chunks cost each other.

Each function asks a lab for the times of batches that are made by hand: no scheduler is under test
here. Some hold posts against the device, where these contradict themselves or the paper that they
tell of. Short ones to begin with: s_f13 and ss_f9b.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers, C a Chinese post, "SARATHI 之 Chunked
Prefill"; F is a figure, T a table. Read first: phases.py. Read next: offline.py."""

from itertools import product

from lab.claims.checks import falls, less, rises
from lab.claims.claim import LLAMA_13B, YI_34B, Finding, claim
from lab.claims.labs import Lab
from lab.claims.table import Table, line, over
from lab.measure.batch_times import TimedChunk, chunks_of, decodes, prompts
from lab.measure.capacity import Bounded

SHARES_READING = "Alone B decodes share one reading of the weights; riding they need none."
OWN_KEYS = "A decode reads its own keys and values, whoever shares its batch."
ROWS_ABOVE_RIDGE = "Above the ridge the rows of a chunk take as long as those of a prompt."
TWICE_THE_ROWS = (
    "Decodes alone take as long as the ridge has rows, with a chunk there are twice as many at "
    "most; half of that again is room for attention."
)


TABLE_2 = {  # the paper's, in ms: a prompt, four decodes, and three of them beside a chunk
    "prefill": {"linear": 224.8, "attention": 10},
    "decodes": {"linear": 44.28, "attention": 5.68, "a decode": 12.49},
    "both": {"linear": 223.2, "attention": 15.2, "a decode": 1.2},
}


@claim(
    "How much cheaper a decode is beside a chunk of 256, over batch and context",
    seconds=(50, 155),
    covers=("S-T2",),
)
def s_f8(lab: Lab) -> Finding:
    """S-F8: a decode costs less beside a chunk of 256 than in a batch of its own.

    Table 2 has a chunk of 1,021 and three decodes, at 1,024 tokens. Its caption says four prompts,
    but 0.229 ms for a token make it one of 1,024. The paper does not say its smallest batch. Its
    Table 4 (S-T4) has 2.51x, less than the 2.8x, at 3,072 tokens and B = 6.

    The first two batches of Table 2 are what the cost model's constants of an A6000 were set by,
    the attention of the third what three decodes beside a chunk take longer: 1.73 ms each, where
    four alone take 1.42. These rates, 116 Tflop/s and 584 GB/s, meet at 199 rows; section 5.1.2
    says 53 flops per byte, which is about the data sheet's rate without tensor cores."""
    chunk = lab.scaled(256)
    few = [6, 18]
    batch_sizes = lab.pick(  # {context: those that fit}
        gpu={
            1024: [2, 4, 6, 10, 18],
            2048: [2, 4, 6, 10],
            3072: [2, 4, 6],
        },
        cpu=dict.fromkeys((512, 1024, 2048), few),
        quick=dict.fromkeys((256, 512), few),
    )
    finding = Finding(LLAMA_13B)
    speedups = finding.table(x="batch", y="decode speedup, by context", spec=".1fx")
    for context, sizes in batch_sizes.items():
        title = f"{context:,} tokens"
        cost = finding.table(title, x="batch", y="ms per token", spec=".2f")
        for size in sizes:
            hybrid = lab.decode_maximal(context=context, batch=size, chunk=chunk)
            speedups.add(size, {f"context {context:,}": hybrid.speedup})
            cost.add(
                size,
                {
                    "decode alone": hybrid.decode_only.decode_token_ms,
                    "riding": hybrid.decode_maximal.decode_token_ms,
                    "prefill": hybrid.prefill_only.prefill_token_ms,
                },
            )
    largest = max(map(max, batch_sizes.values()))
    for speedup in speedups:
        for check in (less(1, speedup), falls(speedup)):
            finding.expect(check, SHARES_READING, lab.ridge_above(largest))
    shortest, *_, longest = speedups
    finding.expect(
        less(longest, shortest),
        "Riding spares no reading of keys, and longer contexts have more.",
        lab.ridge_above(4 * largest),
    )
    publish_table_2(lab, finding)
    finding.publish("decode speedup, largest", 10, shortest, max)
    finding.publish("decode speedup, smallest", 2.8, longest, min)
    return finding


def publish_table_2(lab: Lab, finding: Finding) -> None:
    """Add Table 2: a prompt, four decodes, and three of them beside a chunk."""
    prompt_len = lab.scaled(1024)
    times = lab.decode_maximal(context=prompt_len, batch=4, chunk=prompt_len)
    speedup = line(
        "decode speedup",
        {prompt_len: times.speedup},
        title="Table 2",
        x="context",
        spec=".1fx",
    )
    reads = lab.ridge_above(4)
    finding.expect(less(1, speedup), SHARES_READING, reads)
    alone_ms = TABLE_2["decodes"]["a decode"]
    riding_ms = TABLE_2["both"]["a decode"]
    text = "decode speedup, 1,021 + 3 tokens, Table 2"
    finding.publish(text, alone_ms / riding_ms, speedup, prompt_len)
    table = finding.table("Table 2", x="batch", y="ms", spec=".2f")
    batches = {
        "prefill": times.prompt,
        "decodes": times.decode_only,
        "both": times.decode_maximal,
    }
    for batch, time in batches.items():
        linear_ms = time.products_ms - time.head_ms
        table.add(batch, {"linear": linear_ms, "attention": time.attention_ms})
        table.add(batch, {"a decode": time.decode_token_ms})
        for part, paper_ms in TABLE_2[batch].items():
            finding.publish(
                f"{part}, {batch} of Table 2",
                paper_ms,
                table[part],
                batch,
                within=None,
                unit=" ms",
                fitted=part != "a decode",
            )


@claim("What riding saves a decode: weights, or keys and values", seconds=(1, 1))
def c_1(lab: Lab) -> Finding:
    """C-1: riding saves a decode its reading of the weights, not that of its keys and values.

    The Chinese post says that decodes become cheaper by reusing the KV cache of the chunk, and that
    the load of their own is spread over chunks. SARATHI says neither (section 4.3.1): attention
    costs as before, 1.73 ms a decode riding and 1.42 alone in its Table 2; linear layers cost a
    decode 11.07 ms alone and nothing that can be measured riding."""
    batches = lab.pick(  # {context: the largest batch of S-F8}
        {1024: 18, 2048: 10, 3072: 6},
        cpu={512: 18, 1024: 18, 2048: 18},
        quick={256: 18, 512: 18},
    )
    finding = Finding(LLAMA_13B)
    title = "a decode riding over alone"
    table = finding.table(title, x="context", y="times", spec=".2f")
    chunk = lab.scaled(256)
    for context, batch in batches.items():
        times = lab.decode_maximal(context=context, batch=batch, chunk=chunk)
        rows = (times.decode_maximal, times.prefill_only, times.decode_only)
        parts_ms = {
            "attention": [row.attention_ms for row in rows],
            "linear": [row.products_ms for row in rows],
        }
        for name, (hybrid_ms, prefill_ms, alone_ms) in parts_ms.items():
            riding_ms = (hybrid_ms - prefill_ms) / (batch - 1)
            table.add(context, {name: over(riding_ms, alone_ms / batch)})
    attention, linear = table
    finding.expect(less(0.5, attention, 2, at="end"), OWN_KEYS)
    finding.expect(
        less(linear, 0.8),
        "Riding decodes are rows beside a chunk that reads the weights anyway.",
        lab.ridge_above(max(batches.values())),
    )
    prefill_ms = TABLE_2["prefill"]["attention"]
    alone_ms = TABLE_2["decodes"]["attention"]
    both_ms = TABLE_2["both"]["attention"]
    paper = (both_ms - prefill_ms) / 3 / (alone_ms / 4)
    text = "attention of a decode, riding over alone, Table 2"
    finding.publish(text, paper, attention, max(batches))
    return finding


def request_level_over_sarathi(lab: Lab, pieces: int) -> Finding:
    """Request-level beside SARATHI, operation by operation: seconds with the largest batch, and how
    many times as long request-level takes over the batch.

    Prompts are cut into so many pieces, as many as carry all decodes: P:D = C / (B - 1)."""
    length = lab.scaled(1024)  # of a request, prompt and output
    batch_sizes = lab.pick([6, 18], quick=[6])
    finding = Finding(LLAMA_13B)
    title = f"batch {batch_sizes[-1]}"
    seconds = finding.table(title, x="", y="s", spec=".3g", form="stacked")
    ratios = finding.table("request-level over sarathi", x="batch", y="times less")
    for batch in batch_sizes:
        output = pieces * (batch - 1)
        prompt = length - output
        context = prompt + output // 2 + 1  # of a decode in the middle of the output
        request_level = [prompts(1, prompt)] * batch
        request_level += [decodes(batch, context)] * output
        riding = decodes(batch - 1, context)
        pieces_of_prompt = chunks_of(prompt, prompt // pieces)
        sarathi = [piece + riding for piece in pieces_of_prompt] * batch
        times = lab.time({"request-level": request_level, "sarathi": sarathi})
        for policy, time in times.items():  # those of the last batch stay
            for name, ms in time.parts_ms.items():
                seconds.add(policy, {name: ms / 1e3})
        request_level_time, sarathi_time = times.values()
        for name in ("ffn_ln1", "ffn_ln2", "preproj", "postproj"):
            ratio = request_level_time.parts_ms[name] / sarathi_time.parts_ms[name]
            ratios.add(batch, {name: ratio})
        linear = request_level_time.products_ms / sarathi_time.products_ms
        attention = request_level_time.attention_ms / sarathi_time.attention_ms
        ratios.add(batch, {"linear": linear, "attention": attention})
    return finding


FFN_GAIN = 1.6  # published


@claim("Time by operation for the same requests, request-level against SARATHI", seconds=(5, 55))
def s_f10(lab: Lab) -> Finding:
    """S-F10: the same requests take less time in the linear layers, and no more in attention."""
    finding = request_level_over_sarathi(lab, pieces=4)
    ratios = finding.tables[1]
    first = int(ratios.xs[0])
    pays = lab.riding_pays(first, lab.scaled(256))
    finding.expect(
        less(1.02, ratios["linear"]),
        "Riding decodes need no reading of the weights of their own.",
        pays,
    )
    finding.expect(
        less(0.4, ratios["attention"]), "Four pieces read a prompt's keys 2.5 times at most."
    )
    finding.publish("ffn, largest", FFN_GAIN, ratios["ffn_ln1"], max)
    finding.publish("ffn, smallest", 1.3, ratios["ffn_ln1"], min)
    finding.publish("preproj, largest", 1.38, ratios["preproj"], max)
    finding.publish("postproj, smallest", 1.05, ratios["postproj"], min)
    return finding


@claim("Time by operation with chunks twice as long", seconds=(5, 55))
def s_f10b(lab: Lab) -> Finding:
    """S-F10b: chunks of 512 save less in the linear layers than chunks of 256: fewer decodes ride.

    The lower half of Figure 10. At P:D = C / (B - 1) a prompt of two chunks has half as many
    decodes as one of four, and only decodes are made cheaper. The 1.6x is of the upper half."""
    quarters = request_level_over_sarathi(lab, pieces=4).tables[1]
    halves = request_level_over_sarathi(lab, pieces=2).tables[1]
    finding = Finding(LLAMA_13B, tables=[halves])
    linear = finding.table("linear layers", x="batch", y="times less")
    for batch in halves.xs:
        of_quarters = quarters["linear"].at(batch)
        of_halves = halves["linear"].at(batch)
        linear.add(batch, {"chunks of 256": of_quarters})
        linear.add(batch, {"chunks of 512": of_halves})
    of_256, of_512 = linear
    first = int(halves.xs[0])
    half = lab.scaled(512)
    half_ride = "Half as many decodes are spared a reading of the weights."
    computes = lab.ridge_below(half // 2)
    pays = lab.riding_pays(first, half)
    finding.expect(less(of_512, of_256, at="start"), half_ride, computes)
    finding.expect(less(1.02, of_512), half_ride, pays)
    finding.expect(
        less(0.4, halves["attention"]),
        "Even four pieces would read the keys of a prompt 2.5 times at most.",
    )
    finding.publish("ffn in chunks of 256, up to", FFN_GAIN, quarters["ffn_ln1"], first)
    less_than_that = Bounded(FFN_GAIN, "below")
    finding.publish("ffn in chunks of 512", less_than_that, halves["ffn_ln1"], first)
    return finding


@claim("What small chunks cost: attention, and the whole prefill", seconds=(15, 105))
def s_f13(lab: Lab) -> Finding:
    """S-F13: the smaller the chunks of a prompt, the longer its attention and its prefill take.

    In the cost model a chunk of 64 takes as long as one tile of 128, and longer in the paper."""
    length = lab.scaled(1024)
    sizes = lab.pick([64, 128, 256, 512], quick=[32, 64, 128])
    finding = Finding(LLAMA_13B)
    table = finding.table(x="chunk", y="times that of the whole prompt", log="x")
    for chunk in sizes:
        sequences = {
            "chunks": chunks_of(length, chunk),
            "whole": [prompts(1, length)],
        }
        chunked, unchunked = lab.time(sequences).values()
        table.add(chunk, {"attention": chunked.attention_ms / unchunked.attention_ms})
        table.add(chunk, {"prefill": chunked.total_ms / unchunked.total_ms})
    attention, prefill = table
    # if the second of two chunks computed the first again, the last would be 1.5
    last = less(prefill, 1.25, at="end")
    computes = lab.ridge_below(sizes[-1])
    finding.expect(falls(attention), "Each chunk reads the keys of all chunks before it again.")
    finding.expect(
        falls(prefill),
        "Below the ridge a chunk takes as long as the reading of the weights.",
        lab.ridge_above(sizes[0]),
    )
    finding.expect(last, ROWS_ABOVE_RIDGE, computes)
    finding.publish("prefill in chunks of 64", 5, prefill, sizes[0])
    finding.publish("attention in chunks of 64", 3, attention, sizes[0])
    bounds = [  # the tokens of the paper's chunks, and how long they take
        (128, Bounded(2, "at least"), sizes[1]),
        (256, Bounded(1.2, "below"), sizes[2]),
        (512, Bounded(1.1, "below"), sizes[-1]),
    ]
    for tokens, bound, chunk in bounds:
        finding.publish(f"prefill in chunks of {tokens}", bound, prefill, chunk)
    return finding


@claim("Decodes beside a whole prompt and beside a chunk, against decodes alone", seconds=(10, 60))
def ss_f9(lab: Lab) -> Finding:
    """SS-F9: beside a whole prompt decodes take many times as long, beside a chunk a few.

    The paper's text says neither its model nor its batch."""
    chunk = lab.pick(250, quick=58)
    lengths = lab.pick(
        [512, 1024, 2048, 4096],
        cpu=[512, 1024, 2048],
        quick=[128, 512],
    )
    riding = decodes(6, lab.scaled(1024))
    finding = Finding("A100, model not said")
    table = finding.table(x="prompt", y="times the decodes alone", spec=".1fx", log="xy")
    for length in lengths:
        times = lab.time(
            {
                "alone": [riding],
                "with a prompt": [prompts(1, length) + riding],
                "with a chunk": [(TimedChunk(chunk, length), *riding)],
            }
        )
        alone_ms = times.pop("alone").total_ms
        for name, time in times.items():
            table.add(length, {name: time.total_ms / alone_ms})
    prompt, with_chunk = table
    finding.expect(
        less(2 * with_chunk, prompt, at="end"),
        "The prompt has many times the rows of a chunk, and all must be computed.",
        lab.ridge_below(lengths[-1] / 2),
    )
    half_the_rows = (chunk + len(riding)) / 2
    finding.expect(less(with_chunk, 3), TWICE_THE_ROWS, lab.ridge_above(half_the_rows))
    over_alone = "over that of decodes alone"
    finding.publish(f"TBT beside a whole prompt {over_alone}, at most", 28.3, prompt, max)
    text = f"TBT beside a chunk {over_alone}, a reader's note"
    finding.publish(text, Bounded(3, "below"), with_chunk, max)
    return finding


@claim("Decodes beside a chunk against decodes alone, over batch and context", seconds=(5, 25))
def ss_f9b(lab: Lab) -> Finding:
    """SS-F9b: a chunk makes decodes wait for less, relative to their time, the more they read.

    The caption of Figure 9: the relative impact of a chunk falls with batch size and context."""
    short = lab.scaled(512)
    batch_sizes = lab.pick([2, 6, 18], cpu=[2, 8, 32], quick=[2, 16])
    finding = Finding()
    title = "a batch with a chunk over the decodes alone"
    table = finding.table(title, x="decodes", y="times as long", log="x")
    for context, size in product((short, 4 * short), batch_sizes):
        riding = decodes(size, context)
        chunk = TimedChunk(lab.scaled(256) - size, short)
        hybrid = (chunk, *riding)
        times = lab.time({"alone": [riding], "chunk": [hybrid]})
        ratio = times["chunk"].total_ms / times["alone"].total_ms
        table.add(size, {f"context {context:,}": ratio})
    at_short, at_long = table
    finding.expect(falls(at_long), "More decodes take longer, and leave the chunk fewer tokens.")
    finding.expect(
        less(at_long, 1.05 * at_short, at="end"),
        "Decodes at a longer context read more keys; the chunk does not.",
    )
    text = "with a chunk over decodes alone: a reader's note to Figure 9"
    finding.publish(text, Bounded(3, "below"), at_short, batch_sizes[0])
    return finding


FIGURE_14 = {  # prompt -> ms of it whole, and times as long in chunks of 512, 1,024, 2,048
    2047: (378.1, 1.152, 1.175, 0.999),
    4095: (775.4, 1.189, 1.202, 1.024),
    8191: (1754.2, 1.117, 1.109, 0.937),
    16383: (4535.0, 0.995, 0.961, 0.805),
}


@claim(
    "What chunks of 512, 1,024 and 2,048, or less, add to a prefill, over prompt lengths",
    seconds=(15, 235),
)
def ss_f14(lab: Lab) -> Finding:
    """SS-F14: chunks above the ridge add little to the time of a prefill.

    The paper adds: less, the larger they are. No check asks for it, as it is no arithmetic: in the
    authors' data, osdi-experiments/figure-9/chunking-overhead.csv, chunks of 512 make a prompt of
    2K 1.152 times as long, of 1,024 1.175. There chunks save the masked half of attention, so that
    long prompts take less time in them. In the cost model the shortest prompt is fitted: without it
    512 tokens would take 10 ms less, and 1,024 33. The others are predicted."""
    that_fit = list(filter(lab.fits, FIGURE_14))
    lengths = lab.pick(that_fit, cpu=[512, 1024, 2048], quick=[128, 256])
    chunk_sizes = lab.pick(
        [512, 1024, 2048],
        cpu=[128, 256, 512],
        quick=[32, 64, 128],
    )
    finding = Finding(YI_34B)
    table = finding.table(x="prompt", y="times that of the whole prompt", log="x")
    title = "whole prompts"
    seconds = finding.table(title, x="prompt", y="ms", spec=",.0f", log="xy")
    for length in lengths:
        sequences = {f"chunks of {chunk:,}": chunks_of(length, chunk) for chunk in chunk_sizes}
        sequences["whole"] = [prompts(1, length)]
        times = lab.time(sequences)
        whole_ms = times.pop("whole").total_ms
        for name, time in times.items():
            table.add(length, {name: time.total_ms / whole_ms})
        seconds.add(length, {"whole": whole_ms})
    smallest, _, largest = table
    # if each chunk computed those before it again, four would take 2.5 times
    computes = lab.ridge_below(chunk_sizes[0])
    finding.expect(less(smallest, 2), ROWS_ABOVE_RIDGE, computes)
    text = "prefill in chunks of 512, at most"
    finding.publish(text, Bounded(1.25, "below"), smallest, max)
    text = "prefill in chunks of 2,048: negligible, here a twentieth"
    finding.publish(text, Bounded(1.05, "below"), largest, max)
    for length, (prompt, published) in zip(lengths, FIGURE_14.items(), strict=False):
        whole_ms, *ratios = published
        text = f"{prompt:,} tokens, the authors' data"
        is_first = length == lengths[0]
        finding.publish(
            text,
            whole_ms,
            seconds["whole"],
            length,
            within=None,
            unit=" ms",
            fitted=is_first,
        )
        for in_chunks, ratio in zip(table, ratios, strict=True):
            finding.publish(
                f"{text}, {in_chunks.name}",
                ratio,
                in_chunks,
                length,
                within=3 if in_chunks == smallest and is_first else None,
                fitted=is_first,
            )
    return finding


# The post's timeline: prompt tokens -> ms of an iteration; and that with the whole prompt
TIMELINE_MS = {0: 30, 256: 35}
TIMELINE_PROMPT_MS = 300


@claim("A prompt beside six decodes, whole and in eight chunks, as it goes on", seconds=(15, 40))
def b_2(lab: Lab) -> Finding:
    """B-2: in chunks a prompt makes eight short steps of decodes, whole one stall."""
    chunk = lab.scaled(256)
    length = 8 * chunk
    riding = decodes(6, lab.scaled(1024))
    table = Table(x="tokens so far", y="ms", spec=".1f")
    for end in range(chunk, length + 1, chunk):
        hybrid = (TimedChunk(chunk, end), *riding)
        case = {"decodes alone": [riding], "with a chunk": [hybrid]}
        if end == length:
            case["with the prompt"] = [prompts(1, length) + riding]
        for name, time in lab.time(case).items():
            table.add(end, {name: time.total_ms})
    alone_ms, chunk_ms, prompt_ms = table
    with_chunk = chunk_ms / alone_ms
    with_prompt = prompt_ms / alone_ms
    paper_prompt = TIMELINE_PROMPT_MS / TIMELINE_MS[0]
    paper_chunk = TIMELINE_MS[256] / TIMELINE_MS[0]
    lanes = {
        "here, whole": [with_prompt.at(length)],
        "the post's, whole": [paper_prompt],
        "here, in chunks": list(with_chunk.known.values()),
        "the post's, in chunks": [paper_chunk] * len(with_chunk.known),
    }
    finding = Finding("70B")
    unit = "time, in iterations of decodes alone"
    steps = finding.table(x="step", y=unit, spec=".2f", form="steps")
    for lane, with_a_part in lanes.items():
        durations = [1, 1, *with_a_part, 1, 1]  # two of decodes alone before and after
        for number, duration in enumerate(durations, 1):
            steps.add(number, {lane: duration})
    finding.expect(
        less(3 * chunk_ms, prompt_ms, at="end"),
        "The prompt has eight times the rows of a chunk, and all are computed.",
        lab.ridge_below(2 * chunk),
    )
    half_the_rows = (chunk + len(riding)) / 2
    finding.expect(less(with_chunk, 3), TWICE_THE_ROWS, lab.ridge_above(half_the_rows))
    of_alone = "over one of decodes alone"
    finding.publish(f"a step with the prompt {of_alone}", paper_prompt, with_prompt, length)
    finding.publish(f"a step with a chunk {of_alone}", paper_chunk, with_chunk, length)
    text = "a step with the prompt"
    finding.publish(text, TIMELINE_PROMPT_MS, prompt_ms, length, within=None, unit=" ms")
    return finding


BUDGET_TABLE_MS = {
    0: 21,
    128: 72,
    256: 126,
    512: 237,
    1024: 460,
}


@claim(
    "An iteration over its prompt tokens: the post's table, its timeline, and here",
    seconds=(20, 20),
)
def b_3(lab: Lab) -> Finding:
    """B-3: an iteration takes longer the more prompt tokens it has, from the ridge on.

    The post contradicts itself: a chunk of 256 adds 105 ms to 21 in its table of token budgets, and
    5 ms to 30 in its timeline (B-2). The table counts 1.7B parameters a layer, 136B of a 70B model,
    and no reading of weights: 10.9 ms for the products of 32 rows, a fifth of those of 160, where
    140 GB take 42 ms at an H100's 3.35 TB/s."""
    riding = decodes(32, lab.scaled(512))
    batches = {}
    for tokens in BUDGET_TABLE_MS:
        chunks = [TimedChunk(tokens, tokens)] if tokens else []
        batches[str(tokens)] = [(*chunks, *riding)]
    times = lab.time(batches)
    decodes_alone = times["0"]
    finding = Finding("70B, H100")
    longer = finding.table("over 32 decodes alone", x="prompt tokens", y="times")
    title = "an iteration with 32 decodes"
    ms = finding.table(title, x="prompt tokens", y="ms", spec=".1f")
    for tokens, table_ms in BUDGET_TABLE_MS.items():
        total_ms = times[str(tokens)].total_ms
        ms.add(tokens, {"here": total_ms})
        longer.add(tokens, {"here": over(total_ms, decodes_alone.total_ms)})
        longer.add(tokens, {"the post's table": table_ms / BUDGET_TABLE_MS[0]})
        timeline = over(TIMELINE_MS.get(tokens), TIMELINE_MS[0])
        longer.add(tokens, {"the post's timeline": timeline})
    title = "products of 160 rows over those of 32"
    products = finding.table(title, x="", y="times")
    of_products = over(times["128"].products_ms, decodes_alone.products_ms)
    products.add("rows", {"here": of_products})
    ours, in_table, in_timeline = longer
    finding.expect(rises(ours), "Each token is a row more for all products.")
    finding.expect(
        less(products["here"], 4.9),
        "The weights are read once, for 32 rows or for five times as many.",
        lab.ridge_above(32),
    )
    text = "256 tokens beside 32 decodes, its"
    finding.publish(f"{text} table", in_table.known[256], ours, 256)
    timeline = in_timeline.known[256]
    finding.publish(f"{text} timeline", timeline, ours, 256, device="70B", within=None)
    finding.publish("1,024 tokens, its table", in_table.known[1024], ours, 1024)
    alone_ms = BUDGET_TABLE_MS[0]
    text = "32 decodes alone"
    finding.publish(text, alone_ms, ms["here"], 0, within=None, unit=" ms")
    return finding
