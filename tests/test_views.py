"""Pictures, held against histories that were worked out by hand: bars, points, colours."""

from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lab.claims.table import Table
from lab.measure.capacity import Bounded
from lab.pictures import style
from lab.pictures.bars import Beside, plot_beside_published
from lab.pictures.panels import Mark, plot_panels
from lab.pictures.style import DECODE, HYBRID, OVER, POLICY_COLORS, PREFILL, WAITING
from lab.pictures.timelines import plot_capacity, plot_serving, plot_timelines
from policies.observers import Iteration
from request import Request
from tests.test_metrics import a_completion, an_iteration, decode, prefill

MACHINE = {"model": "llama-tiny", "dtype": "float32", "device": "a CPU", "threads": 2}
near = pytest.approx


class History(NamedTuple):
    """A run that was worked out by hand."""

    completions: list[Request]
    iterations: list[Iteration]


def a_run():
    """0 waits 5 s between two tokens while 1 is prefilled, as under vllm; 2 is never served."""
    iterations = [
        an_iteration(0.0, 1.0, [prefill(0, 4)]),
        an_iteration(1.0, 2.0, [decode(0)]),
        an_iteration(2.0, 6.0, [prefill(1, 4)]),
        an_iteration(6.0, 7.0, [decode(0), decode(1)]),
        an_iteration(7.0, 8.0, [decode(1)]),
    ]
    completions = [
        a_completion(0, 4, 0.0, "length", 0.0, [1.0, 2.0, 7.0]),
        a_completion(1, 4, 1.5, "length", 2.0, [6.0, 7.0, 8.0]),
        a_completion(2, 4, 2.5),
    ]
    return History(completions, iterations)


def served(*token_times, scheduled=0.5):
    """Request 0 with these times of tokens."""
    return [a_completion(0, 4, 0.0, "length", scheduled, list(token_times))]


def points(line):
    """The points of a line."""
    return list(zip(*(data.tolist() for data in line.get_data()), strict=True))


def texts(axis_or_legend):
    """What is written there."""
    return [text.get_text() for text in axis_or_legend.texts]


def labels(axis):
    """The names of the rows."""
    return [label.get_text() for label in axis.get_yticklabels()]


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


def lanes_of(figure):
    """The axes that have lanes."""
    return [axis for axis in figure.axes if axis.get_ylabel() == "request"]


def bars_of(axis):
    """(start, end, lane, colour) of each bar, lane by lane as they are drawn."""
    rows = []
    for lane in axis.collections:
        for path, color in zip(lane.get_paths(), lane.get_facecolors(), strict=True):
            (start, low), (end, high) = path.get_extents().get_points()
            rows.append((start, end, round((low + high) / 2), to_hex(color)))
    return rows


def colors_of(bars):
    return [to_hex(bar.get_facecolor()) for bar in bars]


@pytest.fixture
def file(tmp_path):
    """Where a picture is written; it must be one."""
    path = tmp_path / "picture.png"
    yield path
    assert is_png(path)


def test_timelines_have_lanes_and_the_tokens_of_each_batch_to_scale(file):
    hybrid = an_iteration(2.0, 4.0, [decode(0), prefill(1, 3)])
    other = History(served(1.0, 2.0, 4.0), [*a_run().iterations[:2], hybrid])
    figure = plot_timelines({"vllm": a_run(), "orca": other}, MACHINE, file, anchor_s=4.0)
    assert figure.get_suptitle().endswith("\nllama-tiny, float32, a CPU, 2 threads")
    lanes, tokens, other_lanes, other_tokens, _ = figure.axes
    assert [axis.get_title(loc="left") for axis in (lanes, other_lanes)] == ["vllm", "orca"]
    assert lanes.get_title(loc="right") == "longest time between tokens: 5.00 s"
    gaps_and_chunk_of_0 = [(1, 2, 0), (2, 7, 0), (0, 1, 0)]  # it is let in at once
    wait_gaps_and_chunk_of_1 = [(1.5, 2, 1), (6, 7, 1), (7, 8, 1), (2, 6, 1)]
    bars = [bar[:3] for bar in bars_of(lanes)]
    assert bars == gaps_and_chunk_of_0 + wait_gaps_and_chunk_of_1
    assert labels(lanes) == ["0", "1"]  # 2 only waits
    assert other_lanes.get_xlim() == lanes.get_xlim() == (0, near(8.16))
    assert [bar.get_height() for bar in tokens.patches] == [4, 1, 4, 2, 1]
    assert (tokens.patches[2].get_x(), tokens.patches[2].get_width()) == (2, 4)
    assert colors_of(tokens.patches) == [PREFILL, DECODE, PREFILL, DECODE, DECODE]
    assert colors_of(other_tokens.patches) == [PREFILL, DECODE, HYBRID]


LATENCIES = [  # what is drawn of a run: its axis, the steps of its curve, and its P99
    ("time to first token (TTFT) in s", [1, 4.5, 4.5], [1, 0.5, 0], 4.465),
    ("time between tokens (TBT) in s", [1, 1, 1, 5, 5], [1, 0.75, 0.5, 0.25, 0], 4.88),
    ("scheduling delay in s", [0, 0.5, 0.5], [1, 0.5, 0], 0.495),
]


