"""A request of a load, and the lengths of two datasets. Plain Python, which a help needs at once.

Read next: workload.py, which makes loads."""

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


class LengthStatistics(NamedTuple):
    """The published lengths of a dataset, in tokens."""

    prompt: tuple[int, int]  # the median, and the 90th percentile
    output: tuple[int, int]
    limit: int  # of prompt + output


LENGTHS = {  # Sarathi-Serve, Table 2; the limits are in the text beside it
    "sharegpt4": LengthStatistics(prompt=(1730, 5696), output=(415, 834), limit=8192),
    "arxiv": LengthStatistics(prompt=(7059, 12985), output=(208, 371), limit=16384),
}
