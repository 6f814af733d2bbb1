"""Pictures, held against histories that were worked out by hand: bars, points, colours."""

from typing import NamedTuple

import pytest
from matplotlib.colors import to_hex

from lab.pictures.style import DECODE, HYBRID, OVER, PREFILL, WAITING
from lab.pictures.timelines import plot_serving, plot_timelines
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


def test_a_preempted_request_has_its_new_prefill_in_the_gap_that_it_makes(file):
    iterations = [an_iteration(0.5, 1, [prefill(0, 4)]), an_iteration(5, 6, [prefill(0, 6)])]
    run = History(served(1.0, 2.0, 6.0), iterations)
    (lanes,) = lanes_of(plot_serving({"": run}, MACHINE, file, 3.0, letters="A"))
    waits, short, *rest = bars_of(lanes)
    assert waits == (0, 0.5, 0, WAITING) and short[:3] == (1, 2, 0) and short[3] != OVER
    assert rest == [(2, 6, 0, OVER), (0.5, 1, 0, PREFILL), (5, 6, 0, PREFILL)]
    assert labels(lanes) == ["A"]