def test_serving_draws_the_latencies_of_each_run(file):
    figure = plot_serving({"vllm": a_run(), "orca": a_run()}, MACHINE, file, slo_s=0.5)
    for axis, (name, x, share, p99) in zip(figure.axes[:3], LATENCIES, strict=True):
        curve, dots = axis.lines[:2]
        assert axis.get_xlabel() == name and curve.get_label() == "vllm"
        assert curve.get_color() == dots.get_color() == POLICY_COLORS["vllm"]
        assert points(curve) == [near(step) for step in zip(x, share, strict=True)]
        assert points(dots)[1] == near((p99, 0.01))
    tbt = figure.axes[1]
    assert tbt.lines[-1].get_xdata() == [0.5, 0.5] and tbt.get_xlim()[0] < 0.5  # the SLO, in view
    assert [axis.get_xlim() for axis in lanes_of(figure)] == [(0, near(12))] * 2  # the same time
    assert [axis.get_title(loc="left") for axis in lanes_of(figure)] == ["vllm", "orca"]


def test_a_preempted_request_has_its_new_prefill_in_the_gap_that_it_makes(file):
    iterations = [an_iteration(0.5, 1, [prefill(0, 4)]), an_iteration(5, 6, [prefill(0, 6)])]
    run = History(served(1.0, 2.0, 6.0), iterations)
    (lanes,) = lanes_of(plot_serving({"": run}, MACHINE, file, 3.0, letters="A"))
    waits, short, *rest = bars_of(lanes)
    assert waits == (0, 0.5, 0, WAITING) and short[:3] == (1, 2, 0) and short[3] != OVER
    assert rest == [(2, 6, 0, OVER), (0.5, 1, 0, PREFILL), (5, 6, 0, PREFILL)]
    assert labels(lanes) == ["A"]


def point(qps, p99_tbt_s, p50_delay_s=0.1, met=True):
    """What a search notes of a run."""
    return dict(qps=qps, p99_tbt_s=p99_tbt_s, p50_delay_s=p50_delay_s, met=met)


def search(points, capacity_qps, busy=False):
    """What a search found."""
    return dict(points=points, capacity_qps=capacity_qps, busy=busy)


def test_capacity_draws_a_bar_and_its_number_and_a_point_for_each_rate(file):
    tried = [point(1, 0.4, 3.0), point(0.5, 0.2), point(2, 0.9, 9.0, met=False)]
    tried += [point(3, None, 5.0, met=False)]
    twice = [point(1, 0.5, met=False), point(1, 0.2)]  # the lowest that failed is run again
    results = {
        "vllm": search(tried, Bounded(1)),
        "orca": search(twice, Bounded(2, "below"), busy=True),
    }
    bars, tbt, delay = plot_capacity(results, MACHINE, file, slo_s=0.3).axes
    assert [bar.get_width() for bar in bars.patches] == [1, 2]
    assert colors_of(bars.patches) == [POLICY_COLORS[name] for name in results]
    assert labels(bars) == ["vllm", "orca (busy)"]
    curves = [points(line) for line in tbt.lines[:4]]  # of each those that were met, and not
    assert curves == [[(0.5, 0.2), (1, 0.4)], [(2, 0.9)], [(1, 0.2)], []]
    assert tbt.lines[1].get_markerfacecolor() == "white"
    assert points(delay.lines[0]) == [(0.5, 0.1), (1, 3.0)]
    for axis, limit, text in (tbt, 0.3, "SLO 0.3 s"), (delay, 2, "limit 2 s"):
        assert axis.lines[-1].get_ydata() == [limit, limit]
        assert axis.get_title(loc="left").endswith(f"(dashed: {text})")


GAINS = {
    "chats, vllm": Beside(2.0, 2.1),
    "papers, orca:256": Beside(Bounded(3.5, "at least"), 1.0),
    "others": Beside(1.0, None),
    "not run": Beside(None, 2.5),
}


def test_published_numbers_are_hollow_markers_beside_bars(file):
    gain, *_ = plot_beside_published({"gain": GAINS}, "T4", file).axes
    assert gain.get_xlabel() == "gain" and labels(gain) == list(GAINS)
    assert [bar.get_width() for bar in gain.patches] == [2.0, 3.5, 1.0]
    assert colors_of(gain.patches) == [POLICY_COLORS["vllm"], POLICY_COLORS["orca"], style.OURS]
    assert [bool(bar.get_hatch()) for bar in gain.patches] == [False, True, False]
    assert [points(line) for line in gain.lines] == [[(2.1, 0)], [(1.0, 1)], [(2.5, 3)]]
    assert {line.get_markerfacecolor() for line in gain.lines} == {"white"}
    assert texts(gain) == ["2.00 ◇2.10", "≥ 3.50 ◇1.00", "1.00", "◇2.50"]


def test_many_numbers_are_a_line_with_gaps_and_the_papers_are_hollow(file):
    many = Table("many", x="tokens", y="share", spec=".0%")
    for x in range(1, 6):
        many.add(x, {"vllm": 0.1 * x, "the paper's": None if x == 2 else 0.2})
    marks = [[Mark("vllm", 5, Bounded(0.4, "below"))]]
    (axis,) = plot_panels([many], "S", file, marks=marks).axes
    line, papers, *_, mark = axis.lines
    assert points(line) == [(x, near(0.1 * x)) for x in range(1, 6)]
    assert np.isnan(papers.get_ydata()[1])
    assert points(mark) == [(5, 0.4)] and mark.get_marker() == "v"
