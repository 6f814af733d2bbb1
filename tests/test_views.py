"""Pictures of runs that were worked out by hand, and what is drawn in them."""

from colorsys import rgb_to_hls
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from lab.measure.capacity import Bounded
from policies import ALL_POLICIES
from policies.observers import Iteration
from request import Completion
from tests.test_metrics import a_completion, an_iteration, decode, prefill
from views import style
from views.bars import Beside, plot_beside_published
from views.style import DECODE, HYBRID, OTHER_COLORS, OVER, POLICY_COLORS, PREFILL
from views.timelines import (
    GapScale,
    draw_lanes,
    lane_bars,
    plot_capacity,
    plot_serving,
    plot_timelines,
)

MACHINE = {"model": "llama-tiny", "dtype": "float32", "device": "a CPU", "threads": 2}
LINE = "llama-tiny, float32, a CPU, 2 threads"
near = pytest.approx
no_warnings = pytest.mark.filterwarnings("error")


class History(NamedTuple):
    """A run that was worked out by hand."""

    completions: list[Completion]
    iterations: list[Iteration]


def a_run():
    """0 waits 4 s between two tokens while 1 is prefilled, as under vllm; 2 is never served."""
    iterations = [  # start, end, batch, waiting, running, free pages
        an_iteration(0.0, 1.0, [prefill(0, 4)], 0, 1, 8),
        an_iteration(1.0, 2.0, [decode(0)], 0, 1, 8),
        an_iteration(2.0, 6.0, [prefill(1, 4)], 1, 2, 4),
        an_iteration(6.0, 7.0, [decode(0), decode(1)], 1, 2, 4),
        an_iteration(7.0, 8.0, [decode(1)], 1, 1, 6),
    ]
    completions = [
        a_completion(0, 4, 0.0, "length", 0.0, [1.0, 2.0, 7.0]),
        a_completion(1, 4, 1.5, "length", 2.0, [6.0, 7.0, 8.0]),
        a_completion(2, 4, 2.5),
    ]
    return History(completions, iterations)


def axis_labelled(figure, label):
    """The one axis of a figure whose x or y label begins so."""
    labels = {a: (a.get_xlabel(), a.get_ylabel()) for a in figure.axes}
    (axis,) = [a for a, both in labels.items() if any(text.startswith(label) for text in both)]
    return axis


def points(line):
    return list(zip(*(data.tolist() for data in line.get_data()), strict=True))


def texts(axis_or_legend):
    return [text.get_text() for text in axis_or_legend.texts]


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


def spans_of(axis):
    """(start, end, lane, from 0) of each bar, in the order in which they are drawn."""
    corners = [path.vertices for path in axis.collections[0].get_paths()]
    return [(xy[0, 0], xy[1, 0], round(xy[0:3, 1].mean())) for xy in corners]


