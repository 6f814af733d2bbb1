"""Claims about single batches: what prefills, decodes, chunks and hybrid batches cost.

A lab times batches that are made by hand: no scheduler is under test here. S is SARATHI, SS is
Sarathi-Serve; F is a figure, T a table. Read first: claim.py, labs.py, lab/measure/batch_times.py.
Read next: throughput.py."""

from itertools import product

from lab.claims.claim import Result, claim
from lab.claims.labs import Lab
from lab.claims.systems import A6000_13B, GPT3_LAYER, MISTRAL_7B, YI_34B
from lab.measure.batch_times import Batch, TimedChunk, chunks_of, decodes, prompts
from lab.measure.capacity import Bounded
from lab.measure.decode_cost import table_2_batches


@claim("S-F3", "A decode costs as much as many tokens of a prompt", A6000_13B, least_ridge=10)
def decode_and_prefill(lab: Lab) -> Result:
    """A decode reads all weights for one row, a prompt for all of its rows. The decodes of a batch
    share one reading of the weights; each reads keys of its own."""
    length = lab.scaled(1024)
    result = Result("batch", ".3g")
    for batch, paper in {1: 200, 2: 100, 4: None, 8: None, 18: 16.7}.items():
        prompt = prompts(1 if lab.is_small else batch, length)  # more take long
        times = lab.time({"prefill": [prompt], "decode": [decodes(batch, length)]})
        for kind, time in times.items():
            for part, ms in time.parts_ms.items():
                result.add(batch, {f"{kind}: {part}": ms / time.tokens})
        prefill = times["prefill"]
        decode = times["decode"]
        ratio = decode.total_ms / decode.tokens / (prefill.total_ms / prefill.tokens)
        result.add(batch, {"decode / prefill": ratio})
        if paper:
            result.publish(f"prefill tokens that cost a decode, B = {batch}", paper, ratio)
        if batch == 1:
            share = prefill.other_ms / prefill.total_ms
            result.publish("share of the other operations", Bounded(0.05, "below"), share)
    ratios = result.column("decode / prefill")
    result.expect("a decode costs ten tokens of a prompt", ratios["1"] > 10)
    return result


@claim(
    "S-F4",
    "A few hundred tokens of prefill use a layer fully; it takes as many decodes",
    A6000_13B,
    GPT3_LAYER,
    least_ridge=32,
)
def saturation(lab: Lab) -> Result:
    """A chunk of 16 rows reads all weights, as one of a thousand does. A wider layer needs fewer
    tokens (S-4.2). Decodes compute little for each byte that they read (S-3.1).

    An eighth below the peak is marginal, as 256 tokens are to the paper. In the cost model they are
    whole tiles, at full rate. Of GPT-3 128 are 9 % below the peak there."""
    result = Result("tokens", ".4g")
    for tokens in [2**exponent for exponent in range(13)]:
        chunk = TimedChunk(tokens, lab.cached_tokens + tokens)
        sequences: dict[str, list[Batch]] = {"prefill": [(chunk,)]}
        if tokens <= 512:  # more decodes may not fit
            sequences["decode"] = [decodes(tokens, 1024)]
        times = lab.time(sequences, layers=1)
        for kind, time in times.items():
            result.add(tokens, {f"{kind}, tokens/ms": time.tokens_per_ms})
        if "decode" in times:
            intensity = times["decode"].intensity
            result.add(tokens, {"decode, flops per byte / ridge": intensity / lab.ridge})
    prefill = result.column("prefill, tokens/ms")
    decode = result.column("decode, tokens/ms")
    saturates = saturation_of(prefill)
    if lab.name == GPT3_LAYER.name:
        result.publish("tokens at which a layer of GPT-3 peaks", 256, saturates)
    else:
        ratio = prefill["256"] / prefill["512"]
        result.publish("throughput of 256 tokens of prefill over that of 512", 0.875, ratio)
        result.publish("tokens at which prefill saturates", 512, saturates)
        result.publish("decodes that saturate, contexts of 1,024", 256, saturation_of(decode))
        result.publish("tokens/ms of 512 tokens of prefill in one layer", 180, prefill["512"])
    result.expect("16 tokens have half the throughput of 512", prefill["16"] < prefill["512"] / 2)
    return result


