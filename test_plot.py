"""What the plots are made of: numbers worked out by hand, and inputs with nothing in them. No picture is looked at."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from engine import Completion, Iteration
from experiments import SPECS
from plot import OTHER_COLORS, POLICY_COLORS, machine_line, policy_colors
from plot_search import budget_lines, curve_points, plot_budget, plot_capacity
from plot_serving import cumulative, find_windows, lane_bars, longest_gap, over_time, plot_serving, run_origin

MACHINE = {"model": "llama-tiny", "dtype": "float32", "device": "a CPU", "threads": 2}


def prefill(request_id, length=4):
    return (request_id, length, False)


def decode(request_id):
    return (request_id, 1, True)


def completion(request_id, arrival, scheduled=None, times=(), reason="length"):
    return Completion(request_id, [7] * 4, arrival, finish_reason=reason, scheduled=scheduled, token_times=list(times))


def iteration(start, end, chunks, waiting=0, running=1, free_pages=9):
    return Iteration(start, end, chunks, start, waiting, running, free_pages)


def a_run(origin=100.0):
    """Request 0 waits 4 s between two tokens while 1 is prefilled, as under vllm; 2 waits and is never served."""
    at = [origin + time for time in (0.0, 1.0, 2.0, 6.0, 7.0, 8.0)]
    iterations = [
        iteration(at[0], at[1], [prefill(0)], waiting=0, running=1, free_pages=8),
        iteration(at[1], at[2], [decode(0)], waiting=0, running=1, free_pages=8),
        iteration(at[2], at[3], [prefill(1)], waiting=1, running=2, free_pages=4),
        iteration(at[3], at[4], [decode(0), decode(1)], waiting=1, running=2, free_pages=4),
        iteration(at[4], at[5], [decode(1)], waiting=1, running=1, free_pages=6),
    ]
    completions = [
        completion(0, at[0], at[0], [at[1], at[2], at[4]]),
        completion(1, origin + 1.5, at[2], at[3:]),
        completion(2, origin + 2.5, reason=None),
    ]
    return completions, iterations


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, kept open as they are at that moment: what was drawn can be asked of them."""
    figures, save = [], Figure.savefig

    def savefig(figure, file, **options):
        figures.append(figure)
        save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    yield figures
    plt.close("all")


def axis_labelled(figure, label):
    """The one axis of a figure whose x or y label begins so."""
    (axis,) = [a for a in figure.axes if a.get_xlabel().startswith(label) or a.get_ylabel().startswith(label)]
    return axis


def points(line):
    return list(zip(*(data.tolist() for data in line.get_data())))


# -----------------------------------------------------------------------------------------------------
# what all plots share


def test_every_policy_has_a_colour_of_its_own():
    assert set(SPECS) <= set(POLICY_COLORS)
    colors = [*POLICY_COLORS.values(), *OTHER_COLORS]
    assert len(set(colors)) == len(colors)


def test_a_policy_keeps_its_colour_whoever_else_is_drawn():
    alone, together = policy_colors(["vllm"]), policy_colors(["mine", "sarathi", "vllm", "yours"])
    assert alone["vllm"] == together["vllm"] == POLICY_COLORS["vllm"]
    assert list(together) == ["mine", "sarathi", "vllm", "yours"] and len(set(together.values())) == 4
    assert len(policy_colors([f"run {i}" for i in range(20)])) == 20  # more than there are colours


def test_the_machine_line_counts_its_threads():
    assert machine_line(MACHINE) == "llama-tiny, float32, a CPU, 2 threads"
    assert machine_line(MACHINE | {"threads": 1}).endswith(", 1 thread")


# -----------------------------------------------------------------------------------------------------
# serve: the numbers


def test_a_cumulative_curve_steps_up_at_each_value():
    x, share = cumulative([3.0, None, 1.0, 3.0, 2.0])
    assert x.tolist() == [1, 1, 2, 3, 3] and share.tolist() == [0, 0.25, 0.5, 0.75, 1]
    x, share = cumulative([5.0])
    assert x.tolist() == [5, 5] and share.tolist() == [0, 1]


