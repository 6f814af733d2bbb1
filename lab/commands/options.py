"""The options of the commands that measure: a field is an option, its docstring the help.

Imports no torch, so that a help comes at once. Read first: cli/model.py, the options of a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveFloat, PositiveInt
from cyclopts.validators import Number

from lab.measure.arrival import LENGTHS
from lab.simulator.devices import DEVICES


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """The options of `bench.py offline`. Raises ValueError for sizes that do not go together."""

    policies: str = "request-level,orca-best,vllm,sarathi,sarathi-serve"
    """With commas; my_policy.py:Class or sarathi:64, too."""
    chunk: PositiveInt = 256
    """C, the chunk size and token budget."""
    batch: Annotated[int, Parameter(validator=Number(gte=2))] = 6
    """B, the most requests at once."""
    seq_len: Annotated[int, Parameter(validator=Number(gte=3))] = 1000
    """Prompt and output tokens of a request, together."""
    requests: PositiveInt | None = None
    """[default: up to 5 rounds of B, as many as are served in 40 s]"""
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BatchesOptions:
    """The options of `bench.py batches`."""

    slo: PositiveFloat | None = None
    """Find the largest token budget within this TBT, in seconds."""
    max_len: PositiveInt | None = None
    """With --slo, the longest request. [default: 1024, on a GPU 8192]"""
    json: Path | None = None
    """Write all that is printed, with these options."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """A load and the engines that serve it: of `bench.py serve` and `capacity`."""

    policies: str = "vllm,orca,sarathi-serve,dynamic"
    """With commas; my_policy.py:Class or sarathi:64, too."""
    slo: str = "strict"
    """P99 TBT: strict or relaxed, 5x or 25x a decode, or in s."""
    requests: PositiveInt | None = None
    """[default: 48, on a GPU 500; of capacity 4 --batch]"""
    lengths: Annotated[str, Parameter(help=f"{', '.join(LENGTHS)}, or PROMPT+OUTPUT, ...")] = (
        "sharegpt4"
    )
    trace: Path | None = None
    """A log: arrived_at, num_prefill_tokens, num_decode_tokens."""
    shared_prefix: str = "0:1"
    """LENGTH:COUNT, of prefixes that prompts begin with."""
    max_len: PositiveInt | None = None
    """The longest request. [default: 1024, on a GPU 8192]"""
    chunk: PositiveInt | None = None
    """C, or the token budget. [default: 128, on a GPU 512]"""
    batch: PositiveInt | None = None
    """B, the most at once. [default: 32, on a GPU 128]"""
    page_size: str | None = None
    """In tokens, or max. [default: 64, on CUDA 256]"""
    kv_tokens: PositiveInt | None = None
    """[default: a third of --batch of --max-len; simulated: all]"""
    prefix_caching: Literal["off", "on", "both"] | None = None
    """[default: both with --shared-prefix]"""
    simulate: Annotated[str | None, Parameter(help=f"Of {', '.join(DEVICES)}.")] = None
    replicas: PositiveInt = 1
    """Simulated copies with one queue."""
    pools: str | None = None
    """PREFILL:DECODE, simulated, beside as many replicas."""
    tp_link: str | None = None
    """Such as nvlink3, pcie4: lab/simulator/devices.py."""
    pp_link: str | None = None
    """Between stages. [default: infiniband]"""
    cpu_ms: NonNegativeFloat = 0.0
    """Simulated CPU time of an iteration."""
    plot: Path | None = None
    """Draw latencies and timelines, or capacities."""
    json: Path | None = None
    """Write all numbers, with these options."""

    def __post_init__(self) -> None:
        if (self.pools or self.replicas > 1) and not self.simulate:
            raise ValueError("--replicas and --pools: go with --simulate")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    """The options of `bench.py serve`."""

    qps: PositiveFloat | None = None
    """Requests per second. [default: half of what is possible]"""
    long_prompt: PositiveInt | None = None
    """The prompt of one more request, the first."""
    classes: str = "normal=1"
    """Shares, as realtime=1,normal=4,low=5."""
    ttft_slo: PositiveFloat = 2.0
    """The TTFT that goodput asks for, in seconds."""
    html: Path | None = None
    """Write a page to step through all decisions."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CapacityOptions(LoadOptions):
    """The options of `bench.py capacity`."""
