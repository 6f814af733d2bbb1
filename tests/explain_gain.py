"""Where the gain goes that the matrix products promise: `python -m tests.explain_gain --chunk 128`.

SARATHI's decodes ride with chunks at what a row of a whole prompt costs, and need no pass over the
weights of their own (§4.4). What becomes of that: the batches of request-level and sarathi are run
again, products, attention and the whole apart, and added up. Read first: lab/commands/offline.py.
"""

import sys
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise

from cli import options
from cli.console import run
from cli.options import runner_for
from kv_cache import Span
from lab.commands import offline
from lab.measure import timing as measure
from lab.measure.metrics import steady
from lab.measure.offline_load import run_policies
from sampling import SamplingParams
from views.tables import markdown

COMPARED = "request-level", "sarathi"


def parse_args(words):
    """The options. Exits with a message if these make no sense, or give no full pipeline."""
    what = "Serve a load under request-level and sarathi, and add up where the gain goes."
    parser = options.OptionParser(prog="python -m tests.explain_gain", description=what)
    offline.add_load_options(parser)
    options.add_json_option(parser)
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")
    args = parser.parse_args(words)
    args.load = offline.resolve_load(parser, args)
    args.requests = args.load.requests
    args.pd_ratio = args.load.pd_ratio
    if args.requests < (least := 2 * args.batch + 1):
        parser.error(f"--requests {args.requests}: must be at least {least}, 2 B + 1")
    return args


def products_of(model, rows, logits):
    """A function that runs the products of an iteration, with the head's, alone."""
    heads = [model.head] if logits and model.head else []
    parts = (rows, measure.linear_layers(model)), (logits, heads)
    runs = [measure.bare_products(model, *its) for its in parts]
    return lambda: [run() for run in runs]


def explain(model, policies, timelines, args):
    """The gain of sarathi over request-level, from what the products promise to what was measured:
    "steps", each with the ms per token of both so far and the gain; the "difference" of what they
    add up to from the run's, a fraction; whether "busy". The rest is of run_policies."""
    runner = runner_for(model)(model, args.batch, args.seq_len, args.seq_len, args.attention)
    runner.cache.data.normal_()
    full = {name: steady(timelines[name][1], args.batch, rounds=1) for name in COMPARED}
    pieces = defaultdict(list)  # (part, policy) -> what to run for each iteration
    pieces["products", "chunk"] = 8 * [products_of(model, args.chunk, args.batch)]
    for name in COMPARED:
        prompts = {c.request_id: len(c.prompt) for c in timelines[name][0]}
        for iteration in full[name][0]:
            spans = [  # in any pages: all of them hold noise
                Span([page], start, [1] * length, start + length >= prompts[who])
                for page, (who, start, length, _) in enumerate(iteration.chunks)
            ]
            rows, logits = sum(s.length for s in spans), sum(s.wants_logits for s in spans)
            drawn = runner.cache.data.new_zeros(logits, model.config.vocab_size)
            params = [SamplingParams()] * logits
            part = "products" if iteration.decode_tokens else "prompts"
            pieces[part, name].append(products_of(model, rows, logits))
            pieces["attention", name].append(measure.attention_alone(runner, spans))
            pieces["flatten", name].append(partial(runner.flatten, spans))
            pieces["sampling", name].append(partial(runner.fetch, drawn, params, [0] * logits))
            pieces["all", name].append(partial(runner.greedy, spans))
    # pieces of seconds, and both policies in turn: what slows the machine down is in both
    variants = {key: lambda its=its: [run() for run in its] for key, its in sorted(pieces.items())}
    again = partial(measure.interleaved, variants, model.device, repeats=3, title="explain")
    timings, drift = measure.steadily(again, model.device, tries=1)
    ms = Counter({key: timing.ms for key, timing in timings.items()})
    sums = []  # for each policy, ms per token of its products, with attention, forward, of all
    for name, (iterations, rate, seconds) in full.items():
        products, sampling = ms["products", name] + ms["prompts", name], ms["sampling", name]
        forward = ms["all", name] - ms["flatten", name] - sampling
        outside = 1e3 * (seconds - sum(i.end - i.launch for i in iterations))
        everything = forward + sampling + outside
        its = products, products + ms["attention", name], forward, everything
        sums.append([total / rate / seconds for total in its])
    products, with_attention, forward, everything = zip(*sums)
    prompt_ms = ms["prompts", "request-level"] / full["request-level"][0][0].prefill_tokens
    measured = lambda key: [1e3 / policies[name][key] for name in COMPARED]
    pairs = {
        "products, all rows at a prompt's rate": (products[0], prompt_ms),
        "+ a chunk's own rate": (products[0], ms["products", "chunk"] / 8 / args.chunk),
        "+ partly filled batches": products,
        "+ attention": with_attention,
        "+ small operations": forward,
        "+ sampling and scheduling": everything,
        "the run, its pipeline full": measured("tokens_per_s"),
        "the whole run, with ramp and tail": measured("whole_run_tokens_per_s"),
    }
    steps = [{"step": s, **dict(zip(COMPARED, its))} for s, its in pairs.items()]
    for step in steps:
        step["gain"] = step["request-level"] / step["sarathi"]
    busy = drift > measure.BUSY or any(policies[name]["busy"] for name in COMPARED)
    difference = steps[-3]["gain"] / steps[-2]["gain"] - 1
    return {"steps": steps, "difference": difference, "busy": busy}


def print_explained(its):
    """The table of what `explain` returned."""
    print(f"{measure.mark('Where the gain goes', its['busy'])}: the batches of both once more\n")
    columns = {"ms per token": "", **dict.fromkeys(COMPARED, ".4f"), "gain": ".3fx"}
    print(markdown(columns, [[*step.values()] for step in its["steps"]]))
    a, b = min(pairwise(its["steps"][:6]), key=lambda two: two[1]["gain"] / two[0]["gain"])
    most = f"most is lost to {b['step'].strip('+ ')}, {a['gain']:.2f}x to {b['gain']:.2f}x"
    most = measure.TOO_BUSY if its["busy"] else most
    print(f"\n{most}; the parts add up to the run's gain {its['difference']:+.1%}")


def main(argv=None):
    """The command line, whose words are `argv`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    began, model = time.perf_counter(), options.load_model(args, "seq_len")
    machine = measure.describe_machine(model, args, args.chunk)
    prompt_len = args.load.prompt_len
    sizes = f"{prompt_len} + {args.seq_len - prompt_len} tokens, batch {args.batch}"
    heading = options.machine_lines(machine)
    print(f"{heading}{args.requests} requests of {sizes}, chunk {args.chunk}\n")
    sizes = {"chunk": args.chunk, "attention": args.attention}
    rows = dict(run_policies(model, COMPARED, args.load, **sizes))
    policies = {name: row.to_json() for name, row in rows.items()}
    timelines = {name: (row.run.completions, row.run.iterations) for name, row in rows.items()}
    explained = explain(model, policies, timelines, args)
    print_explained(explained)
    seconds = time.perf_counter() - began
    print(f"\ntook {seconds:.0f} s")
    report = {"machine": machine, "end_to_end": policies, "explained": explained}
    del args.load
    options.write_json(args, report | {"seconds": seconds})
    options.wrote(args.json)


if __name__ == "__main__":
    run(main)