@pytest.mark.parametrize("values", [[], [None, None]])
def test_a_cumulative_curve_of_nothing_is_empty(values):
    x, share = cumulative(values)
    assert x.tolist() == share.tolist() == []


def test_a_run_begins_with_its_first_arrival_or_iteration():
    completions, iterations = a_run()
    assert run_origin(completions, iterations) == 100
    assert run_origin(completions[1:], iterations[2:]) == 101.5
    assert run_origin([], iterations[2:]) == 102
    assert run_origin([], []) == 0


def test_the_longest_gap_is_between_two_tokens_of_one_request():
    assert longest_gap(a_run()[0]) == (102, 107)
    assert longest_gap([completion(0, 0.0, 0.0, [1.0]), completion(1, 0.0, 5.0, [9.0]), completion(2, 0.0)]) is None
    assert longest_gap([]) is None


def two_token_run(end, first, second):
    """A run of `end` seconds with one gap."""
    return [completion(0, 0.0, 0.0, [first, second])], [iteration(0.0, end, [prefill(0)])]


def test_windows_are_equally_long_and_each_has_its_own_longest_gap_in_the_middle():
    runs = {"slow": two_token_run(100.0, 50.0, 54.0), "quick": two_token_run(100.0, 20.0, 21.0)}
    assert find_windows(runs) == {"slow": (46, 58), "quick": (14.5, 26.5)}


def test_windows_do_not_leave_the_run():
    runs = {"a": two_token_run(100.0, 95.0, 99.0), "b": two_token_run(100.0, 1.0, 2.0)}
    assert find_windows(runs) == {"a": (88, 100), "b": (0, 12)}
    assert find_windows(runs | {"short": two_token_run(5.0, 1.0, 2.0)})["short"] == (0, 5)


def test_without_a_gap_the_window_is_the_run():
    single = [completion(0, 10.0, 10.0, [11.0])], [iteration(10.0, 11.0, [prefill(0)])]
    assert find_windows({"single": single}) == {"single": (0, 1)}
    assert find_windows({"nothing": ([], [])}) == {"nothing": (0, 1)}


def test_lanes_show_waiting_chunks_and_gaps():
    assert sorted(lane_bars(*a_run(), 0.0, 8.0)) == [
        (0, 0.0, 1.0, "prefill", 1.0),
        (0, 1.0, 2.0, "gap", 1.0),
        (0, 2.0, 7.0, "gap", 5.0),
        (1, 1.5, 2.0, "waiting", 0.5),
        (1, 2.0, 6.0, "prefill", 4.0),
        (1, 6.0, 7.0, "gap", 1.0),
        (1, 7.0, 8.0, "gap", 1.0),
    ]


def test_lanes_are_cut_to_the_window_but_keep_their_length():
    assert sorted(lane_bars(*a_run(), 1.75, 4.0)) == [
        (0, 1.75, 2.0, "gap", 1.0),
        (0, 2.0, 4.0, "gap", 5.0),
        (1, 1.75, 2.0, "waiting", 0.5),
        (1, 2.0, 4.0, "prefill", 4.0),
    ]
    assert lane_bars(*a_run(), 3.0, 4.0) == [(0, 3.0, 4.0, "gap", 5.0), (1, 3.0, 4.0, "prefill", 4.0)]
    assert lane_bars(*a_run(), 1.0, 1.75) == [(0, 1.0, 1.75, "gap", 1.0)]  # 1 does nothing but wait
    assert sorted(lane_bars(*a_run(), 7.0, 8.0)) == [(1, 7.0, 8.0, "gap", 1.0)]  # what touches it is not in it


def test_the_second_prefill_of_a_preempted_request_is_a_chunk_in_a_gap():
    completions = [completion(0, 0.0, 0.0, [1.0, 5.0])]
    iterations = [iteration(0.0, 1.0, [prefill(0)]), iteration(3.0, 5.0, [prefill(0, 5)])]
    assert sorted(lane_bars(completions, iterations, 0.0, 5.0)) == [
        (0, 0.0, 1.0, "prefill", 1.0),
        (0, 1.0, 5.0, "gap", 4.0),
        (0, 3.0, 5.0, "prefill", 2.0),
    ]


