"""Pick a token budget for a TBT SLO on this machine (Sarathi-Serve §4.3).

    python bench.py budget --slo-tbt 0.3

Read first: policies/token_budget.py, which times hybrid batches and chooses; what it found is said here."""

from functools import partial

from cli import options
from lab.measure import timing as measure
from policies import token_budget as slo
from views import tables


def add_options(parser):
    """The options of `bench.py budget`."""
    parser.add_table("budget", "json")
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")


def main(args):
    """The command. Sets args.contexts: of the decodes, and at the chunk's end."""
    args.tile = min(args.tile, args.max_len)
    args.contexts = [max(1, args.max_len // 8), max(1, args.max_len // 2)]
    model = options.load_model(args, "max_len", "llama3-8b", 75e9)
    machine = measure.describe_machine(model, args, args.tile)
    print(options.machine_lines(machine))
    size = min(64, args.max_len)
    pages = -(-args.contexts[-1] // size) * args.decodes + -(-args.max_len // size)
    runner = options.runner_for(model)(model, pages, size, args.max_len, args.attention)

    def timed(*cases):
        work, worst = partial(slo.time_iterations, *cases), lambda rows: max(r.spread for r in rows)
        rows, drift = measure.steadily(work, model.device, tries=2, spread_of=worst)
        return [row._replace(spread=drift) for row in rows]

    sizes = args.decodes, args.contexts, args.tile, args.max_len
    budget, profile = slo.choose_budget(runner, args.slo_tbt, *sizes, timed)
    shown, ordered, (short, long) = {}, sorted(profile), args.contexts
    for a, b in zip(ordered[::2], ordered[1::2]):  # at both contexts
        its = {"what": f"{a.budget - args.decodes} + {args.decodes}"}
        its |= {"short_ms": 1e3 * a.seconds, "long_ms": 1e3 * b.seconds}
        its["met"] = "yes" if max(a.seconds, b.seconds) <= args.slo_tbt else "no"
        shown[measure.mark(a.budget, max(a.spread, b.spread) > measure.BUSY)] = its
    tables.print_rows("profile", shown, short=short, long=long, slo_ms=1e3 * args.slo_tbt)
    text = f"Token budget {budget}: the largest of whole tiles of {args.tile} that meets the SLO."
    if max(row.spread for row in profile) > measure.BUSY:
        budget, text = None, f"Token budget: {measure.TOO_BUSY}."
    print(text)
    report = {"machine": machine, "profile": [row._asdict() for row in profile]}
    options.write_json(args, report | {"budget": budget, "conclusion": text})
    options.wrote(args.json)
