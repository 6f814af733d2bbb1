"""What pictures are made of, by hand: what was drawn is asked of the figure that was saved."""

import pytest
from matplotlib.colors import to_hex

from policies import POLICIES
from tests.test_metrics import a_completion, an_iteration, decode, prefill
from views import style
from views.search import plot_budget, plot_capacity
from views.serving import cumulative, find_windows, over_time, plot_serving
from views.style import DECODE, OTHER_COLORS, POLICY_COLORS, PREFILL
from views.timelines import lane_bars, plot_timelines, run_origin

MACHINE = {"model": "llama-tiny", "dtype": "float32", "device": "a CPU", "threads": 2}
LINE = "llama-tiny, float32, a CPU, 2 threads"
near = pytest.approx
no_warnings = pytest.mark.filterwarnings("error")


def a_run(origin=100.0):
    """0 waits 4 s between two tokens while 1 is prefilled, as under vllm; 2 is never served."""
    at = [origin + time for time in (0.0, 1.0, 2.0, 6.0, 7.0, 8.0)]
    batches = [[prefill(0, 4)], [decode(0)], [prefill(1, 4)], [decode(0), decode(1)], [decode(1)]]
    counts = (0, 1, 8), (0, 1, 8), (1, 2, 4), (1, 2, 4), (1, 1, 6)  # waiting, running, free pages
    iterations = [an_iteration(*its[:3], *its[3]) for its in zip(at, at[1:], batches, counts)]
    completions = [
        a_completion(0, 4, at[0], "length", at[0], [at[1], at[2], at[4]]),
        a_completion(1, 4, origin + 1.5, "length", at[2], at[3:]),
        a_completion(2, 4, origin + 2.5),
    ]
    return completions, iterations


def axis_labelled(figure, label):
    """The one axis of a figure whose x or y label begins so."""
    labels = {a: (a.get_xlabel(), a.get_ylabel()) for a in figure.axes}
    (axis,) = [a for a, both in labels.items() if any(text.startswith(label) for text in both)]
    return axis


def points(line):
    return list(zip(*(data.tolist() for data in line.get_data())))


def texts(axis_or_legend):
    return [text.get_text() for text in axis_or_legend.texts]


def is_png(file):
    return file.read_bytes().startswith(b"\x89PNG")


def spans_of(axis):
    """(start, end, number of the lane) of each bar, in the order in which they are drawn."""
    corners = [path.vertices for path in axis.collections[0].get_paths()]
    return [(xy[0, 0], xy[1, 0], round(xy[0:3, 1].mean())) for xy in corners]


def test_every_policy_has_a_colour_of_its_own_whoever_else_is_drawn():
    assert set(POLICIES) <= set(POLICY_COLORS)
    colors = [*POLICY_COLORS.values(), *OTHER_COLORS]
    assert len(set(colors)) == len(colors)
    together = style.policy_colors(["mine", "sarathi", "vllm", "yours"])
    assert style.policy_colors(["vllm"]) == {"vllm": together["vllm"]}
    assert together["vllm"] == POLICY_COLORS["vllm"] and len(set(together.values())) == 4
    assert list(together) == ["mine", "sarathi", "vllm", "yours"]
    assert len(style.policy_colors([f"run {i}" for i in range(20)])) == 20  # more than colours


def test_texts_are_short_and_plain():
    one, simulated = MACHINE | {"threads": 1}, MACHINE | {"threads": None}
    lines = [style.machine_line(machine) for machine in (MACHINE, one, simulated)]
    assert lines == [LINE, LINE.replace("2 threads", "1 thread"), LINE[: -len(", 2 threads")]]
    seen = [style.three_digits(value) for value in (None, 0, 0.5, 12.345, 123.4, 999.9, 12345)]
    assert seen == ["none", "0", "0.500", "12.3", "123", "1,000", "12,345"]


def test_a_run_begins_with_its_first_arrival_or_iteration():
    completions, iterations = a_run()
    assert run_origin(completions[1:], iterations[2:]) == 101.5
    assert (run_origin([], iterations[2:]), run_origin([], [])) == (102, 0)


WHOLE = [(0, 0, 1, "prefill", 1), (0, 1, 2, "gap", 1), (0, 2, 7, "gap", 5)]
WHOLE += [(1, 1.5, 2, "waiting", 0.5), (1, 2, 6, "prefill", 4), (1, 6, 7, "gap", 1)]
CUT = [(0, 1.75, 2, "gap", 1), (0, 2, 4, "gap", 5)]  # the last number is the whole length
CUT += [(1, 1.75, 2, "waiting", 0.5), (1, 2, 4, "prefill", 4)]
WINDOWS = [((0, 8), [*WHOLE, (1, 7, 8, "gap", 1)]), ((1.75, 4), CUT)]
WINDOWS += [((3, 4), [(0, 3, 4, "gap", 5), (1, 3, 4, "prefill", 4)])]
WINDOWS += [((1, 1.75), [(0, 1, 1.75, "gap", 1)])]  # 1 does nothing but wait
WINDOWS += [((7, 8), [(1, 7, 8, "gap", 1)])]  # what touches the window is not in it


