"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints what a decode costs alone and beside a prefill chunk (Table 2); then the policies end to end
at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); then a conclusion. Where other
programs use the machine, all is measured in CPU time on one thread. Read first: engine.py. Read
next: offline_run.py, which measures; serve.py, where requests arrive while others run:
Sarathi-Serve's half."""

from cli.model import ModelOptions
from lab.commands.options import OfflineOptions


def main(options: OfflineOptions = OfflineOptions(), model: ModelOptions = ModelOptions()) -> None:
    """What a decode costs alone and beside a chunk, and all policies end to end."""
    from lab.commands.offline_run import run

    run(options, model)