def test_counts_over_time_are_means_weighted_by_time():
    edges, running, waiting, free = over_time(*a_run(), columns=4)
    assert edges.tolist() == pytest.approx([0, 2, 4, 6, 8])
    assert running.tolist() == pytest.approx([1, 2, 2, 1.5])
    assert waiting.tolist() == pytest.approx([0, 1, 1, 1])
    assert free.tolist() == pytest.approx([8, 4, 4, 5])
    assert over_time(*a_run(), columns=1)[3].tolist() == pytest.approx([(2 * 8 + 5 * 4 + 6) / 8])


def test_a_count_holds_until_the_next_batch():
    iterations = [iteration(0.0, 1.0, [prefill(0)], running=1), iteration(3.0, 4.0, [prefill(1)], running=5)]
    assert over_time([], iterations, columns=4)[1].tolist() == pytest.approx([1, 1, 1, 5])


@pytest.mark.parametrize("iterations", [[], [iteration(2.0, 2.0, [prefill(0)])]])
def test_counts_over_no_time_are_zero(iterations):
    edges, *counts = over_time([], iterations, columns=3)
    assert len(edges) == 4 and [c.tolist() for c in counts] == [[0, 0, 0]] * 3


# -----------------------------------------------------------------------------------------------------
# serve: the picture


def test_serving_draws_the_latencies_of_each_run(tmp_path, drawn):
    second = a_run(origin=7.0)
    second[0].pop()  # without the request that waits
    plot_serving({"vllm": a_run(), "sarathi-serve": second}, MACHINE, tmp_path / "s.png", slo_s=0.5)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    ttft, tbt, delay = (axis_labelled(figure, label) for label in ("time to first", "time between", "scheduling"))
    for axis, x, share, p99 in (
        (ttft, [1, 1, 4.5], [0, 0.5, 1], (4.465, 0.99)),
        (tbt, [1, 1, 1, 1, 5], [1, 0.75, 0.5, 0.25, 0], (4.88, 0.01)),
        (delay, [0, 0, 0.5], [0, 0.5, 1], (0.495, 0.99)),
    ):
        curve, dots = axis.lines[:2]
        assert curve.get_label() == "vllm" and curve.get_color() == dots.get_color() == POLICY_COLORS["vllm"]
        assert points(curve) == [pytest.approx(step) for step in zip(x, share)]
        assert points(dots)[1] == pytest.approx(p99)
        assert curve.get_drawstyle() == "steps-post"
    assert tbt.lines[-1].get_xdata() == [0.5, 0.5] and tbt.get_xlim()[0] < 0.5  # the SLO, in view
    assert MACHINE["device"] in figure.get_suptitle()
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert "vllm" in titles and "sarathi-serve" in titles
    assert not plt.get_fignums()  # closed


def test_serving_colours_gaps_by_their_length_and_puts_chunks_above_them(tmp_path, drawn):
    completions = [completion(3, 0.0, 0.5, [1.0, 2.0, 6.0]), completion(8, 0.0, 6.0, [7.0])]
    iterations = [
        iteration(0.5, 1.0, [prefill(3)]),
        iteration(1.0, 2.0, [decode(3)]),
        iteration(5.0, 6.0, [prefill(3, 6)]),  # after a preemption
        iteration(6.0, 7.0, [prefill(8)]),
    ]
    plot_serving({"vllm": (completions, iterations)}, MACHINE, tmp_path / "s.svg")
    (lanes,) = [axis for axis in drawn[0].axes if axis.get_ylabel() == "request"]
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["3", "8"]
    (bars,) = lanes.collections
    spans = [
        (path.vertices[0, 0], path.vertices[1, 0], round(path.vertices[0:3, 1].mean())) for path in bars.get_paths()
    ]
    assert spans == [(0, 0.5, 0), (0, 6, 1), (1, 2, 0), (2, 6, 0), (0.5, 1, 0), (5, 6, 0), (6, 7, 1)]
    colors = [tuple(color) for color in bars.get_facecolors()]
    assert colors[0] == colors[1] and colors[4] == colors[5] == colors[6]  # waiting, prefill
    assert len(set(colors)) == 4 and colors[3][0] > colors[3][1]  # the long gap is red


