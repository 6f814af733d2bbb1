"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints what a decode costs alone and beside a prefill chunk (Table 2); then the policies end to end
at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); then a conclusion. Where other
programs use the machine, all is measured in CPU time on one thread. Read first: engine.py. Read
next: offline_run.py, which measures; serve.py, where requests arrive while others run:
Sarathi-Serve's half."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from cyclopts.validators import Number

from cli.model import ModelOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """The options of `bench.py offline`. Raises ValueError for sizes that do not go together."""

    policies: str = "request-level,orca-best,vllm,sarathi,sarathi-serve"
    """Comma-separated, or my_policy.py:ClassName; sarathi-serve:64 has a chunk of its own,
    orca-best lets one prompt into a batch, vllm is its scheduler of 2023."""
    chunk: PositiveInt = 256
    """C, the chunk size and token budget, in tokens."""
    batch: Annotated[int, Parameter(validator=Number(gte=2))] = 6
    """B, the most requests at once."""
    seq_len: Annotated[int, Parameter(validator=Number(gte=3))] = 1000
    """Prompt and output tokens of a request, together."""
    requests: PositiveInt | None = None
    """Requests to serve. [default: up to 5 rounds of B, as many as are served in 40 s]"""
    plot: Path | None = None
    """Draw each policy's iterations."""
    json: Path | None = None
    """Write all that is printed, with these options."""

    def __post_init__(self) -> None:
        if not self.batch <= self.chunk <= self.seq_len:
            limits = f"at least --batch {self.batch} and at most --seq-len {self.seq_len}"
            raise ValueError(f"--chunk {self.chunk}: must be {limits}")

    @property
    def pd_ratio(self) -> float:
        """Prompt tokens per output token, so that every hybrid batch is full: C / (B - 1)."""
        return self.chunk / (self.batch - 1)


def main(options: OfflineOptions = OfflineOptions(), model: ModelOptions = ModelOptions()) -> None:
    """What a decode costs alone and beside a chunk, and all policies end to end."""
    from lab.commands.offline_run import run

    run(options, model)
