"""Functions that measure the papers' claims about chunks and hybrid batches on this device.

Each function times batches that are made by hand, as those of measured_phases.py do. Short ones to
begin with: s_f13 and b_2.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F is a figure, T a table. Read first:
finding.py, conditions.py, bench.py, measured_phases.py. Read next: measured_offline.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.measure.batch_times import Batch, TimedChunk, chunks_of, decodes, prompts
from lab.measure.capacity import Bounded
from lab.papers.bench import Bench
from lab.papers.checks import falls, less
from lab.papers.conditions import ridge_above, ridge_below, riding_pays
from lab.papers.finding import Finding, Published
from lab.papers.measured_phases import LLAMA_13B
from lab.papers.plot import Plot


def s_f8(bench: Bench) -> Finding:
    """S-F8: a decode costs less beside a chunk of 256 than in a batch of its own.

    Table 2 has a chunk of 1,021 and three decodes, at 1,024 tokens."""
    chunk = bench.scaled(256)
    batch_sizes = bench.pick(  # {context: those that fit}
        gpu={1024: [4, 6, 12, 18], 2048: [4, 6, 10], 3072: [4, 6]},
        cpu={512: [6, 18], 1024: [6, 18], 2048: [6, 18]},
        quick={256: [6, 18], 512: [6, 18]},
    )
    speedups = Plot("", x="batch", y="decode speedup, by context", spec=".1fx")
    costs: list[Plot] = []
    for context, sizes in batch_sizes.items():
        cost = Plot(f"{context:,} tokens", x="batch", y="ms per token", spec=".2f")
        for size in sizes:
            table = bench.decode_maximal(context=context, batch=size, chunk=chunk)
            speedups.add(f"context {context:,}", size, table.speedup)
            cost.add_row(
                size,
                {
                    "decode alone": table.decode_only.decode_token_ms,
                    "riding": table.decode_maximal.decode_token_ms,
                    "prefill": table.prefill_only.prefill_token_ms,
                },
            )
        costs.append(cost)

    whole_prompt = bench.scaled(1024)
    table = bench.decode_maximal(context=whole_prompt, batch=4, chunk=whole_prompt)
    table_2 = Plot("Table 2", x="context", y="ms per decode", spec=".2f")
    table_2.add_row(
        whole_prompt,
        {
            "alone": table.decode_only.decode_token_ms,
            "riding": table.decode_maximal.decode_token_ms,
        },
    )
    table_2_speedup = Plot("Table 2", x="context", y="decode speedup", spec=".1fx")
    table_2_speedup.add("decode speedup", whole_prompt, table.speedup)

    lines = speedups.all_lines()
    shortest = lines[0]
    longest = lines[-1]
    largest = max(size for sizes in batch_sizes.values() for size in sizes)
    shares_reading = "Alone B decodes share one reading of the weights; riding they need none."
    return Finding(
        plots=[speedups, *costs],
        checks=[
            *(
                less(1, line, because=shares_reading, where=ridge_above(bench, largest))
                for line in lines
            ),
            *(
                falls(line, because=shares_reading, where=ridge_above(bench, largest))
                for line in lines
            ),
            less(
                longest,
                shortest,
                because="Riding spares no reading of keys, and longer contexts have more.",
                where=ridge_above(bench, 4 * largest),
            ),
            less(
                1,
                table_2_speedup["decode speedup"],
                because=shares_reading,
                where=ridge_above(bench, 4),
            ),
        ],
        published=[
            Published(
                "decode speedup, 1,021 + 3 tokens, Table 2",
                12.49 / 1.2,
                table_2_speedup["decode speedup"],
                whole_prompt,
                LLAMA_13B,
            ),
            Published("decode speedup, largest", 10, shortest, shortest.x_of_largest(), LLAMA_13B),
            Published("decode speedup, smallest", 2.8, longest, longest.x_of_smallest(), LLAMA_13B),
            Published(
                "a decode alone, Table 2",
                12.49,
                table_2["alone"],
                whole_prompt,
                LLAMA_13B,
                within=None,
                unit=" ms",
            ),
            Published(
                "a decode riding, Table 2",
                1.2,
                table_2["riding"],
                whole_prompt,
                LLAMA_13B,
                within=None,
                unit=" ms",
            ),
        ],
    )


@dataclass(frozen=True)
class TimesByOperation:
    """The same requests under request-level and SARATHI."""

    ratios: Plot  # how many times as long request-level takes, over the batch
    seconds: Plot  # by policy, with the largest batch


def request_level_over_sarathi(bench: Bench, pieces: int) -> TimesByOperation:
    """Compare request-level with SARATHI, operation by operation.

    Prompts are cut into so many pieces, as many as carry all decodes: P:D = C / (B - 1)."""
    length = bench.scaled(1024)  # of a request, prompt and output
    batch_sizes = bench.pick(gpu=[6, 18], cpu=[6, 18], quick=[6])
    ratios = Plot("request-level over sarathi", x="batch", y="times less")
    seconds = Plot(f"batch {batch_sizes[-1]}", x="", y="s", spec=".3g", form="stacked")
    for batch in batch_sizes:
        output = pieces * (batch - 1)
        prompt = length - output
        chunk = prompt // pieces
        context = prompt + output // 2 + 1  # of a decode in the middle of the output
        riding = decodes(batch - 1, context)
        request_level = [prompts(1, prompt)] * batch + [decodes(batch, context)] * output
        sarathi = [alone + riding for alone in chunks_of(prompt, chunk)] * batch
        times = bench.time_batches({"request-level": request_level, "sarathi": sarathi})
        whole = times["request-level"]
        chunked = times["sarathi"]
        for name in ("ffn_ln1", "ffn_ln2", "preproj", "postproj"):
            ratios.add(name, batch, whole.parts_ms[name] / chunked.parts_ms[name])
        ratios.add("linear", batch, whole.products_ms / chunked.products_ms)
        ratios.add("attention", batch, whole.attention_ms / chunked.attention_ms)
        if batch == batch_sizes[-1]:
            for policy, time in times.items():
                seconds.add_row(policy, {name: ms / 1e3 for name, ms in time.parts_ms.items()})
    return TimesByOperation(ratios, seconds)


def s_f10(bench: Bench) -> Finding:
    """S-F10: the same requests take less time in the linear layers, and no more in attention."""
    times = request_level_over_sarathi(bench, pieces=4)
    ratios = times.ratios
    batch = int(ratios.xs[0])
    chunk = bench.scaled(256)
    attention = ratios["attention"]
    ffn = ratios["ffn_ln1"]
    preproj = ratios["preproj"]
    return Finding(
        plots=[times.seconds, ratios],
        checks=[
            less(
                1.02,
                ratios["linear"],
                because="Riding decodes need no reading of the weights of their own.",
                where=riding_pays(bench, batch, chunk),
            ),
            less(0.4, attention, because="Four pieces read a prompt's keys 2.5 times at most."),
        ],
        published=[
            Published("ffn, largest", 1.6, ffn, ffn.x_of_largest(), LLAMA_13B),
            Published("ffn, smallest", 1.3, ffn, ffn.x_of_smallest(), LLAMA_13B),
            Published("preproj, largest", 1.38, preproj, preproj.x_of_largest(), LLAMA_13B),
        ],
    )


def s_f13(bench: Bench) -> Finding:
    """S-F13: the smaller the chunks of a prompt, the longer its attention and its prefill take."""
    length = bench.scaled(1024)
    chunk_sizes = bench.pick(gpu=[64, 128, 256, 512], cpu=[64, 128, 256, 512], quick=[32, 64, 128])
    plot = Plot("", x="chunk", y="times that of the whole prompt", log="x")
    for chunk in chunk_sizes:
        case = {"chunks": chunks_of(length, chunk), "whole": [prompts(1, length)]}
        times = bench.time_batches(case)
        chunks = times["chunks"]
        whole = times["whole"]
        plot.add_row(
            chunk,
            {
                "attention": chunks.attention_ms / whole.attention_ms,
                "prefill": chunks.total_ms / whole.total_ms,
            },
        )
    attention = plot["attention"]
    prefill = plot["prefill"]
    smallest = chunk_sizes[0]
    return Finding(
        plots=[plot],
        checks=[
            falls(attention, because="Each chunk reads the keys of all chunks before it again."),
            falls(
                prefill,
                because="Below the ridge a chunk takes as long as the reading of the weights.",
                where=ridge_above(bench, smallest),
            ),
            less(
                prefill,
                1.25,  # if the second of two chunks computed the first again, it would be 1.5
                at="end",
                because="Above the ridge the rows of a chunk take as long as those of a prompt.",
                where=ridge_below(bench, chunk_sizes[-1]),
            ),
        ],
        published=[
            Published("prefill in chunks of 64", 5, prefill, smallest, LLAMA_13B),
            Published("attention in chunks of 64", 3, attention, smallest, LLAMA_13B),
            Published(
                "prefill in chunks of 128",
                Bounded(2, "at least"),
                prefill,
                chunk_sizes[1],
                LLAMA_13B,
            ),
            Published(
                "prefill in chunks of 256",
                Bounded(1.2, "below"),
                prefill,
                chunk_sizes[2],
                LLAMA_13B,
            ),
            Published(
                "prefill in chunks of 512",
                Bounded(1.1, "below"),
                prefill,
                chunk_sizes[-1],
                LLAMA_13B,
            ),
        ],
    )


def ss_f9(bench: Bench) -> Finding:
    """SS-F9: beside a whole prompt decodes take many times as long, beside a chunk a few.

    The paper's text says neither its model nor its batch."""
    context = bench.scaled(1024)
    chunk = bench.pick(gpu=250, cpu=250, quick=58)
    lengths = bench.pick(gpu=[512, 1024, 2048, 4096], cpu=[512, 1024, 2048], quick=[128, 512])
    riding = decodes(6, context)
    plot = Plot("", x="prompt", y="times the decodes alone", spec=".1fx", log="xy")
    for length in lengths:
        last_chunk: Batch = (TimedChunk(chunk, length),)
        case = {
            "alone": [riding],
            "prompt": [prompts(1, length) + riding],
            "chunk": [last_chunk + riding],
        }
        times = bench.time_batches(case)
        alone_ms = times["alone"].total_ms
        plot.add_row(
            length,
            {
                "with a prompt": times["prompt"].total_ms / alone_ms,
                "with a chunk": times["chunk"].total_ms / alone_ms,
            },
        )
    with_prompt = plot["with a prompt"]
    with_chunk = plot["with a chunk"]
    rows = chunk + len(riding)
    return Finding(
        plots=[plot],
        checks=[
            less(
                with_chunk.times(2),
                with_prompt,
                at="end",
                because="The prompt has many times the rows of a chunk, and all must be computed.",
                where=ridge_below(bench, lengths[-1] / 2),
            ),
            less(
                with_chunk,
                3,
                because="Decodes alone take as long as the ridge has rows, with a chunk there are "
                "twice as many at most; half of that again is room for attention.",
                where=ridge_above(bench, rows / 2),
            ),
        ],
        published=[
            Published(
                "TBT beside a whole prompt over that of decodes alone, at most",
                28.3,
                with_prompt,
                with_prompt.x_of_largest(),
                "A100, model not said",
            ),
            Published(
                "TBT beside a chunk over that of decodes alone, a reader's note",
                Bounded(3, "below"),
                with_chunk,
                with_chunk.x_of_largest(),
                "A100, model not said",
            ),
        ],
    )