def saturation_of(tokens_per_ms: dict[str, float]) -> float:
    """The fewest tokens with a throughput that is marginally below the largest."""
    threshold = 0.875 * max(tokens_per_ms.values())
    return min(float(tokens) for tokens, rate in tokens_per_ms.items() if rate >= threshold)


@claim(
    "S-F7", "A chunk costs as much as the next one that fills a tile", A6000_13B, least_ridge=128
)
def tiles(lab: Lab) -> Result:
    """The 257th row begins a third tile, which is computed whole.

    Below the ridge few tokens take as long as one, above it twice the tokens twice as long (SS-F6).

    The 4 ms for what is not in the operations of S-T2 are what these three times leave."""
    sizes = (1, 4, 16, 32, 64, 96, 127, 128, 129, 192, 255, 256, 257, 258, 384, 512, 1024)
    result = Result("tokens")
    for tokens in sizes:
        chunk = TimedChunk(tokens, lab.cached_tokens + tokens)
        time = lab.time({"chunk": [(chunk,)]})["chunk"]
        result.add(tokens, {"iteration, ms": time.total_ms, "linear layers, ms": time.products_ms})
    ms = result.column("iteration, ms")
    step = ms["257"] / ms["256"]
    result.publish("257 tokens over 256", 1.32, step)
    result.publish("256 tokens over 128", 1.27, ms["256"] / ms["128"])
    for tokens, paper in {"128": 55, "256": 69.8, "257": 92.33}.items():
        result.publish(f"ms of {tokens} tokens", paper, ms[tokens], "fitted")
    result.expect(
        "the 257th token takes a tenth, the 256th does not", step > 1.1 > ms["256"] / ms["255"]
    )
    return result


TABLE_2 = {  # SARATHI's, in ms: a prompt, four decodes, and three of them beside a chunk
    "prompt": {"linear": 224.8, "attention": 10},
    "decode_only": {"linear": 44.28, "attention": 5.68, "a decode": 12.49},
    "decode_maximal": {"linear": 223.2, "attention": 15.2, "a decode": 1.2},
}


def publish_table_2(lab: Lab, result: Result) -> None:
    """Add the numbers of TABLE_2."""
    length = lab.scaled(1024)
    cost = lab.decode_cost(length, 4, length)
    decode_ms = {"decode_only": cost.alone_ms.value, "decode_maximal": cost.beside_ms.value}
    table = lab.time({n: [b] for n, b in table_2_batches(length, 4, length).items()})
    for name, papers in TABLE_2.items():
        row = table[name.replace("_", "-")]
        ours = {"linear": row.products_ms, "attention": row.attention_ms}
        ours["a decode"] = decode_ms.get(name, 0.0)
        for part, paper in papers.items():
            source = "text" if part == "a decode" else "fitted"
            result.publish(f"{part}, {name} of Table 2, ms", paper, ours[part], source)


@claim("S-F8", "A decode costs less beside a chunk of 256 than alone", A6000_13B, least_ridge=6)
def decode_speedup(lab: Lab) -> Result:
    """Alone B decodes share one reading of the weights; riding they need none.

    Their keys and values are read as before, so that attention is not cheaper (S-4.3.1), though a
    Chinese post says so. The smallest is that of the longest context.

    Table 2 has a chunk of 1,021 and three decodes. Its caption says four prompts, but 0.229 ms for
    a token make it one of 1,024. Its first two batches are what the constants of an A6000 were set
    by, the attention of the third what three decodes beside a chunk take longer."""
    result = Result("context, batch")
    chunk = lab.scaled(256)
    batches = {1024: (2, 4, 6, 10, 18), 2048: (2, 4, 6, 10), 3072: (2, 4, 6)}
    for context, sizes in batches.items():
        for batch in (2, 6) if lab.is_small else sizes:
            sizes_of_row = (lab.scaled(context), batch, chunk)
            cost = lab.decode_cost(*sizes_of_row)
            times = lab.time({n: [b] for n, b in table_2_batches(*sizes_of_row).items()})
            added_ms = times["decode-maximal"].attention_ms - times["prefill-only"].attention_ms
            columns = {
                "speedup": cost.speedup and cost.speedup.value,
                "its error": cost.speedup and cost.speedup.error,
                "alone, ms": cost.alone_ms.value,
                "riding, ms": cost.beside_ms.value,
                "attention it adds, ms": added_ms,
            }
            result.add(f"{lab.scaled(context):,}, {batch}", columns)
    publish_table_2(lab, result)
    speedups = [*result.column("speedup").values()]
    if speedups:  # or all were lost in the noise
        result.publish("largest speedup", 10, max(speedups))
        result.publish("smallest speedup", 2.8, speedups[-1])
    result.expect("every decode is cheaper riding", min(speedups, default=0.0) > 1)
    return result