@pytest.mark.parametrize("window, bars", WINDOWS)
def test_lanes_show_waiting_chunks_and_gaps_in_a_window(window, bars):
    assert sorted(lane_bars(*a_run(), *window)) == bars


def test_without_completions_nobody_waits_and_a_second_prefill_is_a_chunk_in_a_gap():
    bars = [bar for bar in lane_bars(*a_run()) if bar[3] != "waiting"]
    assert sorted(lane_bars((), a_run(7.0)[1])) == sorted(bars)
    iterations = [an_iteration(0, 1, [prefill(0, 4)]), an_iteration(3, 5, [prefill(0, 5)])]
    bars = lane_bars([a_completion(0, 4, 0.0, "length", 0.0, [1.0, 5.0])], iterations)
    assert sorted(bars) == [(0, 0, 1, "prefill", 1), (0, 1, 5, "gap", 4), (0, 3, 5, "prefill", 2)]


def test_timelines_have_lanes_from_1_and_the_tokens_of_each_iteration(tmp_path):
    timelines = {"vllm": a_run()[1], "orca": a_run()[1][:2]}
    figure = plot_timelines(timelines, MACHINE, tmp_path / "t.png")
    lanes, tokens, other, _, bar = figure.axes
    assert [axis.get_title(loc="left") for axis in (lanes, other)] == ["vllm", "orca"]
    assert is_png(tmp_path / "t.png") and figure.get_suptitle().endswith(LINE)
    assert spans_of(lanes) == [(1, 2, 1), (2, 7, 1), (6, 7, 2), (7, 8, 2), (0, 1, 1), (2, 6, 2)]
    assert lanes.get_ylim() == (2.6, 0.4) and lanes.get_xlim()[0] == 0 < 8 < lanes.get_xlim()[1]
    assert other.get_xlim() == lanes.get_xlim() and "colours span" in bar.get_ylabel()
    heights = {PREFILL: [4, 0, 4, 0, 0], DECODE: [0, 1, 0, 2, 1]}
    for color, bars in zip(heights, (tokens.patches[:5], tokens.patches[5:])):
        assert [bar.get_height() for bar in bars] == heights[color]
        assert {to_hex(bar.get_facecolor()) for bar in bars} == {color}
        assert (bars[2].get_x(), bars[2].get_width()) == (2, 4)


def test_a_cumulative_curve_steps_up_at_each_value():
    x, share = cumulative([3.0, None, 1.0, 3.0, 2.0])
    assert x.tolist() == [1, 1, 2, 3, 3] and share.tolist() == [0, 0.25, 0.5, 0.75, 1]
    few = [[array.tolist() for array in cumulative(values)] for values in ([5.0], [], [None])]
    assert few == [[[5, 5], [0, 1]], [[], []], [[], []]]


def test_windows_are_equally_long_around_the_longest_gap_but_do_not_leave_the_run():
    def run(end, *times):
        completion = a_completion(0, 4, 0.0, "length", 0.0, times)
        return [completion], [an_iteration(0.0, end, [prefill(0, 4)])]

    runs = {"slow": run(100.0, 50.0, 54.0), "quick": run(100.0, 20.0, 21.0)}
    assert find_windows(runs) == {"slow": (46, 58), "quick": (14.5, 26.5)}
    runs = {"a": run(100.0, 95.0, 99.0), "b": run(100.0, 1.0, 2.0), "short": run(5.0, 1.0, 2.0)}
    assert find_windows(runs) == {"a": (88, 100), "b": (0, 12), "short": (0, 5)}
    assert find_windows({"a": a_run()}, gaps=1.0) == {"a": (2, 7)}  # between tokens of one request
    runs = {"one token": run(1.0, 1.0), "nothing": ([], [])}  # without a gap it is the run
    assert find_windows(runs) == {"one token": (0, 1), "nothing": (0, 1)}


def test_counts_over_time_are_means_weighted_by_time_and_hold_until_the_next_batch():
    edges, *counts = over_time(*a_run(), columns=4)
    assert edges.tolist() == near([0, 2, 4, 6, 8])
    for seen, count in zip(counts, ([1, 2, 2, 1.5], [0, 1, 1, 1], [8, 4, 4, 5])):
        assert seen.tolist() == near(count)  # running, waiting, free pages
    assert over_time(*a_run(), columns=1)[3].tolist() == near([(2 * 8 + 5 * 4 + 6) / 8])
    batches = (0.0, 1.0, [prefill(0, 4)], 0, 1), (3.0, 4.0, [prefill(1, 4)], 0, 5)
    held = over_time([], [an_iteration(*batch) for batch in batches], columns=4)
    assert held[1].tolist() == near([1, 1, 1, 5])
    for iterations in ([], [an_iteration(2.0, 2.0, [prefill(0, 4)])]):  # no time at all
        edges, *counts = over_time([], iterations, columns=3)
        assert len(edges) == 4 and [c.tolist() for c in counts] == [[0, 0, 0]] * 3


