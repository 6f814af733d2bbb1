"""Functions that measure the papers' claims about single iterations on this device.

Each function times batches, plots the times, and checks the plots. A check must hold on any device:
it follows from the arithmetic. The published numbers stand in measured.py. To add a claim, write
such a function and list it there. Short ones to begin with: s_f13 and b_2.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F is a figure, T a table. Read first:
finding.py, bench.py and lab/measure/batch_times.py. Read next: measured_loads.py."""

from lab.measure.batch_times import (
    Batch,
    TimedChunk,
    chunks_of,
    decodes,
    intensities,
    prompts,
)
from lab.papers.bench import Bench
from lab.papers.finding import Finding, Plot, falls, less, over, rises

BATCH_SIZES = (1, 2, 4, 8, 18)  # SARATHI, Figure 3


def prefill_and_decodes(bench: Bench) -> dict[int, dict[str, list[Batch]]]:
    """{batch size: {"prefill": whole prompts, "decode": as many decodes}}, as in SARATHI's Figures
    3 and 4b. Large batches of prompts are left out where they take long."""
    length = bench.pick(gpu=1024, cpu=1024, quick=256)
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


def reads_weights(bench: Bench) -> str:
    """The reason why a claim may not show on a device that reads weights fast."""
    return f"weights are read in the time of {bench.machine.ridge_tokens:.0f} rows"


def s_f3(bench: Bench) -> Finding:
    """S-F3: a decode token costs many times what a prefill token does, in the linear layers."""
    length = bench.pick(gpu=1024, cpu=1024, quick=256)
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    by_operation = {
        kind: Plot(f"{kind} at {length:,}", x="batch", y="ms per token", spec=".3f", log="xy")
        for kind in ("prefill", "decode")
    }
    per_token = Plot("", x="batch", y="ms per token", spec=".3g", log="xy")
    shares = Plot("share of the time", x="batch", y="share", spec=".0%", log="x")
    for size, case in prefill_and_decodes(bench).items():
        times = bench.time_batches(case, repeats)
        for kind, time in times.items():
            plot = by_operation[kind]
            plot.add("preproj", size, time.preproj_ms / time.tokens)
            plot.add("attention", size, time.attention_ms / time.tokens)
            plot.add("postproj", size, time.postproj_ms / time.tokens)
            plot.add("ffn_ln1", size, time.ffn_ln1_ms / time.tokens)
            plot.add("ffn_ln2", size, time.ffn_ln2_ms / time.tokens)
            plot.add("other", size, time.other_ms / time.tokens)
            per_token.add(kind, size, time.total_ms / time.tokens)
        for kind, time in times.items():
            shares.add(f"{kind}: linear", size, time.products_ms / time.total_ms)
        for kind, time in times.items():
            shares.add(f"{kind}: attention", size, time.attention_ms / time.total_ms)
    prefill = per_token.line("prefill")
    decode = per_token.line("decode")
    return Finding(
        plots=[*by_operation.values(), per_token, shares],
        checks=[
            falls(decode),
            less(prefill.times(10), decode, at="start"),
            falls(decode.over(prefill)),
            less(0.5, shares.line("prefill: linear")),
            falls(shares.line("decode: linear")),
            rises(shares.line("decode: attention")),
        ],
        quoted=[
            decode.over(prefill),
            shares.line("prefill: linear"),
            shares.line("decode: linear"),
        ],
        because=reads_weights(bench),
    )


