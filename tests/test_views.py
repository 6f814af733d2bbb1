"""Pictures of runs that were worked out by hand, and what is drawn in them."""

from colorsys import rgb_to_hls
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from lab.measure.capacity import Bounded
from lab.pictures import style
from lab.pictures.bars import plot_bars
from lab.pictures.style import DECODE, HYBRID, OVER, POLICY_COLORS, PREFILL, WAITING
from lab.pictures.timelines import plot_capacity, plot_serving, plot_timelines
from policies import ALL_POLICIES
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


def test_every_policy_has_a_colour_of_its_own_whoever_else_is_drawn():
    colors = style.policy_colors([*ALL_POLICIES, "mine", "yours"])
    pairs = [map(to_rgb, pair) for pair in combinations(colors.values(), 2)]
    assert min(np.linalg.norm(np.subtract(a, b)) for a, b in pairs) > 0.1
    for color in colors.values():
        hue, _, saturation = rgb_to_hls(*to_rgb(color))
        assert saturation == 0 or 20 < hue * 360 < 330, color  # red is a stall
    assert style.policy_colors(["yours", "vllm"])["vllm"] == colors["vllm"] == POLICY_COLORS["vllm"]
    runs = [f"run {i}" for i in range(20)]  # more than colours
    runs += [f"{policy}, pages of {size}" for policy in ("vllm", "dynamic") for size in (16, 64)]
    assert len({*style.policy_colors(runs).values()}) == len(runs)


def test_settings_of_a_policy_are_shades_of_its_colour():
    names = ["sarathi:64", "sarathi:128", "orca", "run 1", "run 2"]
    colors = style.name_colors(names)
    assert len({*colors.values()}) == len(names) and colors["orca"] == POLICY_COLORS["orca"]
    assert style.name_colors(["sarathi:128"]) == {"sarathi:128": POLICY_COLORS["sarathi"]}


def test_numbers_have_three_digits():
    written = [style.three_digits(value) for value in (None, 0, 0.5, 12.345, 123.4, 999.9, 12345)]
    assert written == ["none", "0", "0.500", "12.3", "123", "1,000", "12,345"]
    assert (style.three_digits(7), style.short(Bounded(3.5, "below"), ".1fx")) == ("7", "< 3.5x")


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


def test_the_color_of_a_gap_depends_only_on_the_anchor(file):
    def colors(anchor_s):
        axis = plot_timelines({"vllm": a_run()}, MACHINE, file, anchor_s).axes[0]
        return [color for *_, color in bars_of(axis)]

    short, long, chunk, waits, *rest = colors(5.0)  # gaps of 1, 5, 1 and 1 s
    assert [chunk, waits, *rest] == [PREFILL, WAITING, short, short, PREFILL]
    assert OVER not in (short, long) and short != long
    assert colors(4.99)[1] == OVER and colors(50.0)[:2] == [DECODE, DECODE]  # up to a tenth
    *_, bar = plot_timelines({"vllm": History([], [])}, MACHINE, file, 5.0).axes
    assert bar.get_xlabel() == "time between tokens in s; red: more than 10 decode iterations"
    assert bar.get_xticklabels()[-1].get_text() == "5.00" and bar.get_xlim()[1] == 5


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


@pytest.mark.parametrize(
    "first, window, ids",
    [
        ([1.0, 1.5, 2.0, 100.0], (0, 198), [["0"], ["0"]]),
        ([1.0, 2.0], (18.5, 26.0), [[], ["0"]]),
    ],
)
def test_serving_shows_the_time_around_the_longest_gap_of_all(first, window, ids, file):
    other = served(20.0, 21.0, 23.5, 24.0)
    runs = {"vllm": History(served(*first), []), "orca": History(other, [])}
    lanes = lanes_of(plot_serving(runs, MACHINE, file, 3.0))
    assert [axis.get_xlim() for axis in lanes] == [near(window)] * 2
    assert [labels(axis) for axis in lanes] == ids


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


CHUNK = an_iteration(1.0, 2.0, [prefill(0, 4)])
ONCE = [an_iteration(1.0, 1.0, [prefill(0, 4)]), an_iteration(1.0, 1.0, [decode(0)])]
LITTLE = {
    "nothing": History([], []),
    "waits": History([a_completion(1, 4, 1.0, "abort"), a_completion(0, 4, 1.0)], []),
    "one token": History(served(2.0), [CHUNK]),
    "no time passes": History(served(1.0, 2.0, 2.0, 3.0), ONCE),
}


@pytest.mark.parametrize("name", LITTLE)
@pytest.mark.filterwarnings("error")
def test_serving_draws_runs_in_which_little_happened(name, file):
    figure = plot_serving({"vllm": LITTLE[name], "orca": a_run()}, MACHINE, file, slo_s=0.1)
    for lanes in lanes_of(figure):
        assert all(color[3] == 1 for bars in lanes.collections for color in bars.get_facecolors())
    plot_serving({"vllm": LITTLE[name]}, MACHINE, file, slo_s=1.0)


@pytest.mark.parametrize("tried", [[], [point(1, None, None)], [point(1, 0.0, 0.0)]])
@pytest.mark.filterwarnings("error")
def test_searches_that_found_little_are_drawn(tried, file):
    plot_capacity({"vllm": search(tried, Bounded(1))}, MACHINE, file, 0.2)


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


def test_bars_have_the_colours_of_policies_and_bounds_are_hatched(file):
    gains = {"chats, vllm": 2.0, "orca:256": Bounded(3.5, "at least"), "others": 1.0}
    (axis,) = plot_bars({"gain": gains}, "T4", file).axes
    assert axis.get_xlabel() == "gain" and labels(axis) == list(gains)
    assert [bar.get_width() for bar in axis.patches] == [2.0, 3.5, 1.0]
    assert colors_of(axis.patches) == [POLICY_COLORS["vllm"], POLICY_COLORS["orca"], style.OURS]
    assert [bool(bar.get_hatch()) for bar in axis.patches] == [False, True, False]


def test_bars_that_differ_much_are_dots_on_a_log_axis(file):
    (axis,) = plot_bars({"s": {"short": 0.1, "long": 9}}, "T4", file).axes
    assert axis.get_xscale() == "log" and not axis.patches
    assert [points(line) for line in axis.lines] == [[(0.1, 0)], [(9, 1)]]


def test_each_panel_of_bars_has_its_names_and_numbers(file):
    first, _ = plot_bars({"a": {"x": 3, "y": 1.5}, "b": {"x": 9, "y": 9}}, "", file).axes
    assert texts(first) == ["3", "1.50"] and labels(first) == ["x", "y"]