@claim(
    "S-F10",
    "SARATHI saves time in the linear layers, and none in attention",
    A6000_13B,
    least_ridge=99,
)
def time_by_operation(lab: Lab) -> Result:
    """Riding decodes need no reading of the weights of their own. Four chunks carry twice as many
    as two at P:D = C / (B - 1), and read a prompt's keys 2.5 times at most."""
    result = Result("chunk, batch")
    for pieces, batch in product((4, 2), (6, 18)):
        output = pieces * (batch - 1)
        prompt = 1024 - output
        context = prompt + output // 2 + 1  # of a decode in the middle of the output
        riding = decodes(batch - 1, context)
        request_level = [prompts(1, prompt)] * batch + [decodes(batch, context)] * output
        sarathi = [chunk + riding for chunk in chunks_of(prompt, prompt // pieces)] * batch
        times = lab.time({"request-level": request_level, "sarathi": sarathi})
        base = times["request-level"]
        for part, ms in times["sarathi"].parts_ms.items():
            result.add(f"{1024 // pieces}, {batch}", {part: base.parts_ms[part] / ms})
    by_part = {part: result.column(part) for part in result.rows["256, 6"]}
    quarters = [by_part["ffn_ln1"][f"256, {batch}"] for batch in (6, 18)]
    result.publish("ffn, largest", 1.6, max(quarters))
    result.publish("ffn, smallest", 1.3, min(quarters))
    result.publish("preproj, largest", 1.38, max(by_part["preproj"].values()))
    result.publish("postproj, smallest", 1.05, by_part["postproj"]["256, 18"])
    result.publish("ffn in chunks of 512", Bounded(1.6, "below"), by_part["ffn_ln1"]["512, 6"])
    result.expect("chunks of 256 save time in the linear layers", min(quarters) > 1.02)
    return result


@claim("S-F13", "Small chunks make attention and the whole prefill longer", A6000_13B)
def small_chunks(lab: Lab) -> Result:
    """Each chunk reads the keys of all chunks before it again.

    The best chunk for throughput lies in between: small ones carry more decodes, but read the
    weights more often.

    In the cost model a chunk of 64 takes as long as one tile of 128, and longer in the paper. There
    256 beats 320, as products compute whole tiles; our scheduler cuts a batch to whole tiles."""
    length = lab.scaled(1024)
    sizes = (64, 128, 256, 512)
    result = Result("chunk")
    for size in sizes:
        chunks = chunks_of(length, lab.scaled(size))
        times = lab.time({"chunks": chunks, "prompt": [prompts(1, length)]})
        cut = times["chunks"]
        prompt = times["prompt"]
        result.add(size, {"attention": cut.attention_ms / prompt.attention_ms})
        result.add(size, {"prefill": cut.total_ms / prompt.total_ms})
    if not lab.is_small:
        names = {size: f"sarathi:{size}" for size in sizes}
        gains = lab.gains(["request-level", *names.values()], 1024, 18, 256 / 17)
        for size, name in names.items():
            result.add(size, {"gain in throughput": gains[name]})
        result.publish("gain with chunks of 128, up to", 1.16, gains["sarathi:128"])
    prefill = result.column("prefill")
    attention = result.column("attention")
    result.publish("prefill in chunks of 64", 5, prefill["64"])
    result.publish("attention in chunks of 64", 3, attention["64"])
    result.publish("prefill in chunks of 128", Bounded(2, "at least"), prefill["128"])
    result.publish("prefill in chunks of 256", Bounded(1.2, "below"), prefill["256"])
    result.publish("prefill in chunks of 512", Bounded(1.1, "below"), prefill["512"])
    result.expect("attention takes longer in smaller chunks", attention["64"] > attention["512"])
    return result


@claim("SS-F9", "A whole prompt delays decodes many times as long as a chunk does", MISTRAL_7B)
def delayed_decodes(lab: Lab) -> Result:
    """The prompt has many times the rows of a chunk, and all must be computed. More decodes, or
    longer contexts, take longer alone, so that a chunk delays them less.

    The paper does not say batch, context and prompt. A post's timeline of six decodes (B-2) has 10
    times as long with a prompt, and 1.2 with a chunk, which its own table contradicts (B-3)."""
    result = Result("decodes, context")
    length = lab.scaled(4096)
    total = lab.scaled(512)
    for batch, context in product((8, 32, 64), (1024, 4096)):
        riding = decodes(batch, lab.scaled(context))
        times = lab.time(
            {
                "alone": [riding],
                "a prompt": [riding + prompts(1, length)],
                "its last chunk": [(*riding, TimedChunk(total - batch, length - batch))],
            }
        )
        alone_ms = times.pop("alone").total_ms
        row = f"{batch}, {lab.scaled(context):,}"
        result.add(row, {name: time.total_ms / alone_ms for name, time in times.items()})
    prompt = result.column("a prompt")
    chunk = result.column("its last chunk")
    result.publish("beside a whole prompt, at most", 28.3, max(prompt.values()))
    result.expect("the prompt takes twice as long", all(prompt[x] > 2 * chunk[x] for x in prompt))
    return result


FIGURE_14 = {  # prompt -> ms of it whole, and times as long in chunks of 512, 1,024, 2,048
    2047: (378.1, 1.152, 1.175, 0.999),
    4095: (775.4, 1.189, 1.202, 1.024),
    8191: (1754.2, 1.117, 1.109, 0.937),
    16383: (4535.0, 0.995, 0.961, 0.805),
}


@claim("SS-F14", "Chunks above the ridge add little to the time of a prefill", YI_34B)
def chunks_of_prefills(lab: Lab) -> Result:
    """Above the ridge the rows of a chunk take as long as those of a prompt.

    The numbers are the authors' data, osdi-experiments/figure-9/chunking-overhead.csv. There chunks
    save the masked half of attention, so that long prompts take less time in them. The shortest
    prompt is fitted: without it 512 tokens would take 10 ms less, and 1,024 33."""
    result = Result("prompt", ".4g")
    sizes = (512, 1024, 2048)
    for prompt, (paper_ms, *papers) in FIGURE_14.items():
        length = lab.scaled(prompt)
        if lab.is_small and length > 2048:
            continue
        source = "fitted" if prompt == 2047 else "data"
        sequences = {f"{size}": chunks_of(length, lab.scaled(size)) for size in sizes}
        times = lab.time({"whole": [prompts(1, length)]} | sequences)
        whole_ms = times["whole"].total_ms
        result.add(length, {"whole, ms": whole_ms})
        result.publish(f"ms of {prompt:,} tokens", paper_ms, whole_ms, source)
        for chunk, paper in zip(sizes, papers, strict=True):
            ratio = times[f"{chunk}"].total_ms / whole_ms
            result.add(length, {f"chunks of {lab.scaled(chunk):,}": ratio})
            result.publish(f"{prompt:,} tokens in chunks of {chunk:,}", paper, ratio, source)
    largest = max(result.column(f"chunks of {lab.scaled(512):,}").values())
    result.publish("in chunks of 512, at most", Bounded(1.25, "below"), largest)
    negligible = max(result.column(f"chunks of {lab.scaled(2048):,}").values())
    result.publish(
        "in chunks of 2,048: negligible, a twentieth", Bounded(1.05, "below"), negligible
    )
    # if each chunk computed those before it again, four would take 2.5 times
    result.expect("the smallest chunks take less than twice as long", largest < 2)
    return result
