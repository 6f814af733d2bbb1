"""What is drawn of simulations: boxes and labels against what they are made from."""

from functools import cache

import pytest
from matplotlib.colors import to_hex

from policies.config import EngineConfig
from simulator.cost_model import CostModel
from simulator.devices import DEVICES, GEOMETRIES
from simulator.simulation import StageRun, bubble_kinds, simulate
from tests.test_metrics import decode, prefill
from tests.test_simulation import at_once
from tests.test_views import is_png, near, no_warnings, points, texts
from views import pipelines
from views.pipelines import plot_bubbles, plot_capacities, plot_slo_curves
from views.style import DECODE, POLICY_COLORS, PREFILL


@cache
def two_stages():
    """Bubbles of all kinds, those between decodes below a thousandth of the time."""
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], 8, 2)
    arrivals = at_once((2048, 20), (1024, 20), (2040, 20), (1020, 20))
    sizes = dict(chunk=256, max_batch=2, max_len=8192, page_size=8192, pages=4)
    configs = EngineConfig("orca-best", **sizes), EngineConfig("sarathi-serve", **sizes)
    return {c.policy: simulate(cost, c, arrivals, timeline=True).stage_runs for c in configs}


A_PIPELINE = [  # A is prefilled; 1 s later it decodes while B is prefilled; 2 s later five decode
    StageRun(0, 0, 0, 0.0, 4.0, 0.0, [prefill(0, 4)]),
    StageRun(0, 0, 0, 5.0, 9.0, 1.0, [decode(0), prefill(1, 7)]),
    StageRun(0, 0, 0, 11.0, 12.0, 2.0, [decode(i) for i in range(5)]),
]


def draw(runs, tmp_path, title=""):
    """(the panels, the picture) of a pipeline."""
    kinds = {name: bubble_kinds(stage_runs) for name, stage_runs in runs.items()}
    figure = pipelines.plot_pipeline(runs, kinds, title, tmp_path / "p.png")
    assert is_png(tmp_path / "p.png")
    return figure.axes, figure


def boxes(axis):
    """[(lane, start, end, colour)] of what is in a panel, frames left out."""
    found = [(b, b.get_x(), b.get_x() + b.get_width()) for b in axis.patches if b.get_fill()]
    return [(round(b.get_center()[1]), x, end, to_hex(b.get_facecolor())) for b, x, end in found]


def test_a_pipeline_has_a_box_for_each_batch_and_bubble_and_names_the_longest(tmp_path):
    axes, figure = draw(two_stages(), tmp_path, "GPT-3")
    assert figure.get_suptitle().startswith("GPT-3\n")
    for axis, (name, stage_runs) in zip(axes, two_stages().items()):
        expected, hybrid = [], {False: PREFILL, True: DECODE}
        for run in stage_runs:
            kinds = {is_decode for *_, is_decode in run.chunks}
            color = pipelines.HYBRID if len(kinds) == 2 else hybrid[kinds.pop()]
            start, before = near(run.start), near(run.start - run.bubble)
            expected.append((run.stage, start, near(run.end), color))
            expected += [(run.stage, before, start, pipelines.BUBBLE)] if run.bubble else []
        assert boxes(axis) == expected and len({box[3] for box in expected}) == 4
        assert axis.get_ylim()[0] > axis.get_ylim()[1]  # stage 1 on top
        assert [label.get_text() for label in axis.get_yticklabels()] == ["stage 1", "stage 2"]
        labels = sorted(text for text in texts(axis) if text.startswith("PB"))
        assert axis.get_title(loc="left") == name and len(labels) == 3
        for kind, label in zip(("PB1", "PB2", "PB3"), labels):
            bubbles = [run.bubble for run, k in bubble_kinds(stage_runs) if k == kind]
            total = axis.get_title(loc="right").split(f"{kind} ")[1].split()[0]
            seen = [float(label.removeprefix(kind).split()[0]), float(total)]
            assert seen == near([1000 * max(bubbles), 1000 * sum(bubbles)], rel=5e-3)


def test_all_runs_share_a_time_axis_and_the_longest_pb3_of_the_first_is_enlarged(tmp_path):
    first, second, zoomed = draw(two_stages(), tmp_path)[0]
    runs = two_stages()["orca-best"]
    decodes = [run for run, kind in bubble_kinds(runs) if kind == "PB3"]
    longest = max(decodes, key=lambda run: (round(run.bubble, 6), run.start))
    assert first.get_xlim() == second.get_xlim() and first.get_xlim()[1] >= runs[-1].end
    left, right = zoomed.get_xlim()
    assert left < longest.start - longest.bubble and longest.end < right  # and what it waited for
    assert longest.bubble > 0.005 * (right - left)  # some pixels
    assert f"PB3 {1000 * longest.bubble:#.3g} ms" in texts(zoomed)
    (frame,) = [box for axis in (first, second) for box in axis.patches if not box.get_fill()]
    assert frame.axes is first
    assert (frame.get_x(), frame.get_x() + frame.get_width()) == (near(left), near(right))
    wide = [*A_PIPELINE, StageRun(0, 0, 0, 13.0, 14.0, 1.0, [decode(0)])]
    (axis,) = draw({"wide": wide}, tmp_path)[0]
    assert "PB3\n1.00 s" in texts(axis)  # it can be seen