def test_serving_draws_the_latencies_of_each_run(tmp_path):
    second = a_run(origin=7.0)
    second[0].pop()  # without the request that waits
    runs = {"vllm": a_run(), "orca": second}
    figure = plot_serving(runs, MACHINE, tmp_path / "s.png", slo_s=0.5)
    ttft, tbt, delay = (axis_labelled(figure, s) for s in ("time to f", "time b", "scheduling"))
    for axis, x, share, p99 in (
        (ttft, [1, 1, 4.5], [0, 0.5, 1], (4.465, 0.99)),
        (tbt, [1, 1, 1, 1, 5], [1, 0.75, 0.5, 0.25, 0], (4.88, 0.01)),
        (delay, [0, 0, 0.5], [0, 0.5, 1], (0.495, 0.99)),
    ):
        curve, dots = axis.lines[:2]
        assert curve.get_label() == "vllm" and curve.get_drawstyle() == "steps-post"
        assert curve.get_color() == dots.get_color() == POLICY_COLORS["vllm"]
        assert points(curve) == [near(step) for step in zip(x, share)]
        assert points(dots)[1] == near(p99)
    assert tbt.lines[-1].get_xdata() == [0.5, 0.5] and tbt.get_xlim()[0] < 0.5  # the SLO, in view
    assert texts(tbt) == ["SLO 0.5 s"] and figure.get_suptitle().endswith(LINE)
    assert set(runs) < {axis.get_title(loc="left") for axis in figure.axes}
    assert is_png(tmp_path / "s.png")


def test_serving_colours_gaps_by_their_length_and_puts_chunks_above_them(tmp_path):
    completions = [a_completion(3, 4, 0.0, "length", 0.5, [1.0, 2.0, 6.0])]
    completions += [a_completion(8, 4, 0.0, "length", 6.0, [7.0])]
    iterations = [an_iteration(0.5, 1, [prefill(3, 4)]), an_iteration(1, 2, [decode(3)])]
    iterations += [an_iteration(5, 6, [prefill(3, 6)]), an_iteration(6, 7, [prefill(8, 4)])]
    figure = plot_serving({"vllm": (completions, iterations)}, MACHINE, tmp_path / "s.svg")
    lanes = next(axis for axis in figure.axes if axis.get_ylabel() == "request")
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["3", "8"]
    waits, gaps = [(0, 0.5, 1), (0, 6, 2)], [(1, 2, 1), (2, 6, 1)]
    assert spans_of(lanes) == [*waits, *gaps, (0.5, 1, 1), (5, 6, 1), (6, 7, 2)]
    colors = [tuple(color) for color in lanes.collections[0].get_facecolors()]
    assert colors[0] == colors[1] and colors[4] == colors[5] == colors[6]  # waiting, prefill
    assert len(set(colors)) == 4 and colors[3][0] > colors[3][1]  # the long gap is red


WAITS, ABORTED = a_completion(0, 4, 1.0), a_completion(1, 4, 1.0, "abort")
CHUNK, NEXT = an_iteration(1.0, 2.0, [prefill(0, 4)]), an_iteration(2.0, 3.0, [decode(0)])
ONCE = [an_iteration(1.0, 1.0, [prefill(0, 4)]), an_iteration(1.0, 1.0, [decode(0)])]
TIMES = ([2], [CHUNK]), ([2, 3], [CHUNK, NEXT]), ([1, 1], ONCE), ([1, 2, 2, 3], [*ONCE, NEXT])
LITTLE = [([], []), ([WAITS], []), ([ABORTED, WAITS], []), ([], [CHUNK, NEXT])]
LITTLE += [([a_completion(0, 4, 1.0, "length", 1.0, times)], its) for times, its in TIMES]


@pytest.mark.parametrize("run", LITTLE)
@no_warnings
def test_serving_draws_runs_in_which_little_happened(run, tmp_path):
    little = {"vllm": run}
    figure = plot_serving(little, MACHINE, tmp_path / "1.png")
    assert axis_labelled(figure, "TBT").get_ylim()[0] > 0  # of colours, for gaps of no time, too
    plot_serving(little | {"orca": a_run()}, MACHINE, tmp_path / "2.png", slo_s=0.1)
    assert is_png(tmp_path / "1.png") and is_png(tmp_path / "2.png")