def lab_of(color):
    """A colour in CIELAB, where distances are about as large as they look."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = [[0.434, 0.376, 0.190], [0.213, 0.715, 0.072], [0.018, 0.109, 0.873]] @ linear
    x, y, z = (v ** (1 / 3) if v > 0.00886 else 7.787 * v + 4 / 29 for v in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_policy_has_a_colour_of_its_own_whoever_else_is_drawn():
    assert set(POLICY_COLORS) == set(ALL_POLICIES)
    colors = [*POLICY_COLORS.values(), *OTHER_COLORS]
    distances = [np.linalg.norm(lab_of(a) - lab_of(b)) for a, b in combinations(colors, 2)]
    assert min(distances) > 15  # 2.3 can just be told apart
    for color in colors:
        hue, _, saturation = rgb_to_hls(*to_rgb(color))
        assert saturation == 0 or 20 < hue * 360 < 330, color  # red is a stall
    together = style.policy_colors(["mine", "sarathi", "vllm", "yours"])
    assert style.policy_colors(["vllm"]) == {"vllm": together["vllm"]}
    assert together["vllm"] == POLICY_COLORS["vllm"] and len(set(together.values())) == 4
    assert list(together) == ["mine", "sarathi", "vllm", "yours"]
    assert len(style.policy_colors([f"run {i}" for i in range(20)])) == 20  # more than colours


def test_texts_are_short_and_plain(tmp_path):
    one = MACHINE | {"threads": 1}
    simulated = MACHINE | {"threads": None}
    lines = [LINE, LINE.replace("2 threads", "1 thread"), LINE[: -len(", 2 threads")]]
    for machine, line in zip((MACHINE, one, simulated), lines, strict=True):
        figure = style.finish(style.new_figure(1), "Title", tmp_path / "p.png", machine)
        assert figure.get_suptitle() == f"Title\n{line}"
    seen = [style.three_digits(value) for value in (None, 0, 0.5, 12.345, 123.4, 999.9, 12345)]
    assert seen == ["none", "0", "0.500", "12.3", "123", "1,000", "12,345"]


WAITING = [(1, 1.5, 2, "waiting")]  # 0 is let in at once
GAPS = [(0, 1, 2, "gap"), (0, 2, 7, "gap"), (1, 6, 7, "gap"), (1, 7, 8, "gap")]
CHUNKS = [(0, 0, 1, "prefill"), (1, 2, 6, "prefill")]


def test_bars_are_waiting_then_gaps_then_chunks_even_those_in_a_gap():
    assert lane_bars(*a_run()) == WAITING + GAPS + CHUNKS
    iterations = [an_iteration(0, 1, [prefill(0, 4)]), an_iteration(3, 5, [prefill(0, 5)])]
    bars = lane_bars([a_completion(0, 4, 0.0, "length", 0.0, [1.0, 5.0])], iterations)
    assert bars == [(0, 1, 5, "gap"), (0, 0, 1, "prefill"), (0, 3, 5, "prefill")]


# (start, end, lane) of all bars; 2 is never served and has no lane
ALL = [(1.5, 2, 1), (1, 2, 0), (2, 7, 0), (6, 7, 1), (7, 8, 1), (0, 1, 0), (2, 6, 1)]


def test_lanes_show_the_requests_that_do_more_than_wait():
    axis = Figure().subplots()
    axis.set_xlim(0, 8)
    draw_lanes(axis, lane_bars(*a_run()), GapScale(4.0, "the SLO"))
    assert spans_of(axis) == ALL and axis.get_xlim() == (0, 8)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "1"]
    long = [color for bar, color in zip(ALL, colors_of(axis), strict=True) if bar[:2] == (2, 7)]
    assert set(long) <= {OVER}  # its whole length counts, not what is seen of it
    assert axis.get_title(loc="right") == "longest time between tokens: 5.00 s"


def test_timelines_have_lanes_and_the_tokens_of_each_batch_to_scale(tmp_path):
    hybrid = an_iteration(2.0, 4.0, [decode(0), prefill(1, 3)])
    done = a_completion(0, 4, 0.0, "length", 0.0, [1.0, 2.0, 4.0])
    runs = {"vllm": a_run(), "orca": History([done], [*a_run().iterations[:2], hybrid])}
    figure = plot_timelines(runs, MACHINE, tmp_path / "t.png", anchor_s=4.0)
    lanes, tokens, other, below, _ = figure.axes
    assert [axis.get_title(loc="left") for axis in (lanes, other)] == ["vllm", "orca"]
    longest = [axis.get_title(loc="right").split()[-2:] for axis in (lanes, other)]
    assert longest == [["5.00", "s"], ["2.00", "s"]]
    assert is_png(tmp_path / "t.png") and figure.get_suptitle().endswith(LINE)
    gaps = [(1, 2, 0), (2, 7, 0), (6, 7, 1), (7, 8, 1)]
    assert spans_of(lanes) == [(1.5, 2, 1), *gaps, (0, 1, 0), (2, 6, 1)]  # chunks above gaps
    assert lanes.get_ylim() == (1.6, -0.6) and lanes.get_xlim()[0] == 0 < 8 < lanes.get_xlim()[1]
    assert other.get_xlim() == lanes.get_xlim() and tokens.get_yscale() == "linear"
    assert [bar.get_height() for bar in tokens.patches] == [4, 1, 4, 2, 1]
    assert (tokens.patches[2].get_x(), tokens.patches[2].get_width()) == (2, 4)
    seen = [[to_hex(bar.get_facecolor()) for bar in axis.patches] for axis in (tokens, below)]
    assert seen == [[PREFILL, DECODE, PREFILL, DECODE, DECODE], [PREFILL, DECODE, HYBRID]]


def colors_of(axis):
    """The colours of the bars in lanes, as they are drawn."""
    return [to_hex(color) for color in axis.collections[0].get_facecolors()]


def test_the_color_of_a_gap_depends_only_on_the_anchor(tmp_path):
    def offline(run, anchor_s):
        return plot_timelines({"vllm": run}, MACHINE, tmp_path / "t.png", anchor_s)

    run = a_run()  # gaps of 1, 5, 1 and 1 s, and prefills
    waits, short, long, *rest = met = colors_of(offline(run, 5.0).axes[0])
    assert OVER not in met and [waits, *rest] == [style.WAITING, short, short, PREFILL, PREFILL]
    assert colors_of(offline(run, 4.99).axes[0])[2] == OVER
    assert colors_of(offline(run, 50.0).axes[0])[1:3] == [DECODE, DECODE]  # up to a tenth
    two_tokens = a_completion(0, 4, 0.0, "length", 0.0, [1.0, 2.0])
    quick = History([two_tokens], [an_iteration(0, 1, [decode(0)])])
    assert colors_of(offline(quick, 5.0).axes[0]) == [short] and short != long
    nothing = offline(History([], []), 5.0)
    bar = axis_labelled(nothing, "time between tokens in s; red: more than 10 decode")
    assert bar.get_xticklabels()[-1].get_text() == "5.00" and bar.get_xlim()[1] == 5
    assert texts(bar.get_legend())[0] == "prefill"


def test_serving_draws_the_latencies_of_each_run(tmp_path):
    second = a_run()
    second.completions.pop()  # without the request that waits
    runs = {"vllm": a_run(), "orca": second}
    figure = plot_serving(runs, MACHINE, tmp_path / "s.png", slo_s=0.5)
    labels = "time to first", "time between tokens (", "scheduling"
    ttft, tbt, delay = (axis_labelled(figure, label) for label in labels)
    assert axis_labelled(figure, "time between tokens in s; red: more than the SLO")
    for axis, x, share, p99 in (
        (ttft, [1, 4.5, 4.5], [1, 0.5, 0], 4.465),
        (tbt, [1, 1, 1, 5, 5], [1, 0.75, 0.5, 0.25, 0], 4.88),
        (delay, [0, 0.5, 0.5], [1, 0.5, 0], 0.495),
    ):
        curve, dots = axis.lines[:2]
        assert curve.get_label() == "vllm" and curve.get_drawstyle() == "steps-pre"
        assert curve.get_color() == dots.get_color() == POLICY_COLORS["vllm"]
        assert points(curve) == [near(step) for step in zip(x, share, strict=True)]
        assert points(dots)[1] == near((p99, 0.01))
    assert tbt.lines[-1].get_xdata() == [0.5, 0.5] and tbt.get_xlim()[0] < 0.5  # the SLO, in view
    assert tbt.get_title() == "dashed: SLO 0.5 s" and figure.get_suptitle().endswith(LINE)
    lanes = [axis for axis in figure.axes if axis.get_ylabel() == "request"]
    assert [axis.get_xlim() for axis in lanes] == [
        (0, near(2 + 2 * 5))
    ] * 2  # the same time of both
    assert {"vllm", "orca"} < {axis.get_title(loc="left") for axis in figure.axes}
    assert is_png(tmp_path / "s.png")


def test_serving_shows_the_time_around_the_longest_gap_of_all(tmp_path):
    longest = [a_completion(0, 4, 0.0, "length", 0.5, [20.0, 21.0, 23.5, 24.0])]
    both = ([1.0, 1.5, 2.0, 100.0], (0, 198), [["0"], ["0"]])
    for first, window, ids in both, ([1.0, 2.0], (18.5, 26.0), [[], ["0"]]):
        long = [a_completion(0, 4, 0.0, "length", 0.5, first)]
        runs = {"vllm": History(long, []), "orca": History(longest, [])}
        figure = plot_serving(runs, MACHINE, tmp_path / "s.svg", 3.0)
        lanes = [axis for axis in figure.axes if axis.get_ylabel() == "request"]
        assert [axis.get_xlim() for axis in lanes] == [(near(window[0]), near(window[1]))] * 2
        assert [[label.get_text() for label in axis.get_yticklabels()] for axis in lanes] == ids


def test_serving_colours_gaps_by_their_length_and_puts_chunks_above_them(tmp_path):
    completions = [a_completion(3, 4, 0.0, "length", 0.5, [1.0, 2.0, 6.0])]
    completions += [a_completion(8, 4, 0.0, "length", 6.0, [7.0])]
    iterations = [an_iteration(0.5, 1, [prefill(3, 4)]), an_iteration(1, 2, [decode(3)])]
    iterations += [an_iteration(5, 6, [prefill(3, 6)]), an_iteration(6, 7, [prefill(8, 4)])]
    figure = plot_serving(
        {"vllm": History(completions, iterations)}, MACHINE, tmp_path / "s.svg", 3.0
    )
    lanes = next(axis for axis in figure.axes if axis.get_ylabel() == "request")
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["3", "8"]
    waits = [(0, 0.5, 0), (0, 6, 1)]
    gaps = [(1, 2, 0), (2, 6, 0)]
    assert spans_of(lanes) == [*waits, *gaps, (0.5, 1, 0), (5, 6, 0), (6, 7, 1)]
    colors = colors_of(lanes)
    assert colors == [*[style.WAITING] * 2, colors[2], OVER, *[PREFILL] * 3] and colors[2] != OVER


WAITS = a_completion(0, 4, 1.0)
ABORTED = a_completion(1, 4, 1.0, "abort")
CHUNK = an_iteration(1.0, 2.0, [prefill(0, 4)])
NEXT = an_iteration(2.0, 3.0, [decode(0)])
ONCE = [an_iteration(1.0, 1.0, [prefill(0, 4)]), an_iteration(1.0, 1.0, [decode(0)])]


def served(*token_times):
    """Request 0 with these times of tokens."""
    return [a_completion(0, 4, 1.0, "length", 1.0, list(token_times))]


LITTLE = [
    History([], []),
    History([WAITS], []),
    History([ABORTED, WAITS], []),
    History([], [CHUNK, NEXT]),
    History(served(2), [CHUNK]),
    History(served(2, 3), [CHUNK, NEXT]),
    History(served(1, 1), ONCE),
    History(served(1, 2, 2, 3), [*ONCE, NEXT]),
]


@pytest.mark.parametrize(
    "run", [*(pytest.param(run, marks=pytest.mark.slow) for run in LITTLE[:-1]), LITTLE[-1]]
)
@no_warnings
def test_serving_draws_runs_in_which_little_happened(run, tmp_path):
    little = {"vllm": run}
    figure = plot_serving(little, MACHINE, tmp_path / "1.png", slo_s=1.0)
    lanes = next(axis for axis in figure.axes if axis.get_ylabel() == "request")
    assert all(color[3] == 1 for bars in lanes.collections for color in bars.get_facecolors())
    plot_serving(little | {"orca": a_run()}, MACHINE, tmp_path / "2.png", slo_s=0.1)
    assert is_png(tmp_path / "1.png") and is_png(tmp_path / "2.png")


def point(qps, p99_tbt_s, p50_delay_s=0.1, met=True):
    """What a search notes of a run."""
    return dict(qps=qps, p99_tbt_s=p99_tbt_s, p50_delay_s=p50_delay_s, met=met)


def found(points, capacity_qps, busy=False):
    """What a search found."""
    return dict(points=points, capacity_qps=capacity_qps, busy=busy)


def test_capacity_draws_a_bar_and_its_number_and_a_point_for_each_rate(tmp_path):
    tried = [point(1, 0.4, 3.0), point(0.5, 0.2), point(2, 0.9, 9.0, met=False)]
    tried += [point(3, None, 5.0, met=False), point(4, 0.8, None, met=False)]
    twice = [point(1, 0.5, met=False), point(1, 0.2)]  # the lowest that failed is run again
    failed = [point(2, 0.6, met=False), point(2, 0.7, met=False)]
    results = {
        "vllm": found(tried, Bounded(1)),
        "orca": found(failed, Bounded(2, "below"), busy=True),
        "sarathi-serve": found(twice + failed, Bounded(1.234, "at least")),
    }
    figure = plot_capacity(results, MACHINE, tmp_path / "c.png", slo_s=0.3)
    bars, (tbt, delay) = axis_labelled(figure, "capacity"), figure.axes[-2:]
    assert [bar.get_width() for bar in bars.patches] == [1, 2, 1.234]
    assert texts(bars) == ["1.00", "below 2.00", "at least 1.23"]
    assert [bool(bar.get_hatch()) for bar in bars.patches] == [False, True, True]
    names = ["vllm", "orca (busy)", "sarathi-serve"]
    assert [label.get_text() for label in bars.get_yticklabels()] == names
    drawn = [[*points(line)] for line in tbt.lines[:6]]  # of each those that were met, and not
    assert drawn[:4] == [[(0.5, 0.2), (1, 0.4)], [(2, 0.9), (4, 0.8)], [], [(2, 0.7)]]
    assert drawn[4:] == [[(1, 0.2)], [(2, 0.7)]]  # one for each rate: its last run
    met, missed = tbt.lines[:2]
    assert met.get_markerfacecolor() == missed.get_color() == POLICY_COLORS["vllm"]
    assert (missed.get_markerfacecolor(), missed.get_linestyle()) == ("white", "None")
    assert points(delay.lines[0]) == [(0.5, 0.1), (1, 3.0)]
    assert tbt.lines[-1].get_ydata() == [0.3, 0.3] and delay.lines[-1].get_ydata() == [2, 2]
    titles = [axis.get_title(loc="left").partition(" (")[2] for axis in (tbt, delay)]
    assert titles == ["dashed: SLO 0.3 s)", "dashed: limit 2 s)"]  # where no line is
    assert is_png(tmp_path / "c.png") and figure.get_suptitle().endswith(LINE)


def test_published_numbers_are_hollow_markers_beside_bars(tmp_path):
    gains = {
        "chats, vllm": Beside(2.0, 2.1),
        "papers, orca:256": Beside(Bounded(3.5, "at least"), 1.0),
        "others": Beside(1.0, None),
        "not run": Beside(None, 2.5),
    }
    seconds = {
        name: Beside(number, None) for name, number in zip(gains, [0.1, 9, 1, 2], strict=True)
    }
    figure = plot_beside_published({"gain": gains, "s": seconds}, "T4", tmp_path / "b.png")
    gain, time = figure.axes
    assert [gain.get_title(), time.get_title()] == ["gain", "s"]
    assert [bar.get_width() for bar in gain.patches] == [2.0, 3.5, 1.0, 0]
    colors = [to_hex(bar.get_facecolor()) for bar in gain.patches]
    assert colors[:3] == [POLICY_COLORS["vllm"], POLICY_COLORS["orca"], style.OURS]
    assert [bool(bar.get_hatch()) for bar in gain.patches] == [False, True, False, False]
    markers = {line.get_ydata()[0]: line for line in gain.lines}  # by row
    assert {row: line.get_xdata()[0] for row, line in markers.items()} == {0: 2.1, 1: 1.0, 3: 2.5}
    assert {line.get_markerfacecolor() for line in markers.values()} == {"white"}
    assert texts(gain) == ["2.00", "at least 3.50", "1.00"]
    ends = [text.xy[0] for text in gain.texts]
    assert ends == [2.1, 3.5, 1.0]  # the first marker would cover its number
    assert [label.get_text() for label in gain.get_yticklabels()] == list(gains)
    assert (gain.get_xscale(), time.get_xscale()) == ("linear", "log")
    assert not time.lines and is_png(tmp_path / "b.png")


SEARCHES = [([], 1), ([point(1, None, None)], 2), ([point(1, 0.0, 0.0)], 1.5)]
RESULTS = [{"vllm": found(tried, Bounded(qps))} for tried, qps in SEARCHES]


@no_warnings
def test_searches_that_found_little_are_drawn(tmp_path):
    for results in RESULTS:
        plot_capacity(results, MACHINE, tmp_path / "a.png", 0.2)
    assert is_png(tmp_path / "a.png")
