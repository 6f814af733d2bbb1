"""Where the gain goes that the matrix products promise: `bench.py explain --chunk 128`.

Serves a load under request-level and sarathi, runs their batches again, part by part, and adds up
where the gain goes. Read first: lab/measure/gain.py, lab/commands/offline.py.
"""

import time
from argparse import Namespace
from itertools import pairwise

from cli.loading import load_model
from cli.options import OptionParser, keeping
from cli.tables import format_table
from lab.commands import offline
from lab.commands.offline import OfflineOptions
from lab.measure import timing
from lab.measure.gain import COMPARED, GainExplanation, Step, explain_gain
from lab.measure.machine_info import measure_machine
from lab.measure.offline_load import PolicyRun
from parallel import runner_for


def add_options(parser: OptionParser) -> None:
    """Add the options of the command: those of the load of `offline`."""
    offline.add_load_options(parser, leave_out=("policies", "plot", "html"))
    parser.set_defaults(policies=list(COMPARED), plot=None, html=None)


def resolve(parser: OptionParser, args: Namespace) -> OfflineOptions:
    """The options, checked. Exits with a message if they give no full pipeline."""
    options = offline.resolve(parser, args)
    least = 2 * options.batch + 1
    if options.requests < least:
        parser.error(f"--requests {options.requests}: must be at least {least}, 2 B + 1")
    return options


def main(options: OfflineOptions) -> None:
    """Measure, explain, print and write. What is done when it is interrupted is kept."""
    began = time.perf_counter()
    options = offline.cut_layers(options)
    load = options.load
    model = load_model(options.model, load.seq_len, positions_from="--seq-len")
    machine = measure_machine(model, options.model.title, options.chunk)
    sizes = f"{load.prompt_len} + {load.output_len} tokens, batch {load.batch}"
    print(machine.heading() + f"{load.requests} requests of {sizes}, chunk {options.chunk}\n")
    runs: dict[str, PolicyRun] = {}
    report: dict[str, object] = {"machine": machine.to_json()}
    with keeping(options, report):
        for name, run in offline.run_with_progress(model, options, recorders={}):
            runs[name] = run
            report["end_to_end"] = {name: run.to_json() for name, run in runs.items()}
        make_runner = runner_for(model)
        runner = make_runner(model, load.batch, load.seq_len, load.seq_len, options.model.attention)
        explanation = explain_gain(runner, runs, options.chunk, load.batch)
        print_explanation(explanation)
        seconds = time.perf_counter() - began
        print(f"\ntook {seconds:.0f} s")
        report |= {"explained": explanation.to_json(), "seconds": seconds}


def print_explanation(explanation: GainExplanation) -> None:
    """Print the table of the steps, and which of them loses most."""
    title = timing.mark("Where the gain goes", explanation.busy)
    print(f"{title}: the batches of both once more\n")
    rows = {
        step.step: [
            ("request-level", step.request_level_ms, ".4f"),
            ("sarathi", step.sarathi_ms, ".4f"),
            ("gain", step.gain, ".3fx"),
        ]
        for step in explanation.steps
    }
    print(format_table("ms per token", rows))
    print(
        f"\n{largest_loss(explanation)}; "
        f"the parts add up to the run's gain {explanation.difference:+.1%}"
    )


def largest_loss(explanation: GainExplanation) -> str:
    """The part that lowers the gain most, in words."""
    if explanation.busy:
        return timing.TOO_BUSY

    def factor(steps: tuple[Step, Step]) -> float:
        before, after = steps
        return after.gain / before.gain

    before, after = min(pairwise(explanation.parts), key=factor)
    cause = after.step.strip("+ ")
    return f"most is lost to {cause}, {before.gain:.2f}x to {after.gain:.2f}x"