def ss_f14(bench: Bench) -> Finding:
    """SS-F14: chunks above the ridge add little to the time of a prefill.

    The paper adds: less, the larger they are. No check asks for it, as it is no arithmetic: in the
    authors' data chunks of 512 make a prompt of 2K 1.152 times as long, of 1,024 1.175."""
    lengths = bench.pick(gpu=[2048, 4096, 8192], cpu=[512, 1024, 2048], quick=[128, 256])
    small = bench.pick(gpu=512, cpu=128, quick=32)
    chunk_sizes = [small, 2 * small, 4 * small]
    plot = Plot("", x="prompt", y="times that of the whole prompt", log="x")
    for length in lengths:
        sequences = {f"chunks of {chunk:,}": chunks_of(length, chunk) for chunk in chunk_sizes}
        times = bench.time_batches({"whole": [prompts(1, length)]} | sequences)
        for name in sequences:
            plot.add(name, length, times[name].total_ms / times["whole"].total_ms)
    smallest, _, largest = plot.all_lines()
    device = "Yi-34B, two A100"
    return Finding(
        plots=[plot],
        checks=[
            less(
                smallest,
                2,  # if each chunk computed those before it again, four would take 2.5 times
                because="Above the ridge the rows of a chunk take as long as those of a prompt.",
                where=ridge_below(bench, small),
            ),
        ],
        published=[
            Published(
                "prefill in chunks of 512, at most",
                Bounded(1.25, "below"),
                smallest,
                smallest.x_of_largest(),
                device,
            ),
            Published(
                "prefill in chunks of 512, 2K, the authors' data",
                1.152,
                smallest,
                lengths[0],
                device,
                within=3,
            ),
            Published(
                "prefill in chunks of 2,048: negligible, here a twentieth",
                Bounded(1.05, "below"),
                largest,
                largest.x_of_largest(),
                device,
            ),
        ],
    )


