"""What is drawn and traced of simulations: boxes, labels and slices against what they are made from."""

import json

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from chrome_trace import write_pipeline_trace
from cost_model import DEVICES, GEOMETRIES, CostModel
from plot import DECODE, POLICY_COLORS, PREFILL
from plot_simulated import BUBBLE, HYBRID, plot_bubbles, plot_capacities, plot_pipeline, plot_slo_curves
from serving import Settings
from simulator import StageRun, bubble_kinds, simulate
from test_plot import decode, drawn as drawn_figures, points, prefill
from workload import Arrival

drawn = drawn_figures


@pytest.fixture(scope="module")
def runs():
    """Four requests on two stages: bubbles of all kinds, those between decodes below a thousandth of the time."""
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], 8, 2)
    arrivals = [Arrival(0.0, p, d) for p, d in [(2048, 20), (1024, 20), (2040, 20), (1020, 20)]]
    settings = Settings(chunk=256, max_batch=2, max_len=8192, page_size=8192, kv_tokens=4 * 8192)
    specs = ("orca", {"prefills": 1}), ("sarathi-serve", {})
    return {spec[0]: simulate(cost, spec, arrivals, settings, timeline=True).stage_runs for spec in specs}


def a_pipeline():
    """One stage: A is prefilled; 1 s later A is decoded while B is prefilled; 2 s later five are decoded."""
    return [
        StageRun(0, 0, 0, 0.0, 4.0, 0.0, [prefill(0)]),
        StageRun(0, 0, 0, 5.0, 9.0, 1.0, [decode(0), prefill(1, 7)]),
        StageRun(0, 0, 0, 11.0, 12.0, 2.0, [decode(i) for i in range(5)]),
    ]


def boxes(axis):
    """(lane, start, end, colour) of what is in a panel, frames left out."""
    found = [(b, b.get_x(), b.get_x() + b.get_width()) for b in axis.patches if b.get_fill()]
    return [(round(b.get_center()[1]), start, end, to_hex(b.get_facecolor())) for b, start, end in found]


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_a_pipeline_has_a_box_for_each_batch_and_each_bubble(tmp_path, drawn, runs):
    plot_pipeline(runs, "GPT-3", tmp_path / "p.png")
    for axis, stage_runs in zip(drawn[0].axes, runs.values()):
        expected = []
        for run in stage_runs:
            kinds = {is_decode for _, _, is_decode in run.chunks}
            color = HYBRID if len(kinds) == 2 else DECODE if kinds == {True} else PREFILL
            expected.append((run.stage, run.start, run.end, color))
            expected += [(run.stage, run.start - run.bubble, run.start, BUBBLE)] if run.bubble else []
        assert {box[3] for box in expected} == {PREFILL, HYBRID, DECODE, BUBBLE}
        assert boxes(axis) == [(lane, *map(pytest.approx, (start, end)), color) for lane, start, end, color in expected]
        assert axis.get_ylim()[0] > axis.get_ylim()[1]  # stage 1 on top
        assert [label.get_text() for label in axis.get_yticklabels()] == ["stage 1", "stage 2"]
    assert drawn[0].get_suptitle().startswith("GPT-3\n") and not plt.get_fignums()


def test_a_pipeline_names_the_longest_bubble_of_each_kind_and_sums_them_up(tmp_path, drawn, runs):
    plot_pipeline(runs, "", tmp_path / "p.png")
    for axis, (name, stage_runs) in zip(drawn[0].axes, runs.items()):
        labels = sorted(text for text in texts(axis) if text.startswith("PB"))
        assert [label[:3] for label in labels] == ["PB1", "PB2", "PB3"] and axis.get_title(loc="left") == name
        for kind, label in zip(("PB1", "PB2", "PB3"), labels):
            bubbles = [run.bubble for run, k in bubble_kinds(stage_runs) if k == kind]
            assert float(label[3:].split()[0]) == pytest.approx(1000 * max(bubbles), rel=5e-3)
            total = axis.get_title(loc="right").split(f"{kind} ")[1].split()[0]
            assert float(total) == pytest.approx(1000 * sum(bubbles), rel=5e-3)