@pytest.mark.parametrize(
    "completions, iterations",
    [
        ([], []),
        ([completion(0, 1.0, reason=None)], []),
        ([completion(0, 1.0, reason="abort"), completion(1, 1.0, reason=None)], []),
        ([completion(0, 1.0, 1.0, [2.0])], [iteration(1.0, 2.0, [prefill(0)])]),
        ([completion(0, 1.0, 1.0, [2.0, 3.0])], [iteration(1.0, 2.0, [prefill(0)]), iteration(2.0, 3.0, [decode(0)])]),
        ([], [iteration(1.0, 2.0, [prefill(0)]), iteration(2.0, 3.0, [decode(0)])]),
    ],
    ids=["nothing", "waits", "aborted", "one token", "no stall", "no completions"],
)
@pytest.mark.filterwarnings("error")
def test_serving_draws_runs_in_which_little_happened(completions, iterations, tmp_path):
    plot_serving({"vllm": (completions, iterations)}, MACHINE, tmp_path / "alone.png")
    plot_serving({"vllm": (completions, iterations), "orca": a_run()}, MACHINE, tmp_path / "two.png", slo_s=0.1)
    assert (tmp_path / "alone.png").stat().st_size and (tmp_path / "two.png").stat().st_size


@pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 2.0, 2.0, 3.0]])
def test_serving_draws_gaps_of_no_time(times, tmp_path, drawn):
    starts = [1.0, *times[:-1]]
    iterations = [iteration(a, b, [prefill(0) if i == 0 else decode(0)]) for i, (a, b) in enumerate(zip(starts, times))]
    plot_serving({"vllm": ([completion(0, 1.0, 1.0, times)], iterations)}, MACHINE, tmp_path / "s.png")
    assert axis_labelled(drawn[0], "TBT").get_ylim()[0] > 0  # the colours are on a log scale


# -----------------------------------------------------------------------------------------------------
# capacity


def point(qps, p99_tbt_s, p50_delay_s=0.1, cut_short=False):
    return {
        "qps": qps,
        "p99_tbt_s": p99_tbt_s,
        "p50_tbt_s": 0.01,
        "p50_ttft_s": 0.2,
        "p50_delay_s": p50_delay_s,
        "tokens_per_s": 100.0,
        "met": not cut_short,
        "cut_short": "17 TBTs over 0.3 s" if cut_short else None,
    }


def test_curve_points_are_sorted_by_rate_and_leave_none_out():
    tried = [point(4, 0.9, None, cut_short=True), point(1, 0.1), point(3, None, 5.0), point(2, 0.2)]
    assert curve_points(tried, "p99_tbt_s") == ([1, 2, 4], [0.1, 0.2, 0.9], [False, False, True])
    assert curve_points(tried, "p50_delay_s") == ([1, 2, 3], [0.1, 0.1, 5.0], [False, False, False])
    twice = [point(1, 0.1, cut_short=True), point(1, 0.1)]  # the lowest rate that failed is run again
    assert curve_points(twice, "p99_tbt_s") == ([1, 1], [0.1, 0.1], [False, True])
    assert curve_points([point(1, None)], "p99_tbt_s") == curve_points([], "qps") == ([], [], [])
    assert curve_points([{"qps": 1, "cut_short": True}], "p99_tbt_s") == ([], [], [])  # a run without numbers


