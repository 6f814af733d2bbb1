"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints Table 2, what a decode costs alone and riding with a prefill chunk, each time beside its
limit; the policies end to end at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1);
and a conclusion. Read first: engine.py and measure.py. Read next: serving.py, for requests that
arrive while others run: Sarathi-Serve's half."""

import textwrap
import time

from tqdm import tqdm

from cli import options
from engine import EngineConfig
from lab.commands import batches
from lab.measure import metrics, workload
from lab.measure import timing as measure
from lab.measure.load_run import EngineServer, LoadRun
from lab.measure.run_plan import run_plan
from views import tables
from views.page import Recorder, page


def add_options(parser):
    """The options of the command."""
    parser.add_table("offline", "json", "offline_load")
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


def check(parser, args):
    """Fill in what was left open; exit with a message if options make no sense together."""
    if not args.batch <= args.chunk <= args.seq_len:
        limits = f"at least --batch {args.batch} and at most --seq-len {args.seq_len}"
        parser.error(f"--chunk {args.chunk}: must be {limits}")
    if "dynamic" in args.policies:
        parser.error("--policies dynamic: follows an SLO, see bench.py serve and capacity")
    run_plan(args.policies, [1], EngineConfig(page_size=1, pages=1))  # may refuse a chunk size
    args.pd_ratio = args.pd_ratio or args.chunk / (args.batch - 1)
    args.requests = args.requests or 3 * args.batch + 1


def main(args, model=None, machine=None):
    """The command, maybe with a model and a machine that are known: its report, which --json
    writes. The parts that are done when it is interrupted are kept."""
    began, model = time.perf_counter(), model or options.load_model(args, "seq_len")
    machine = machine or measure.describe_machine(model, args, args.chunk)
    heading, tera = options.machine_lines(machine), machine["flops_per_s"] / 1e12
    words = dict(machine=machine, tera=tera, giga=machine["bytes_per_s"] / 1e9)
    words["limits"] = measure.mark("measured limits", machine["busy"])
    print(heading + tables.TABLES["limits"]["text"].format(**words))
    recorders = {name: Recorder() for name in args.policies if args.html}
    policies, timelines = {}, {}
    report = {"machine": machine, "end_to_end": policies}
    try:
        table, speedup, promise = decode_maximal(model, machine, args)
        report |= {"decode_maximal": table, "decode_speedup": speedup, "promised_gain": promise}
        print_decode_maximal(table, speedup, args)
        try:
            end_to_end(model, args, recorders, policies, timelines)
        finally:
            if policies:
                print_end_to_end(policies, args)
        report["conclusion"] = conclude(report, args)
        report["seconds"] = time.perf_counter() - began
        print(f"{report['conclusion']}\n\ntook {report['seconds']:.0f} s")
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is above")
        raise
    finally:
        options.write_json(args, report)
        options.wrote(args.json)
    anchor_s = 10 * table["decode-only"]["total_ms"] / 1e3
    if args.plot:
        from views.timelines import plot_timelines

        plot_timelines(timelines, machine, args.plot, anchor_s)
    if args.html:
        title = f"{args.requests} requests, all there at the start"
        options.write_text(args.html, page(title, heading, recorders, slo_s=anchor_s))
    options.wrote(args.plot, args.html)
    return report


def decode_maximal(model, machine, args):
    """Time a whole prompt of seq_len tokens, and at its end a chunk, B decodes, and the chunk with
    B - 1 decodes.

    Returns (rows, speedup, promise). `rows` maps the batch to its numbers, times in ms; products
    and attention are timed alone. A decode of the hybrid batch costs what it takes longer than the
    same chunk alone (SARATHI §5.1.1); `speedup` says how many times more it costs in the
    decode-only one, in all and in the products; None where that is lost in the noise, half the
    spread of the chunk's times. `promise` is the gain in throughput over request-level at the
    balanced ratio if each row of a hybrid batch cost what one of a whole prompt costs, in the
    products (§4.4, §5.1.3)."""
    B, context, length = args.batch, args.seq_len, args.chunk - (args.batch - 1)
    runner = options.runner_for(model)(model, B, context, context, args.attention)
    chunk, *decodes = (length, context), *[(1, context)] * B
    cases = {"prompt": ((context, context),), "prefill-only": (chunk,), "decode-only": decodes}
    cases["decode-maximal"] = chunk, *decodes[1:]
    rows = batches.timed(runner, machine, cases, 7, head=True, title="Table 2")
    prompt, prefill, decode, hybrid = rows.values()
    its = (prompt, context, 0), (prefill, length, 0), (decode, 0, B), (hybrid, length, B - 1)
    for row, tokens, riding in its:
        alone_ms = (prompt if row is prompt else prefill)["total_ms"] if tokens else 0.0
        row |= {"prefill_tokens": tokens, "decodes": riding}
        row["prefill_token_ms"] = alone_ms / tokens if tokens else None
        row["decode_token_ms"] = (row["total_ms"] - alone_ms) / riding if riding else None
    speedup = {}
    for part in ("total", "products"):
        its = f"{part}_ms"
        extra, noise = hybrid[its] - prefill[its], prefill[its] * prefill["spread"] / 2
        speedup[part] = decode[its] / B / (extra / (B - 1)) if extra > noise else None
    row_ms = (prompt["products_ms"] - prompt["head_ms"]) / context
    apart_ms = (B - 1) * decode["products_ms"] / B
    return rows, speedup, (length * row_ms + apart_ms) / (args.chunk * row_ms)


