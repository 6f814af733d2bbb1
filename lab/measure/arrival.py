"""A request of a load. Plain Python. Read next: workload.py, which makes loads of them."""

from typing import NamedTuple


class Arrival(NamedTuple):
    """One request: when it arrives, its tokens, its class, its SLOs, and who asks."""

    time: float  # in seconds from the start of the run
    prompt_len: int
    output_len: int
    priority: str = "normal"
    ttft_slo: float | None = None  # in seconds, as tbt_slo
    tbt_slo: float | None = None
    user: str = ""
