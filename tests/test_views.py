"""Pictures of runs, held against histories that were worked out by hand: bars and colours."""

import math
from typing import NamedTuple

import pytest
from matplotlib.colors import to_hex

from lab.measure.capacity import Bounded
from lab.pictures.capacities import plot_table
from lab.pictures.style import DECODE, GAPS, HYBRID, PREFILL, WAITING
from lab.pictures.timelines import plot_timelines
from policies.observers import Iteration
from request import Request
from tests.test_metrics import a_completion, an_iteration, decode, prefill

MACHINE = {"model": "llama-tiny", "dtype": "float32", "device": "a CPU", "threads": 2}


class History(NamedTuple):
    """A run that was worked out by hand."""

    completions: list[Request]
    iterations: list[Iteration]


A_RUN = History(  # 0 waits 5 s between two tokens while 1 is prefilled; 2 is never served
    [
        a_completion(0, 4, 0.0, "length", 0.0, [1.0, 2.0, 7.0]),
        a_completion(1, 4, 1.5, "length", 2.0, [6.0, 7.0, 8.0]),
        a_completion(2, 4, 2.5),
    ],
    [
        an_iteration(0.0, 1.0, [prefill(0, 4)]),
        an_iteration(1.0, 2.0, [decode(0)]),
        an_iteration(2.0, 6.0, [prefill(1, 4)]),
        an_iteration(6.0, 7.0, [decode(0), decode(1)]),
        an_iteration(7.0, 8.0, [decode(1), prefill(0, 3)]),
    ],
)
PREEMPTED = History(
    [a_completion(0, 4, 0.0, "length", 0.5, [1.0, 2.0, 6.0])],
    [an_iteration(0.5, 1.0, [prefill(0, 4)]), an_iteration(5.0, 6.0, [prefill(0, 6)])],
)


def bars_of(axis):
    """(start, end, lane, colour) of each bar, lane by lane as they are drawn."""
    rows = []
    for lane in axis.collections:
        for path, color in zip(lane.get_paths(), lane.get_facecolors(), strict=True):
            (start, low), (end, high) = path.get_extents().get_points()
            rows.append((start, end, round((low + high) / 2), to_hex(color)))
    return rows


@pytest.fixture(scope="module")
def axes(tmp_path_factory):
    """Those of the picture of both."""
    file = tmp_path_factory.mktemp("picture") / "picture.png"
    figure = plot_timelines({"vllm": A_RUN, "orca": PREEMPTED}, MACHINE, file, 4.0, letters="AB")
    assert file.read_bytes().startswith(b"\x89PNG")
    return figure.axes


def test_latencies_have_dots_at_p50_and_p99(axes):
    _, dots, *_ = axes[1].lines  # of vllm's gaps of 1, 5, 1 and 1 s
    assert dots.get_xdata().tolist() == pytest.approx([1, 4.88])
    assert dots.get_ydata().tolist() == [0.5, 0.01]


def test_lanes_have_waiting_gaps_and_prefills_and_batches_their_tokens_to_scale(axes):
    _, _, _, lanes, tokens, *_ = axes
    lane_of_0 = [(1, 2, 0), (2, 7, 0), (0, 1, 0), (7, 8, 0)]  # it is let in at once
    lane_of_1 = [(1.5, 2, 1), (6, 7, 1), (7, 8, 1), (2, 6, 1)]
    bars = bars_of(lanes)
    assert sorted(bar[:3] for bar in bars) == sorted(lane_of_0 + lane_of_1)
    above = to_hex(GAPS(math.log10(5 / 4)))  # of the way from the limit, 4 s, to ten times it
    assert [bar[:2] for bar in bars if bar[3] == above] == [(2, 7)]
    assert all(bar[3] == DECODE for bar in bars if bar[:2] in [(1, 2), (6, 7)])
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["A", "B"]  # 2 only waits
    assert lanes.get_xlim() == (0, pytest.approx(8.16))
    assert [bar.get_height() for bar in tokens.patches] == [4, 1, 4, 2, 4]
    assert (tokens.patches[2].get_x(), tokens.patches[2].get_width()) == (2, 4)
    colors = [to_hex(bar.get_facecolor()) for bar in tokens.patches]
    assert colors == [PREFILL, DECODE, PREFILL, DECODE, HYBRID]


def test_a_preempted_request_has_its_new_prefill_in_the_gap_that_it_makes(axes):
    waiting, short, *rest = bars_of(axes[5])
    assert waiting == (0, 0.5, 0, WAITING)
    assert short[:3] == (1, 2, 0)
    assert rest[1:] == [(0.5, 1, 0, PREFILL), (5, 6, 0, PREFILL)]


def test_a_bound_says_so(tmp_path):
    rates = {"vllm": 2.0, "sarathi:256": Bounded(3.0, "at least")}
    (axis,) = plot_table({"capacity": rates}, "", tmp_path / "table.png").axes
    assert [bar.get_width() for bar in axis.patches] == [2, 3]
    assert [text.get_text() for text in axis.texts] == ["2.00", "at least 3.00"]