def b_2(bench: Bench) -> Finding:
    """B-2: in chunks a prompt makes eight short steps of decodes, whole one stall."""
    chunk = bench.scaled(256)
    context = bench.scaled(1024)
    length = 8 * chunk
    riding = decodes(6, context)
    plot = Plot("", x="tokens so far", y="ms", spec=".1f")
    for end in range(chunk, length + 1, chunk):
        next_chunk: Batch = (TimedChunk(chunk, end),)
        case = {"alone": [riding], "chunk": [next_chunk + riding]}
        if end == length:
            case["prompt"] = [prompts(1, length) + riding]
        times = bench.time_batches(case)
        whole_ms = times["prompt"].total_ms if "prompt" in times else None
        plot.add_row(
            end,
            {
                "decodes alone": times["alone"].total_ms,
                "with a chunk": times["chunk"].total_ms,
                "with the prompt": whole_ms,
            },
        )
    alone = plot["decodes alone"]
    with_chunk = plot["with a chunk"].over(alone, spec=".2fx")
    with_prompt = plot["with the prompt"].over(alone, spec=".2fx")
    steps = Plot("", x="step", y="time, in iterations of decodes alone", spec=".2f", form="steps")
    in_chunks = [with_chunk.at(end) for end in plot.xs]
    add_steps(steps, "here, whole", [with_prompt.at(length)])
    add_steps(steps, "the post's, whole", [300 / 30])
    add_steps(steps, "here, in chunks", in_chunks)
    add_steps(steps, "the post's, in chunks", [35 / 30] * len(in_chunks))
    device = "70B"
    return Finding(
        plots=[steps],
        checks=[
            less(
                plot["with a chunk"].times(3),
                plot["with the prompt"],
                at="end",
                because="The prompt has eight times the rows of a chunk, and all are computed.",
                where=ridge_below(bench, 2 * chunk),
            ),
            less(
                with_chunk,
                3,
                because="Decodes alone take as long as the ridge has rows, with a chunk there are "
                "twice as many at most; half of that again is room for attention.",
                where=ridge_above(bench, (chunk + len(riding)) / 2),
            ),
        ],
        published=[
            Published(
                "a step with the prompt over one of decodes alone",
                300 / 30,
                with_prompt,
                length,
                device,
            ),
            Published(
                "a step with a chunk over one of decodes alone", 35 / 30, with_chunk, length, device
            ),
            Published(
                "a step with the prompt",
                300,
                plot["with the prompt"],
                length,
                device,
                within=None,
                unit=" ms",
            ),
        ],
    )


def add_steps(steps: Plot, line: str, with_prompt: Sequence[float | None]) -> None:
    """Add a line of steps: two of decodes alone, those with a part of a prompt, two more alone."""
    for number, length in enumerate([1, 1, *with_prompt, 1, 1], 1):
        steps.add(line, number, length)