def print_decode_maximal(rows, speedup, args):
    """Table 2, on this machine: what `decode_maximal` returned."""
    shown = {}
    for name, row in rows.items():
        its = {key: None if x is not None and x < 0 else x for key, x in row.items()}  # noise
        its["tokens"] = f"{row['prefill_tokens']} + {row['decodes']}"
        shown[measure.mark(name, row["busy"])] = its
    total, products = (tables.show(x or "lost in the noise", ".1fx") for x in speedup.values())
    found = measure.TOO_BUSY if is_busy(rows) else f"{total}; of the products {products}"
    tables.print_rows("decode_maximal", shown, speedup=found, **vars(args))


def is_busy(rows):
    """Was the machine too busy for one of these rows to be believed?"""
    return any(row["busy"] for row in rows.values())


def make_load(args):
    """The Arrivals, all at time 0: prompt + output = seq_len tokens at the ratio pd_ratio. The
    first B want 1/B, 2/B, … of the output, or requests begin and end in `lockstep` for ever."""
    B, output = args.batch, round(args.seq_len / (1 + args.pd_ratio))
    output = min(max(1, output), args.seq_len - 1)
    shares = [B if args.lockstep else min(i + 1, B) for i in range(args.requests)]
    outputs = [max(1, output * share // B) for share in shares]
    return [workload.Arrival(0.0, args.seq_len - output, wanted) for wanted in outputs]


def serve_in_turns(model, configs, arrivals, tokens, progress, recorders):
    """{name: Run} of `arrivals`, prompts `tokens`, under {name: EngineConfig}; see LoadRun. The
    engine that has used the least time is next: when the machine slows down for a while, it slows
    down for all of them. The clock of each stands still while it is the turn of others."""
    loads, began = {}, dict.fromkeys(configs, time.perf_counter())
    for name, config in configs.items():
        clock = lambda name=name: time.perf_counter() - began[name]
        engine = options.engine_for(model).from_config(model, config, clock=clock)
        engine.warm_up()
        watching = dict(progress=progress, recorder=recorders.get(name))
        loads[name] = LoadRun(EngineServer(engine, clock), arrivals, tokens, **watching)
    used = dict.fromkeys(configs, 0.0)  # seconds, of each that is not done
    while used:
        name = min(used, key=used.get)
        began[name] = time.perf_counter() - used[name]
        if loads[name].step():
            used[name] = loads[name].server.clock()
        else:
            del used[name]
    return {name: load.result() for name, load in loads.items()}


def end_to_end(model, args, recorders, rows, timelines):
    """Serve one load under each policy, request-level first: `rows` of the table, and `timelines`,
    (completions, iterations). They take turns, but on a GPU: it is steadier, with room for one; and
    in a pipeline, where the batches of one are on their way when it is another's turn."""
    arrivals = make_load(args)
    tokens = workload.prompts(arrivals, model.config.vocab_size, args.seed)
    limits = dict(chunk=args.chunk, max_batch=args.batch, max_len=args.seq_len)
    limits |= dict(pages=args.batch, page_size=args.seq_len)  # a slot for each
    config = EngineConfig(**limits, attention=args.attention)
    names = sorted(args.policies, key=lambda name: name != "request-level")
    alone = model.device.type == "cuda" or model.stages > 1
    with tqdm(desc="requests", total=len(names) * len(arrivals), leave=False, disable=None) as bar:
        for group in [[name] for name in names] if alone else [names]:
            its = run_plan(group, [args.seq_len], config)
            runs = serve_in_turns(model, its, arrivals, tokens, bar.update, recorders)
            for name, run in runs.items():
                row = rows[name] = row_of(run, args.batch)
                timelines[name], base = run, rows.get("request-level")
                for part in ("", "whole_run_"):
                    its = base and base[f"{part}tokens_per_s"]
                    row[f"{part}gain"] = row[f"{part}tokens_per_s"] / its if its else None


def row_of(run, batch):
    """The row of a Run in the table of policies, but for the gains."""
    row = metrics.summarize_run(run.completions, run.iterations, run.seconds).to_json()
    row |= {"busy": run.drift > measure.BUSY, "whole_run_tokens_per_s": row["tokens_per_s"]}
    _, row["tokens_per_s"], _ = metrics.steady(run.iterations, batch)
    return row


def print_end_to_end(rows, args):
    """The table of policies: the rows of `end_to_end`."""
    prompt = make_load(args)[0].prompt_len
    output, least = args.seq_len - prompt, 2 * args.batch + 1
    words = dict(prompt=prompt, output=output, ratio=prompt / output, least=least)
    shown = {measure.mark(name, row["busy"]): row for name, row in rows.items()}
    tables.print_rows("end_to_end", shown, **words, **vars(args))


def conclude(report, args):
    """What to take home; of what was measured on a busy machine, that it was."""
    table, policies = report["decode_maximal"], report["end_to_end"]
    alone, riding = (table[name]["decode_token_ms"] for name in ("decode-only", "decode-maximal"))
    riding = f"{riding:.2f} ms" if report["decode_speedup"]["total"] else "less than the noise"
    words = dict(args=args, report=report, alone=alone, riding=riding)
    its = (f"{name} {row['longest_stall_s']:.3g} s" for name, row in policies.items())
    gain = policies.get("sarathi", {}).get("gain")
    words |= dict(stalls=", ".join(its), gain=f", sarathi runs at {gain:.2f}x" if gain else "")
    busy = {"stalls": is_busy(policies), "decode": is_busy(table)}
    busy["throughput"] = any(busy.values())
    texts = []
    for about, (what, said) in tables.TABLES["conclusion"].items():
        text = f"   {what}: {measure.TOO_BUSY if busy[about] else said}.".format(**words)
        texts.append(textwrap.fill(text, 100, subsequent_indent="   "))
    return "3." + "\n".join(texts)[2:]
