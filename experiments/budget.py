"""Pick a token budget for a TBT SLO on this machine (Sarathi-Serve §4.3).

    python bench.py budget --slo-tbt 0.3

times hybrid batches over token budgets and contexts, and says which budget is the largest of whole
tiles that meets the SLO, and why. Read first: policies/slo.py, which measures this.
"""

from engine import Runner
from experiments.machine import describe_machine
from experiments.options import load_model, machine_lines, number, whole, wholes, write_json
from experiments.tables import print_table
from policies import slo
from policies.iteration_time import IterationTime

DEFAULTS = {"decodes": (16, 64), "max_len": (1024, 8192), "tile": (32, 128)}  # on a CPU, on a GPU


def add_options(parser):
    """The options of `bench.py budget`."""
    add, more = parser.add, dict(type=whole(1))
    on = {name: "{} on a CPU, {} on a GPU".format(*both) for name, both in DEFAULTS.items()}
    seconds = "the SLO of the time between tokens, in seconds; required"
    add("--slo-tbt", seconds, type=number(above=0), required=True)
    add("--decodes", "requests that decode beside the chunk", shown=on["decodes"], **more)
    contexts = "comma-separated tokens of context, of the decodes and at the end of the chunk"
    add("--contexts", contexts, shown="1/8 and 1/2 of --max-len", type=wholes(1))
    add("--max-len", "the longest request, and the largest budget", shown=on["max_len"], **more)
    add("--tile", "budgets are multiples of it", shown=on["tile"], **more)
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    parser.add_files(plot="draw iteration time against token budget")


def check(parser, args):
    """Fill in what was left open; exit with a message if options make no sense together."""
    for option, defaults in DEFAULTS.items():
        if getattr(args, option) is None:
            setattr(args, option, defaults[args.device.startswith("cuda")])
    longest = args.max_len
    args.tile = min(args.tile, longest)
    args.contexts = args.contexts or sorted({max(1, longest // 8), max(1, longest // 2)})
    if args.contexts[-1] > longest:
        parser.error(f"--contexts {args.contexts[-1]}: must be at most --max-len {longest}")


def print_profile(profile, args):
    """The table: a row for each budget, a column for each context."""
    columns = {"token budget": "", "prefill + decodes": ""}
    columns |= {f"ms at {context}": ".1f" for context in args.contexts} | {"meets it": ""}
    times, table = {(row.budget, row.context): row.seconds for row in profile}, []
    for budget in sorted({row.budget for row in profile}):
        seconds = [times[budget, context] for context in args.contexts]
        what, met = f"{budget - args.decodes} + {args.decodes}", max(seconds) <= args.slo_tbt
        table.append([budget, what, *(1e3 * s for s in seconds), "yes" if met else "no"])
    print_table(columns, table)


def explain(budget, profile, base, args):
    """Why this budget, in a few sentences."""
    slowest = {row.budget: row.seconds for row in sorted(profile, key=lambda row: row.seconds)}
    above = min((b for b in slowest if b > budget), default=None)
    more = ", and more than that was not tried"
    more = f"; {above} takes {1e3 * slowest[above]:.0f} ms" if above else more
    prefill, alone = budget - args.decodes, slowest[args.decodes]
    extra = (slowest[budget] - alone) / prefill
    law = IterationTime([(row.shape, row.seconds) for row in profile]).law
    base_ms, token, decode, key, pair = (1e3 * coefficient for coefficient in law)
    return (
        f"Token budget {budget}: the largest of whole tiles of {args.tile} whose slowest "
        f"iteration, {1e3 * slowest[budget]:.0f} ms, meets\n{1e3 * args.slo_tbt:.0f} ms"
        f"{more}.\nThe {args.decodes} decodes alone take {1e3 * alone:.0f} ms, so each of the "
        f"{prefill} prefill tokens beside them costs {1e3 * extra:.2f} ms.\n"
        f"Fitted to all of it: {base_ms:.1f} ms, {token:.3f} ms per prefill token, {decode:.2f} ms "
        f"per decode, {1e3 * key:.2f} ms per 1,000\nkeys of a decode, {1e3 * pair:.2f} ms per "
        f"1,000 (query, key) pairs of a chunk.\nA decode iteration of {base.decodes} requests at "
        f"{base.context} tokens takes {1e3 * base.seconds:.0f} ms: the strict SLO is "
        f"{slo.STRICT * base.seconds:.3g} s, the\nrelaxed one {slo.RELAXED * base.seconds:.3g} s."
    )


def main(args):
    """The command."""
    model = load_model(args, "max_len", gpu_model="llama3-8b", gpu_bytes=75e9)
    machine = describe_machine(model, args, args.tile)
    print(machine_lines(machine))
    size, longest = min(64, args.max_len), args.max_len
    deepest = max(*args.contexts, slo.base_context(longest))
    pages = -(-deepest // size) * args.decodes + -(-longest // size)
    runner = Runner(model, pages, size, longest, args.attention)
    base = slo.base_decode_iteration(runner, longest)
    what = args.slo_tbt, args.decodes, args.contexts, args.tile, longest
    budget, profile = slo.choose_budget(runner, *what)
    print_profile(profile, args)
    text = explain(budget, profile, base, args)
    print(f"\n{text}")
    if args.plot:
        from views.search import plot_budget

        plot_budget(profile, machine, args.plot, slo_s=args.slo_tbt, chosen=budget)
    report = {"machine": machine, "profile": [row._asdict() for row in profile]}
    write_json(args, report | {"base": base._asdict(), "budget": budget, "conclusion": text})