CUT_SHORT = "17 TBTs over 0.3 s"


def point(qps, p99_tbt_s, p50_delay_s=0.1, cut_short=None):
    """What a search notes of a rate."""
    return dict(qps=qps, p99_tbt_s=p99_tbt_s, p50_delay_s=p50_delay_s, cut_short=cut_short)


def test_capacity_draws_a_bar_and_its_number_and_the_points_by_rate_for_each_policy(tmp_path):
    tried = [point(1, 0.4, 3.0), point(0.5, 0.2), point(2, 0.9, 9.0, CUT_SHORT)]
    tried += [point(3, None, 5.0), point(4, 0.8, None, CUT_SHORT), {"qps": 5, "cut_short": True}]
    twice = [point(1, 0.1, 0.1, CUT_SHORT), point(1, 0.2)]  # the lowest that failed is run again
    found = {"vllm": (0.5, tried), "orca": (None, twice), "sarathi-serve": (1.234, [])}
    results = {name: dict(capacity_qps=qps, points=its) for name, (qps, its) in found.items()}
    figure = plot_capacity(results, MACHINE, tmp_path / "c.png", slo_s=0.3)
    bars, tbt, delay = (axis_labelled(figure, label) for label in ("capacity", "P99", "median"))
    assert [bar.get_width() for bar in bars.patches] == [0.5, 0, 1.234]
    assert texts(bars) == ["0.500", "none", "1.23"]
    curve, hollow, both, failed = tbt.lines[:4]
    assert points(curve) == [(0.5, 0.2), (1, 0.4), (2, 0.9), (4, 0.8)]
    assert points(hollow) == [(2, 0.9), (4, 0.8)]  # what is None is left out
    assert points(both) == [(1, 0.1), (1, 0.2)] and points(failed) == [(1, 0.1)]
    assert curve.get_markerfacecolor() == hollow.get_color() == POLICY_COLORS["vllm"]
    assert hollow.get_markerfacecolor() == "white"
    assert points(delay.lines[0]) == [(0.5, 0.1), (1, 3.0), (2, 9.0), (3, 5.0)]
    assert tbt.lines[-1].get_ydata() == [0.3, 0.3] and delay.lines[-1].get_ydata() == [2, 2]
    assert texts(tbt.get_legend()) == list(results)
    assert is_png(tmp_path / "c.png") and figure.get_suptitle().endswith(LINE)


def test_budget_draws_a_line_for_each_context_and_marks_the_choice(tmp_path):
    rows = [(b, c, 8, b / 1000 + c / 10000) for c in (1024, 512) for b in (8, 256, 128, 64)]
    rows += [(512, 512, 8, None), (64, 512, 4, 0.1)]
    figure = plot_budget(rows, MACHINE, tmp_path / "b.png", slo_s=0.25, chosen=128)
    axis = axis_labelled(figure, "token budget")
    first, alone = axis.lines[2:4]
    labels = [line.get_label() for line in axis.lines[:6:2]]
    pairs = ("4 decodes, context 512", "8 decodes, context 512", "8 decodes, context 1,024")
    assert labels == [*pairs] and first.get_color() == axis.lines[4].get_color()
    assert points(first) == [(64, near(0.1152)), (128, near(0.1792)), (256, near(0.3072))]
    assert points(alone) == [(32, near(0.0592))]  # only decodes: left of the least budget
    assert [t.get_text() for t in axis.get_xticklabels()] == ["decode\nonly", "64", "128", "256"]
    slo, chosen = axis.lines[-2:]
    assert slo.get_ydata() == [0.25, 0.25] and chosen.get_xdata() == [128, 128]
    assert texts(axis) == ["SLO 0.25 s ", "chosen: 128 tokens"]
    assert is_png(tmp_path / "b.png") and figure.get_suptitle().endswith(LINE)


SEARCHES = ((None,), (0.0, point(1, None, None)), (2, point(2, 0.1)), (1.5, point(1, 0.0, 0.0)))
PROFILES = ([], [(64, 512, 8, None)], [(64, 512, 8, 0.1)], [(0, 512, 8, 0.1)])
CAPACITIES = [{"vllm": {"capacity_qps": qps, "points": tried}} for qps, *tried in SEARCHES]
FOUND = [(plot_capacity, c) for c in CAPACITIES] + [(plot_budget, p) for p in PROFILES]


@pytest.mark.parametrize("plot, found", FOUND)
@no_warnings
def test_searches_that_found_little_are_drawn(plot, found, tmp_path):
    plot(found, MACHINE, tmp_path / "a.png")
    plot(found, MACHINE, tmp_path / "b.pdf", 0.2, 64)
    assert is_png(tmp_path / "a.png") and (tmp_path / "b.pdf").stat().st_size
