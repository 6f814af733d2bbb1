"""What DistServe and Splitwise found about two pools, held against simulated numbers.

Read first: policies/pools.py. Read next: lab/commands/pools.py, which simulates the numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from lab.simulator.goodput import Targets
from policies.pools import Pools


@dataclass(frozen=True)
class Row:
    """A row of a sweep: goodput per GPU of each way to serve, in requests per second."""

    chunks: float  # of the best chunk size
    pools: dict[str, float]  # by split

    @property
    def best_pools(self) -> float:
        """Of the best split."""
        return max(self.pools.values())

    @property
    def best_split(self) -> str | None:
        """The split with the highest goodput; None if none meets the targets."""
        split = max(self.pools, key=lambda name: self.pools[name])
        return split if self.pools[split] else None

    @property
    def gain(self) -> float | None:
        """Pools over chunks; None if chunks do not meet the targets at any rate."""
        return self.best_pools / self.chunks if self.chunks else None

    @property
    def winner(self) -> str:
        """Which is better, if it is by more than a step between two rates."""
        if self.chunks == self.best_pools:
            return "equal" if self.chunks else "none"
        return "chunks" if self.chunks > self.best_pools else f"pools {self.best_split}"


@dataclass(frozen=True)
class LinkRow:
    """What sending over a link costs, at a low rate."""

    at_end_s: float  # from the first token to the second, in the median
    layer_wise_s: float
    alone_s: float  # without a link: replicas
    goodput: float | None  # layer by layer, per GPU; None: not measured


@dataclass(frozen=True)
class Finding:
    """A finding of a paper, and the numbers that it comes out at here."""

    text: str
    paper: str
    here: str
    holds: bool


def describe(targets: Targets) -> str:
    """The targets in a few words."""
    return f"TTFT {targets.ttft_s:g} s, TBT {1e3 * targets.tbt_s:g} ms"


def check_findings(
    strict_ttft_s: float,
    targets: Mapping[str, Row],
    ratios: Mapping[str, Row],
    sizes: Mapping[str, Row],
    links: Mapping[str, LinkRow],
    figure_1: Mapping[str, float],
) -> list[Finding]:
    """What DistServe and Splitwise found, with the numbers here."""
    vllm, chunks, pools = figure_1.values()
    return [
        Finding(
            "DistServe §1, Figure 1: 2 prefill and 1 decode over one GPU, per GPU",
            "2.1x (3.3 / 1.6)",
            f"{_times(pools, vllm)} ({pools:.2f} / {vllm:.2f}) vllm; "
            f"{_times(pools, chunks)} chunks",
            pools > vllm > 0,
        ),
        _find_gains(
            "DistServe §2.3: chunks trade TTFT for TBT: pools over chunks, TTFT 0.5 s / 4 s",
            *(targets[describe(Targets(ttft_s, 0.03))] for ttft_s in (strict_ttft_s, 4)),
        ),
        _find_gains(
            "DistServe §2.3: chunks do not remove interference: TBT 20 ms / 100 ms",
            *(targets[describe(Targets(1, tbt_s))] for tbt_s in (0.02, 0.1)),
        ),
        *_find_delays(links["infiniband"], links["ethernet-25g"]),
        *_find_splits(ratios, sizes),
    ]


def _find_gains(text: str, strict: Row, loose: Row) -> Finding:
    """Whether pools gain more under strict targets."""
    gains = f"{show_gain(strict)} / {show_gain(loose)}"
    return Finding(text, "more if strict", gains, _gain(strict) > _gain(loose))


def _find_delays(infiniband: LinkRow, slow: LinkRow) -> list[Finding]:
    """By how much the second token comes later over two links."""
    return [
        Finding(
            "Splitwise §VI-A: the second token comes later, sent at the end / layer by layer",
            "+64 % / +16.5 %",
            _later(infiniband),
            infiniband.at_end_s > infiniband.layer_wise_s,
        ),
        Finding(
            "DistServe §3.3, §4.2: a slow link needs a placement that avoids it: 25 Gb/s",
            "-",
            _later(slow),
            slow.layer_wise_s > infiniband.layer_wise_s,
        ),
    ]


def _find_splits(ratios: Mapping[str, Row], sizes: Mapping[str, Row]) -> list[Finding]:
    """Which split is best for longer outputs, and what more GPUs change."""
    splits = {name: row.best_split for name, row in ratios.items()}
    shares = [_prefill_share(split) for split in splits.values()]
    small, *_, large = sizes.values()
    return [
        Finding(
            "DistServe §3, Splitwise §IV-D: longer outputs want more GPUs that decode",
            "-",
            ", ".join(f"{name}: {split}" for name, split in splits.items()),
            shares == sorted(shares, reverse=True),
        ),
        Finding(
            f"DistServe §7: few GPUs favour chunks: pools over chunks, {', '.join(sizes)}",
            "-",
            " / ".join(map(show_gain, sizes.values())),
            _gain(small) < _gain(large),
        ),
    ]


def _prefill_share(split: str | None) -> float:
    """The share of the GPUs that prefill."""
    if split is None:
        return 0.0
    pools = Pools.parse(split)
    return pools.prefill / pools.instances


def _gain(row: Row) -> float:
    """Pools over chunks, infinite if only pools meet the targets."""
    if row.gain is not None:
        return row.gain
    return float("inf") if row.best_pools else 1.0


def show_gain(row: Row) -> str:
    """Pools over chunks as text."""
    if row.gain is None:
        return "only pools" if row.best_pools else "neither"
    return f"{row.gain:.2f}x"


def _later(row: LinkRow) -> str:
    """By how much the second token comes later than without a link, at the end / layer by layer."""
    at_end, layer_wise = (s / row.alone_s - 1 for s in (row.at_end_s, row.layer_wise_s))
    return f"+{at_end:.0%} / +{layer_wise:.0%}"


def _times(a: float, b: float) -> str:
    """The quotient as text."""
    return f"{a / b:.2f}x" if b else "-"
