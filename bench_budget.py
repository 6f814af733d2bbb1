"""Pick a token budget for a TBT SLO on this machine (Sarathi-Serve §4.3).

    python bench.py budget --slo-tbt 0.3

times hybrid batches over token budgets and contexts, once, prints the table, names the largest budget of whole tiles
that meets the SLO, and says why.

Read first: profiling.py, which measures what is printed here.
"""

import json

import torch

import cli
from attention import make_attention
from experiments import describe_machine
from iteration_time import IterationTime
from kv_cache import KVCache
from profiling import RELAXED, STRICT, base_context, base_decode_iteration, choose_budget


def parse_args(argv):
    """The options after "budget", checked. Exits with a message for one that makes no sense."""
    parser = cli.OptionParser(prog="bench.py budget", description=__doc__.split("\n\n")[0])
    add = parser.add
    add("--slo-tbt", "the SLO of the time between tokens, in seconds; required", shown="none", type=float,
        required=True)
    add("--decodes", "requests that decode beside the chunk", shown="16 on a CPU, 64 on a GPU", type=int)
    add("--contexts", "comma-separated tokens of context, of the decodes and at the end of the chunk",
        shown="1/8 and 1/2 of --max-len")
    add("--max-len", "the longest request, and the largest budget", shown="1024 on a CPU, 8192 on a GPU", type=int)
    add("--tile", "budgets are multiples of it", shown="32 on a CPU, 128 on a GPU", type=int)
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    add("--json", "write all that is printed, with these options", shown="none", metavar="FILE")
    add("--plot", "draw iteration time against token budget", shown="none", metavar="FILE")
    args = parser.parse_args(argv)
    parser.check_model_options(args)
    parser.check_files(args, "json", "plot")
    on_gpu = args.device.startswith("cuda")
    for option, default in (("decodes", (16, 64)), ("max_len", (1024, 8192)), ("tile", (32, 128))):
        if getattr(args, option) is None:
            setattr(args, option, default[on_gpu])
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least 1")
    args.tile = min(args.tile, args.max_len)
    if not 0 < args.slo_tbt < float("inf"):
        parser.error(f"--slo-tbt {args.slo_tbt:g}: must be a positive number of seconds")
    contexts = args.contexts or f"{max(1, args.max_len // 8)},{max(1, args.max_len // 2)}"
    if not all(text.strip().isdecimal() and 1 <= int(text) <= args.max_len for text in contexts.split(",")):
        parser.error(f"--contexts {contexts}: must be numbers in 1 … {args.max_len} (--max-len), with commas")
    args.contexts = sorted({int(text) for text in contexts.split(",")})
    return args


def print_profile(profile, args):
    """The table: a row for each budget, a column for each context."""
    table = [["token budget", "prefill + decodes", *(f"ms at {context}" for context in args.contexts), "meets it"]]
    times = {(row.budget, row.context): row.seconds for row in profile}
    for budget in sorted({row.budget for row in profile}):
        seconds = [times[budget, context] for context in args.contexts]
        table.append([str(budget), f"{budget - args.decodes} + {args.decodes}", *(f"{1e3 * s:.1f}" for s in seconds),
                      "yes" if max(seconds) <= args.slo_tbt else "no"])
    cli.print_table(table)


def explain(budget, profile, base, args):
    """Why this budget, in a few sentences."""
    slowest = {row.budget: 0.0 for row in profile}
    for row in profile:
        slowest[row.budget] = max(slowest[row.budget], row.seconds)
    above = min((b for b in slowest if b > budget), default=None)
    text = (f"Token budget {budget}: the largest of whole tiles of {args.tile} whose slowest iteration, "
            f"{1e3 * slowest[budget]:.0f} ms, meets\n{1e3 * args.slo_tbt:.0f} ms")
    text += f"; {above} takes {1e3 * slowest[above]:.0f} ms.\n" if above else ", and more than that was not tried.\n"
    prefill, decode = budget - args.decodes, slowest[args.decodes]
    text += (f"The {args.decodes} decodes alone take {1e3 * decode:.0f} ms, so each of the {prefill} prefill tokens "
             f"beside them costs {1e3 * (slowest[budget] - decode) / prefill:.2f} ms.\n")
    law = IterationTime([(row.shape, row.seconds) for row in profile]).law
    base_ms, token, decode, key, pair = (1e3 * coefficient for coefficient in law)
    text += (f"Fitted to all of it: {base_ms:.1f} ms, {token:.3f} ms per prefill token, {decode:.2f} ms per decode, "
             f"{1e3 * key:.2f} ms per 1,000\nkeys of a decode, {1e3 * pair:.2f} ms per 1,000 (query, key) pairs of a "
             "chunk.\n")
    text += (f"A decode iteration of {base.decodes} requests at {base.context} tokens takes "
             f"{1e3 * base.seconds:.0f} ms: the strict SLO is {STRICT * base.seconds:.3g} s, the\nrelaxed one "
             f"{RELAXED * base.seconds:.3g} s.")
    return text


def main(argv):
    """The command line."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    model = cli.load_model(args, "max_len", gpu_model="llama3-8b", gpu_bytes=75e9)
    machine = describe_machine(model, args, args.tile)
    print(cli.machine_lines(machine))
    page_size = min(64, args.max_len)
    deepest = max(*args.contexts, base_context(args.max_len))
    pages = -(-deepest // page_size) * args.decodes + -(-args.max_len // page_size)
    cache = KVCache(model.config, pages, page_size, model.device, model.dtype, args.max_len)
    attention = make_attention(model.config, cache, args.attention)
    base = base_decode_iteration(model, cache, attention, args.max_len)
    budget, profile = choose_budget(model, cache, attention, args.slo_tbt, args.decodes, args.contexts, args.tile,
                                    args.max_len)
    print_profile(profile, args)
    text = explain(budget, profile, base, args)
    print(f"\n{text}")
    if args.plot:
        from plot_search import plot_budget

        plot_budget(profile, machine, args.plot, slo_s=args.slo_tbt, chosen=budget)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"options": vars(args), "machine": machine, "profile": [row._asdict() for row in profile],
                       "base": base._asdict(), "budget": budget, "conclusion": text}, file, indent=2)