def s_f4a(bench: Bench) -> Finding:
    """S-F4a: a few hundred tokens of prefill use the device fully; it takes as many decodes."""
    context = bench.pick(gpu=1024, cpu=1024, quick=256)
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    chunk_sizes = bench.pick(
        gpu=powers_of_two(4096), cpu=powers_of_two(2048), quick=[1, 16, 64, 256, 512]
    )
    decode_counts = {  # one layer leaves memory for more
        "one layer": bench.pick(
            gpu=powers_of_two(512), cpu=powers_of_two(512), quick=[1, 16, 64, 256]
        ),
        "all layers": bench.pick(gpu=powers_of_two(16), cpu=powers_of_two(64), quick=[]),
    }
    throughputs: list[Plot] = []
    shares: list[Plot] = []
    for name, counts in decode_counts.items():
        if not counts:
            continue
        layers = 1 if name == "one layer" else None
        throughput = Plot(name, x="tokens", y="tokens per ms", spec=".3g", log="xy")
        chunks = {str(tokens): [chunk_behind_a_token(tokens)] for tokens in chunk_sizes}
        for tokens, time in bench.time_batches(chunks, repeats, layers).items():
            throughput.add("prefill", int(tokens), time.tokens_per_ms)
        for count in counts:
            time = bench.time_batch([decodes(count, context)], repeats, layers)
            throughput.add("decode", count, time.tokens_per_ms)
        throughputs.append(throughput)
        shares.append(share_of_512_tokens(name, throughput))
    checks = []
    for throughput in throughputs:
        decode = throughput.line("decode")
        checks.append(rises(decode))
        checks.append(less(decode, throughput.line("prefill").times(1.5)))
    quoted = [line for throughput in throughputs for line in throughput.all_lines()]
    return Finding(
        plots=[*throughputs, *shares],
        checks=checks,
        quoted=[*quoted, *(share.line("256 tokens") for share in shares)],
        because=(
            f"the ridge is at {bench.machine.ridge_tokens:.0f} rows: as many decodes read weights "
            "no slower than they compute; and one layer may stay in a cache"
        ),
    )


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... up to `last`."""
    return [2**exponent for exponent in range(last.bit_length())]


def share_of_512_tokens(name: str, throughput: Plot) -> Plot:
    """How much of the throughput of a prefill of 512 tokens is there at 64 and 256."""
    share = Plot(
        f"prefill, {name}: beside 512 tokens",
        x="what",
        y="share of their tokens/ms",
        spec=".0%",
    )
    prefill = throughput.line("prefill")
    for tokens in (64, 256):
        share.add(f"{tokens} tokens", "prefill", over(prefill.at(tokens), prefill.at(512)))
    return share


def s_f4b(bench: Bench) -> Finding:
    """S-F4b: decodes compute little for each byte that they read. Arithmetic; nothing is timed."""
    length = bench.pick(gpu=1024, cpu=1024, quick=256)
    by_operation = {
        kind: Plot(f"{kind} at {length:,}", x="batch", y="flops per byte", spec=",.1f", log="xy")
        for kind in ("prefill", "decode")
    }
    linear = Plot("linear layers", x="batch", y="flops per byte", spec=",.1f", log="xy")
    attention = Plot("attention", x="batch", y="flops per byte", spec=",.1f")
    ridge = bench.machine.flops_per_s / bench.machine.bytes_per_s
    for size, case in prefill_and_decodes(bench).items():
        for kind, plot in by_operation.items():
            if kind not in case:
                linear.add(kind, size, None)
                attention.add(kind, size, None)
                continue
            intensity = intensities(bench.model, case[kind])
            for operation in ("preproj", "attention", "postproj", "ffn_ln1", "ffn_ln2"):
                plot.add(operation, size, intensity[operation])
            linear.add(kind, size, intensity["products"])
            attention.add(kind, size, intensity["attention"])
        linear.add("ridge", size, ridge)
    return Finding(
        plots=[*by_operation.values(), linear, attention],
        checks=[
            less(linear.line("decode"), linear.line("ridge"), at="start"),
            less(linear.line("ridge"), linear.line("prefill")),
            less(linear.line("decode").times(100), linear.line("prefill"), at="start"),
            less(attention.line("decode").times(10), attention.line("prefill")),
        ],
        quoted=[*linear.all_lines(), attention.line("prefill").over(attention.line("decode"))],
        because="query heads that share a KV head read it once",
    )


def s_f7(bench: Bench) -> Finding:
    """S-F7: a chunk that is not a multiple of the tile costs as much as the next one that is."""
    sizes = [1, 4, 16, 32, 64, 96, 127, 128, 129, 130, 192, 255, 256, 257, 258, 384, 512, 1024]
    quick_sizes = [1, 16, 64, 127, 128, 129, 255, 256, 257]
    sizes = bench.pick(gpu=sizes, cpu=sizes, quick=quick_sizes)
    repeats = bench.pick(gpu=9, cpu=9, quick=3)
    chunks = {str(tokens): [chunk_behind_a_token(tokens)] for tokens in sizes}
    timed = bench.time_batches(chunks, repeats)
    times = {tokens: timed[str(tokens)] for tokens in sizes}

    iteration = Plot("", x="tokens", y="ms", spec=".1f")
    per_token = Plot("a token of linear layers", x="tokens", y="ms", spec=".3f", log="xy")
    for tokens, time in times.items():
        iteration.add("iteration", tokens, time.total_ms)
        iteration.add("linear layers", tokens, time.products_ms)
        per_token.add("linear layers", tokens, time.products_ms / tokens)
    alone_and_among = Plot(
        "a token of linear layers, alone and among 256", x="", y="ms", spec=".3f"
    )
    alone_and_among.add("alone", "tokens", times[1].products_ms / 1)
    alone_and_among.add("among", "tokens", times[256].products_ms / 256)
    steps = Plot("by one token more", x="more", y="times as long", spec=".2fx")
    for tokens in (128, 129, 256, 257):
        ratio = times[tokens].total_ms / times[tokens - 1].total_ms
        steps.add(f"to {tokens} tokens", "tokens", ratio)
    return Finding(
        plots=[iteration, per_token, alone_and_among, steps],
        checks=[less(alone_and_among.line("among").times(2), alone_and_among.line("alone"))],
        quoted=steps.all_lines(),
        because=f"{reads_weights(bench)}, and steps at whole tiles need not show on a CPU",
    )


def s_f8(bench: Bench) -> Finding:
    """S-F8: a decode costs less beside a chunk of 256 than in a batch of its own.

    The gain falls with the batch: B decodes alone share one pass over the weights already."""
    chunk = bench.pick(gpu=256, cpu=256, quick=64)
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
            cost.add("decode alone", size, table.decode_only.decode_token_ms)
            cost.add("riding", size, table.decode_maximal.decode_token_ms)
            cost.add("prefill", size, table.prefill_only.prefill_token_ms)
        costs.append(cost)
    lines = speedups.all_lines()
    return Finding(
        plots=[speedups, *costs],
        checks=[*(less(1, line) for line in lines), *(falls(line) for line in lines)],
        quoted=lines,
        because=(
            f"with B decodes B - 1 rows are computed anew: {reads_weights(bench)}; "
            "- is lost in the noise of the chunk"
        ),
    )


def s_f10(bench: Bench) -> Finding:
    """S-F10: the same requests take less time in the linear layers, and no more in attention."""
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    sizes = [(6, 1004, 20), (18, 956, 68)]
    cases = bench.pick(gpu=sizes, cpu=sizes, quick=[(6, 236, 20)])
    ratios = Plot("request-level over sarathi", x="batch", y="times less", spec=".2fx")
    for batch, prompt, output in cases:
        context = prompt + output // 2 + 1  # of a decode in the middle of the output
        chunk = prompt // 4
        riding = decodes(batch - 1, context)
        request_level = [prompts(1, prompt)] * batch + [decodes(batch, context)] * output
        sarathi = [alone + riding for alone in chunks_of(prompt, chunk)] * batch
        times = bench.time_batches({"request-level": request_level, "sarathi": sarathi}, repeats)
        whole = times["request-level"]
        chunked = times["sarathi"]
        ratios.add("ffn_ln1", batch, whole.ffn_ln1_ms / chunked.ffn_ln1_ms)
        ratios.add("ffn_ln2", batch, whole.ffn_ln2_ms / chunked.ffn_ln2_ms)
        ratios.add("preproj", batch, whole.preproj_ms / chunked.preproj_ms)
        ratios.add("postproj", batch, whole.postproj_ms / chunked.postproj_ms)
        ratios.add("linear", batch, whole.products_ms / chunked.products_ms)
        ratios.add("attention", batch, whole.attention_ms / chunked.attention_ms)
    operations = ("ffn_ln1", "ffn_ln2", "preproj", "postproj", "attention")
    return Finding(
        plots=[ratios],
        checks=[less(1.02, ratios.line("linear")), less(ratios.line("attention"), 1.1)],
        quoted=[ratios.line(operation) for operation in operations],
        because=f"{reads_weights(bench)}: decodes alone cost little more than riding",
    )


def s_f13(bench: Bench) -> Finding:
    """S-F13: the smaller the chunks of a prompt, the longer its attention and its prefill take."""
    length = bench.pick(gpu=1024, cpu=1024, quick=256)
    chunk_sizes = bench.pick(gpu=[64, 128, 256, 512], cpu=[64, 128, 256, 512], quick=[32, 64, 128])
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    plot = Plot("", x="chunk", y="times that of the whole prompt", spec=".2fx", log="x")
    for chunk in chunk_sizes:
        case = {"chunks": chunks_of(length, chunk), "whole": [prompts(1, length)]}
        times = bench.time_batches(case, repeats)
        chunks = times["chunks"]
        whole = times["whole"]
        plot.add("attention", chunk, chunks.attention_ms / whole.attention_ms)
        plot.add("prefill", chunk, chunks.total_ms / whole.total_ms)
    return Finding(
        plots=[plot],
        checks=[falls(plot.line("attention")), falls(plot.line("prefill"))],
        quoted=plot.all_lines(),
        because=f"attention over a chunk costs what its rows cost here, {reads_weights(bench)}",
    )


def ss_f9(bench: Bench) -> Finding:
    """SS-F9: beside a whole prompt decodes take many times as long, beside a chunk a few times."""
    context = bench.pick(gpu=1024, cpu=1024, quick=256)
    chunk = bench.pick(gpu=250, cpu=250, quick=58)
    lengths = bench.pick(gpu=[512, 1024, 2048, 4096], cpu=[512, 1024, 2048], quick=[128, 512])
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    riding = decodes(6, context)
    plot = Plot("", x="prompt", y="times the decodes alone", spec=".1fx", log="xy")
    for length in lengths:
        last_chunk: Batch = (TimedChunk(chunk, length),)
        case = {
            "alone": [riding],
            "prompt": [prompts(1, length) + riding],
            "chunk": [last_chunk + riding],
        }
        times = bench.time_batches(case, repeats)
        alone_ms = times["alone"].total_ms
        plot.add("with a prompt", length, times["prompt"].total_ms / alone_ms)
        plot.add("with a chunk", length, times["chunk"].total_ms / alone_ms)
    with_prompt = plot.line("with a prompt")
    with_chunk = plot.line("with a chunk")
    return Finding(
        plots=[plot],
        checks=[
            rises(with_prompt),
            rises(with_prompt.over(with_chunk)),
            less(with_chunk.times(2), with_prompt, at="end"),
        ],
        quoted=plot.all_lines(),
    )


def ss_f14(bench: Bench) -> Finding:
    """SS-F14: chunks make a prefill longer, by the less the larger they are."""
    lengths = bench.pick(gpu=[2048, 4096, 8192], cpu=[512, 1024, 2048], quick=[128, 256])
    small = bench.pick(gpu=512, cpu=128, quick=32)
    medium = 2 * small
    large = 4 * small
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    plot = Plot(
        f"chunks of {small}, {medium}, {large}",
        x="prompt",
        y="times that of the whole prompt",
        spec=".2fx",
        log="x",
    )
    for length in lengths:
        case = {
            "whole": [prompts(1, length)],
            "small": chunks_of(length, small),
            "medium": chunks_of(length, medium),
            "large": chunks_of(length, large),
        }
        times = bench.time_batches(case, repeats)
        for name in ("small", "medium", "large"):
            plot.add(name, length, times[name].total_ms / times["whole"].total_ms)
    return Finding(
        plots=[plot],
        checks=[
            less(plot.line("small"), 1.25),
            less(plot.line("large"), 1.05),
            less(plot.line("large").times(0.98), plot.line("small")),
        ],
        quoted=plot.all_lines(),
    )


def b_2(bench: Bench) -> Finding:
    """B-2: a prompt in chunks makes eight short steps of six decodes, whole one long stall."""
    chunk = bench.pick(gpu=256, cpu=256, quick=64)
    context = bench.pick(gpu=1024, cpu=1024, quick=256)
    repeats = bench.pick(gpu=5, cpu=5, quick=3)
    length = 8 * chunk
    riding = decodes(6, context)
    plot = Plot("", x="prompt tokens so far", y="ms", spec=".1f")
    for end in range(chunk, length + 1, chunk):
        next_chunk: Batch = (TimedChunk(chunk, end),)
        case = {"alone": [riding], "chunk": [next_chunk + riding]}
        if end == length:
            case["prompt"] = [prompts(1, length) + riding]
        times = bench.time_batches(case, repeats)
        whole_ms = times["prompt"].total_ms if "prompt" in times else None
        plot.add("decodes alone", end, times["alone"].total_ms)
        plot.add("with a chunk", end, times["chunk"].total_ms)
        plot.add("with the prompt", end, whole_ms)
    with_chunk = plot.line("with a chunk")
    return Finding(
        plots=[plot],
        checks=[less(with_chunk.times(2), plot.line("with the prompt"), at="end")],
        quoted=plot.all_lines(),
    )