def test_all_runs_share_a_time_axis_and_the_longest_pb3_of_the_first_is_enlarged(tmp_path, drawn, runs):
    plot_pipeline(runs, "", tmp_path / "p.png")
    first, second, zoomed = drawn[0].axes
    longest = max((round(r.bubble, 6), r.start, r) for r, kind in bubble_kinds(runs["orca"]) if kind == "PB3")[2]
    assert first.get_xlim() == second.get_xlim() and first.get_xlim()[1] >= runs["orca"][-1].end
    left, right = zoomed.get_xlim()
    assert left < longest.start - longest.bubble and longest.end < right  # it, and what it waited for
    assert longest.bubble > 0.005 * (right - left)  # some pixels
    assert f"PB3 {1000 * longest.bubble:#.3g} ms" in texts(zoomed)
    (frame,) = [patch for axis in (first, second) for patch in axis.patches if not patch.get_fill()]
    assert frame.axes is first and [frame.get_x(), frame.get_x() + frame.get_width()] == pytest.approx([left, right])
    plot_pipeline({"wide": a_pipeline() + [StageRun(0, 0, 0, 13.0, 14.0, 1.0, [decode(0)])]}, "", tmp_path / "p.png")
    assert len(drawn[1].axes) == 1 and "PB3\n1.00 s" in texts(drawn[1].axes[0])  # it can be seen


def test_a_box_says_what_is_in_it_if_it_is_wide_enough(tmp_path, drawn):
    plot_pipeline({"orca": a_pipeline()}, "", tmp_path / "p.png")
    assert texts(drawn[0].axes[0]) == ["$A_p$", "$A_d$ $B_p$", "5 d", "PB1\n2.00 s"]
    assert "makespan 12.0 s" in drawn[0].axes[0].get_title(loc="right")
    long = StageRun(0, 0, 0, 1000.0, 2000.0, 0.0, [prefill(25), prefill(26)])
    plot_pipeline({"orca": [*a_pipeline(), long]}, "", tmp_path / "p.png")
    assert texts(drawn[1].axes[0])[0] == "$Z_p$ $26_p$"  # the first three boxes are narrow


@pytest.mark.parametrize("stage_runs", [[], [StageRun(0, 2, 0, 0.0, 1.0, 0.0, [decode(0)])]])
@pytest.mark.filterwarnings("error")
def test_a_pipeline_with_little_in_it_is_drawn(stage_runs, tmp_path, drawn):
    plot_pipeline({}, "", tmp_path / "p.png")
    plot_pipeline({"orca": stage_runs, "vllm": a_pipeline()}, "", tmp_path / "p.png")
    assert len(boxes(drawn[1].axes[0])) == len(stage_runs) and len(boxes(drawn[1].axes[1])) == 5


def test_bubble_times_are_cumulative_and_none_is_leftmost(tmp_path, drawn):
    first = {"bubbles": [100.0, 0.0, 1.0, 10.0], "ends": [8.0, 2.0, None, 4.0]}
    plot_bubbles({"orca, TP 8": first, "orca, PP 8": {"bubbles": [5.0], "ends": [9.0]}}, "", tmp_path / "b.png")
    left, right = drawn[0].axes
    (low, _), *_ = rises = points(left.lines[0])
    assert left.get_xscale() == "log" and left.get_xlim()[0] < low < 1
    assert rises == [(low, 0), (low, 0.25), (1, 0.5), (10, 0.75), (100, 1)]
    assert points(right.lines[0]) == [(0, 0), (2, 0), (2, 1), (4, 2), (8, 3)]
    assert [line.get_label() for line in left.lines] == ["orca, TP 8: median 5.50 s", "orca, PP 8: median 5.00 s"]
    assert [line.get_label() for line in right.lines] == ["orca, TP 8: 3 in 8.00 s", "orca, PP 8: 1 in 9.00 s"]
    styles = [(line.get_color(), line.get_linestyle(), line.get_drawstyle()) for line in left.lines]
    assert styles == [(POLICY_COLORS["orca"], line, "steps-post") for line in ("-", "--")]
    plot_bubbles({"orca": {"bubbles": [1.0, 2.0], "ends": []}}, "", tmp_path / "b.png")
    assert drawn[1].axes[0].get_xscale() == "linear"


def test_capacities_have_a_panel_each_and_none_is_written_out(tmp_path, drawn):
    row = lambda *values: dict(zip(("group", "system", "qps", "paper"), values))
    yi = [row("Yi, strict", "vllm", 0.5, 1.0), row("Yi, strict", "sarathi-serve", 1.234, 3.7)]
    falcon = [row("Falcon, strict", "vllm", None, None), row("Falcon, strict", "sarathi-serve", 2.0, 5.6)]
    plot_capacities([*yi, row("Yi, strict", "orca", 0, None), *falcon], "", tmp_path / "c.png")
    first, second = drawn[0].axes
    assert [axis.get_title() for axis in (first, second)] == ["Yi\nstrict", "Falcon\nstrict"]
    assert [bar.get_height() for bar in first.patches] == [0.5, 1.234, 0]
    assert texts(first) == ["0.500", "1.23\n2.47×\npaper 3.7×", "none"]
    assert texts(second) == ["none", "2.00\npaper 5.6×"]  # there is nothing to compare it to
    colors = [to_hex(bar.get_facecolor()) for bar in first.patches]
    assert colors == [POLICY_COLORS[system] for system in ("vllm", "sarathi-serve", "orca")]
    assert [(bar.get_center()[0], to_hex(bar.get_facecolor())) for bar in second.patches] == [*enumerate(colors[:2])]