def test_a_box_says_what_is_in_it_if_it_is_wide_enough(tmp_path):
    (axis,) = draw({"orca": A_PIPELINE}, tmp_path)[0]
    assert texts(axis) == ["$A_p$", "$A_d$ $B_p$", "5 d", "PB1\n2.00 s"]
    assert "makespan 12.0 s" in axis.get_title(loc="right")
    long = StageRun(0, 0, 0, 1000.0, 2000.0, 0.0, [prefill(25, 4), prefill(26, 4)])
    (axis,) = draw({"orca": [*A_PIPELINE, long]}, tmp_path)[0]
    assert texts(axis)[0] == "$Z_p$ $26_p$"  # the first three boxes are narrow


@pytest.mark.parametrize("stage_runs", [[], [StageRun(0, 2, 0, 0.0, 1.0, 0.0, [decode(0)])]])
@no_warnings
def test_a_pipeline_with_little_in_it_is_drawn(stage_runs, tmp_path):
    draw({}, tmp_path)
    axes, _ = draw({"orca": stage_runs, "vllm": A_PIPELINE}, tmp_path)
    assert [len(boxes(axis)) for axis in axes] == [len(stage_runs), 5]


def test_bubble_times_are_cumulative_and_none_is_leftmost(tmp_path):
    first = {"bubbles": [100.0, 0.0, 1.0, 10.0], "ends": [8.0, 2.0, None, 4.0]}
    systems = {"orca, TP 8": first, "orca, PP 8": {"bubbles": [5.0], "ends": [9.0]}}
    left, right = plot_bubbles(systems, "", tmp_path / "b.png").axes
    (low, _), *_ = rises = points(left.lines[0])
    assert left.get_xscale() == "log" and left.get_xlim()[0] < low < 1
    assert rises == [(low, 0), (low, 0.25), (1, 0.5), (10, 0.75), (100, 1)]
    assert points(right.lines[0]) == [(0, 0), (2, 0), (2, 1), (4, 2), (8, 3)]
    labels = [line.get_label() for axis in (left, right) for line in axis.lines]
    assert labels[:2] == ["orca, TP 8: median 5.50 s", "orca, PP 8: median 5.00 s"]
    assert labels[2:] == ["orca, TP 8: 3 in 8.00 s", "orca, PP 8: 1 in 9.00 s"]
    styles = [(x.get_color(), x.get_linestyle(), x.get_drawstyle()) for x in left.lines]
    assert styles == [(POLICY_COLORS["orca"], line, "steps-post") for line in ("-", "--")]
    near_together = {"orca": {"bubbles": [1.0, 2.0], "ends": []}}
    assert plot_bubbles(near_together, "", tmp_path / "b.png").axes[0].get_xscale() == "linear"


def test_capacities_have_a_panel_each_and_none_is_written_out(tmp_path):
    yi = [("vllm", 0.5, 1.0), ("sarathi-serve", 1.234, 3.7), ("orca", 0, None)]
    falcon = [("vllm", None, None), ("sarathi-serve", 2.0, 5.6)]
    rows = [("Yi, strict", *row) for row in yi] + [("Falcon, strict", *row) for row in falcon]
    groups = [dict(zip(("group", "system", "qps", "paper"), row)) for row in rows]
    first, second = plot_capacities(groups, "", tmp_path / "c.png").axes
    assert (first.get_title(), second.get_title()) == ("Yi\nstrict", "Falcon\nstrict")
    assert [bar.get_height() for bar in first.patches] == [0.5, 1.234, 0]
    assert texts(first) == ["0.500", "1.23\n2.47×\npaper 3.7×", "none"]
    assert texts(second) == ["none", "2.00\npaper 5.6×"]  # there is nothing to compare it to
    colors = [*enumerate(POLICY_COLORS[system] for system, *_ in yi)]
    for axis, seen in ((first, colors), (second, colors[:2])):
        assert [(b.get_center()[0], to_hex(b.get_facecolor())) for b in axis.patches] == seen


@no_warnings
def test_a_curve_against_the_slo_is_sorted_and_marks_where_there_is_no_capacity(tmp_path):
    small = [(1.0, 2.5), (0.1, None), (0.5, 1.0)]
    lines = {"vllm, batch 32": small, "vllm, batch 64": [(1.0, 3.0)]}
    curves = {"Yi": lines, "Mistral": {"sarathi-serve": [(0.1, 4.0)]}}
    figure = plot_slo_curves(curves, "", tmp_path / "s.png")
    first, second = figure.axes
    curve, hollow, other = first.lines
    assert points(curve) == [(0.1, 0), (0.5, 1), (1, 2.5)] and points(hollow) == [(0.1, 0)]
    assert hollow.get_markerfacecolor() == "white" and second.get_title() == "Mistral"
    assert first.get_xscale() == second.get_xscale() == "log"
    assert curve.get_color() == other.get_color() == POLICY_COLORS["vllm"]
    assert second.lines[0].get_color() == POLICY_COLORS["sarathi-serve"]
    assert (curve.get_linestyle(), other.get_linestyle()) == ("-", "--")
    assert texts(figure.legends[0]) == [*lines, "sarathi-serve"]


@no_warnings
def test_little_and_nothing_are_drawn_without_a_warning(tmp_path):
    none, one = {"bubbles": [], "ends": []}, {"bubbles": [0.0], "ends": [None]}
    group = {"group": "Yi", "system": "orca", "qps": None, "paper": None}
    lines = {"Yi": {}, "Mistral": {"vllm": [], "orca": [(0.1, None)]}}
    little = (plot_bubbles, {"orca": none, "vllm": one}), (plot_capacities, [group])
    for plot, content in (*little, (plot_slo_curves, lines)):
        for it in (content, type(content)()):
            plot(it, "", tmp_path / f"{plot.__name__}{len(it)}.png")
            assert is_png(tmp_path / f"{plot.__name__}{len(it)}.png")