def test_capacity_draws_a_bar_and_its_number_for_each_policy(tmp_path, drawn):
    results = {
        "vllm": {"capacity_qps": 0.5, "points": [point(1, 0.4, 3.0), point(0.5, 0.2), point(2, 0.9, 9.0, True)]},
        "orca": {"capacity_qps": None, "points": [point(0.1, None, None, cut_short=True)]},
        "sarathi-serve": {"capacity_qps": 1.234, "points": []},
    }
    plot_capacity(results, MACHINE, tmp_path / "c.png", slo_s=0.3)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    bars, tbt, delay = (axis_labelled(drawn[0], label) for label in ("capacity", "P99", "median"))
    assert [bar.get_width() for bar in bars.patches] == [0.5, 0, 1.234]
    assert [text.get_text() for text in bars.texts] == ["0.500", "none", "1.23"]
    curve, done, cut_short = tbt.lines[:3]
    assert points(curve) == [(0.5, 0.2), (1, 0.4), (2, 0.9)]
    assert points(done) == [(0.5, 0.2), (1, 0.4)] and points(cut_short) == [(2, 0.9)]
    assert done.get_markerfacecolor() == POLICY_COLORS["vllm"] and cut_short.get_markerfacecolor() == "white"
    assert points(delay.lines[0]) == [(0.5, 0.1), (1, 3.0), (2, 9.0)]
    assert tbt.lines[-1].get_ydata() == [0.3, 0.3] and delay.lines[-1].get_ydata() == [2, 2]
    assert MACHINE["model"] in drawn[0].get_suptitle() and not plt.get_fignums()


@pytest.mark.parametrize(
    "capacity_qps, tried",
    [(None, []), (0.0, [point(1, None, None)]), (2, [point(2, 0.1)]), (1.5, [point(1, 0.0, 0.0)])],
)
@pytest.mark.filterwarnings("error")
def test_capacity_draws_searches_that_found_little(capacity_qps, tried, tmp_path):
    results = {"vllm": {"capacity_qps": capacity_qps, "points": tried}}
    for slo_s in (None, 0.2):
        plot_capacity(results, MACHINE, tmp_path / "c.png", slo_s)
    assert (tmp_path / "c.png").stat().st_size


# -----------------------------------------------------------------------------------------------------
# budget


def test_budget_lines_are_sorted_and_know_decode_only_iterations():
    rows = [
        (64, 512, 8, 0.3),
        (8, 512, 8, 0.1),
        (32, 512, 8, 0.2),
        (0, 256, 4, 0.05),
        (64, 256, 4, 0.2),
        (96, 256, 4, None),
    ]
    assert budget_lines(rows) == {
        (256, 4): {"hybrid": [(64, 0.2)], "decode_only": [0.05]},
        (512, 8): {"hybrid": [(32, 0.2), (64, 0.3)], "decode_only": [0.1]},
    }
    assert list(budget_lines(rows)) == [(256, 4), (512, 8)]
    assert budget_lines([]) == budget_lines([(1, 2, 3, None)]) == {}


def test_budget_draws_a_line_for_each_context_and_marks_the_choice(tmp_path, drawn):
    rows = [(b, c, 8, b / 1000 + c / 10000) for c in (1024, 512) for b in (0, 256, 128, 64)]
    plot_budget(rows, MACHINE, tmp_path / "b.png", slo_s=0.25, chosen=128)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    axis = axis_labelled(drawn[0], "token budget")
    first, alone = axis.lines[:2]
    assert first.get_label() == "8 decodes, context 512"
    assert points(first) == [(64, pytest.approx(0.1152)), (128, pytest.approx(0.1792)), (256, pytest.approx(0.3072))]
    assert points(alone) == [(32, pytest.approx(0.0512))]  # left of the least budget
    assert [text.get_text() for text in axis.get_xticklabels()] == ["decode\nonly", "64", "128", "256"]
    assert axis.lines[-2].get_ydata() == [0.25, 0.25] and axis.lines[-1].get_xdata() == [128, 128]
    assert any(text.get_text() == "chosen: 128 tokens" for text in axis.texts)
    assert MACHINE["dtype"] in drawn[0].get_suptitle() and not plt.get_fignums()


@pytest.mark.parametrize("rows", [[], [(64, 512, 8, None)], [(64, 512, 8, 0.1)], [(0, 512, 8, 0.1)]])
@pytest.mark.filterwarnings("error")
def test_budget_draws_profiles_with_little_in_them(rows, tmp_path):
    plot_budget(rows, MACHINE, tmp_path / "b.png")
    plot_budget(rows, MACHINE, tmp_path / "c.pdf", slo_s=0.2, chosen=64)
    assert (tmp_path / "b.png").stat().st_size and (tmp_path / "c.pdf").stat().st_size