def test_a_curve_against_the_slo_is_sorted_and_marks_where_there_is_no_capacity(tmp_path, drawn):
    lines = {"vllm, batch 32": [(1.0, 2.5), (0.1, None), (0.5, 1.0)], "vllm, batch 64": [(1.0, 3.0)]}
    plot_slo_curves({"Yi": lines, "Mistral": {"sarathi-serve": [(0.1, 4.0)]}}, "", tmp_path / "s.png")
    first, second = drawn[0].axes
    curve, hollow, other = first.lines
    assert points(curve) == [(0.1, 0), (0.5, 1), (1, 2.5)] and points(hollow) == [(0.1, 0)]
    assert hollow.get_markerfacecolor() == "white" and first.get_xscale() == second.get_xscale() == "log"
    assert curve.get_color() == other.get_color() == POLICY_COLORS["vllm"] != second.lines[0].get_color()
    assert (curve.get_linestyle(), other.get_linestyle(), second.get_title()) == ("-", "--", "Mistral")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [*lines, "sarathi-serve"]


@pytest.mark.parametrize("plot", [plot_bubbles, plot_capacities, plot_slo_curves])
@pytest.mark.filterwarnings("error")
def test_little_and_nothing_are_drawn_without_a_warning(plot, tmp_path):
    little = {
        plot_bubbles: {"orca": {"bubbles": [], "ends": []}, "vllm": {"bubbles": [0.0], "ends": [None]}},
        plot_capacities: [{"group": "Yi", "system": "orca", "qps": None, "paper": None}],
        plot_slo_curves: {"Yi": {}, "Mistral": {"vllm": [], "orca": [(0.1, None)]}},
    }[plot]
    for name, content in (("little", little), ("nothing", type(little)())):
        plot(content, name, tmp_path / name)
        assert (tmp_path / f"{name}.png").stat().st_size


def trace(tmp_path, runs):
    write_pipeline_trace(tmp_path / "trace.json", runs)
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_slices_of_a_stage_do_not_overlap_and_add_up_to_its_work_and_bubbles(tmp_path, runs):
    events = [event for event in trace(tmp_path, runs) if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in events} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for pid, stage_runs in enumerate(runs.values(), start=1):
        for stage in (0, 1):
            own = [run for run in stage_runs if run.stage == stage]
            slices = [event for event in events if (event["pid"], event["tid"]) == (pid, stage + 1)]
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(slices, slices[1:]))
            expected = {True: [run.bubble for run in own if run.bubble], False: [run.end - run.start for run in own]}
            for is_bubble, seconds in expected.items():
                found = [event["dur"] / 1e6 for event in slices if (event["name"] == "bubble") == is_bubble]
                assert len(found) == len(seconds) and sum(found) == pytest.approx(sum(seconds), abs=1e-6 * len(own))


def test_a_slice_says_what_was_in_the_batch_and_replicas_are_processes(tmp_path):
    first, second, last = a_pipeline()
    second = second._replace(bubble=1.000001)  # as if by rounding: it begins when the batch before it ends all the same
    events = trace(tmp_path, {"orca": [first, second, last._replace(replica=1, stage=1, micro_batch=3)]})
    slices = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], list(e["args"].items())) for e in events if "dur" in e]
    args = lambda *values: list(zip(("prefill_tokens", "decodes", "micro_batch"), values))
    assert slices == [
        ("prefill", 1, 1, 0, 4_000_000, args(4, 0, 0)),
        ("bubble", 1, 1, 4_000_000, 1_000_000, []),
        ("hybrid", 1, 1, 5_000_000, 4_000_000, args(7, 1, 0)),
        ("bubble", 2, 2, 9_000_000, 2_000_000, []),
        ("decode", 2, 2, 11_000_000, 1_000_000, args(0, 5, 3)),
    ]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")]
    assert names == [(1, "orca: replica 1"), (1, "stage 1"), (2, "orca: replica 2"), (2, "stage 2")]
    assert trace(tmp_path, {}) == trace(tmp_path, {"orca": []}) == []
