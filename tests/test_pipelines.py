"""What is drawn of simulations: boxes and labels against what they are made from."""

from functools import cache
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from config import EngineConfig
from lab.pictures.pipelines import plot_bubbles, plot_pipeline
from lab.pictures.style import BUBBLE, DECODE, HYBRID, POLICY_COLORS, PREFILL
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from policies.micro_batches import StageRun
from tests.test_metrics import decode, prefill
from tests.test_simulation import at_once
from tests.test_views import is_png, points, texts

near = pytest.approx


@cache
def two_stages():
    """Bubbles of all kinds, those between decodes below a thousandth of the time."""
    cost = CostModel.named("gpt3-175b", tp=8, pp=2)
    arrivals = at_once((2048, 20), (1024, 20), (2040, 20), (1020, 20))
    sizes = dict(chunk=256, max_batch=2, max_len=8192, page_size=8192, pages=4)
    return {
        policy: simulate(cost, EngineConfig(policy, **sizes), arrivals).stage_runs
        for policy in ("orca-best", "sarathi-serve")
    }


def draw(runs, tmp_path, title=""):
    """The panels of the picture of a pipeline."""
    kinds = {name: bubble_kinds(stage_runs) for name, stage_runs in runs.items()}
    figure = plot_pipeline(runs, kinds, title, tmp_path / "p.png")
    assert is_png(tmp_path / "p.png")
    assert figure.get_suptitle().startswith(f"{title}\n")
    return figure.axes


def boxes(axis):
    """[(lane, start, end, colour)] of what is in a panel, frames left out."""
    rows = []
    for box in axis.patches:
        if box.get_fill():
            lane = round(box.get_center()[1])
            start = box.get_x()
            rows.append((lane, start, start + box.get_width(), to_hex(box.get_facecolor())))
    return rows


def expected_boxes(stage_runs):
    """A box for each batch, and one for the bubble before it."""
    rows = []
    for run in stage_runs:
        kinds = {chunk.is_decode for chunk in run.chunks}
        color = HYBRID if len(kinds) == 2 else DECODE if kinds == {True} else PREFILL
        rows.append((run.stage, near(run.start), near(run.end), color))
        if run.bubble:
            begin = near(run.start - run.bubble)
            rows.append((run.stage, begin, near(run.start), BUBBLE["facecolor"]))
    return rows


def test_a_pipeline_plot_has_a_box_for_each_batch_and_bubble(tmp_path):
    axes = draw(two_stages(), tmp_path, "GPT-3")
    assert axes[0].get_xlim() == axes[1].get_xlim()
    for axis, (name, stage_runs) in zip(axes, two_stages().items(), strict=True):
        assert boxes(axis) == expected_boxes(stage_runs)
        assert len({color for *_, color in boxes(axis)}) == 4
        assert axis.yaxis_inverted()  # stage 1 on top
        assert [label.get_text() for label in axis.get_yticklabels()] == ["stage 1", "stage 2"]
        assert axis.get_title(loc="left") == name


def test_the_longest_bubble_and_the_sum_of_each_kind_are_written(tmp_path):
    axes = draw(two_stages(), tmp_path)
    for axis, stage_runs in zip(axes, two_stages().values(), strict=True):
        labels = {label.get_text()[:3]: label for label in axis.texts}
        bubbles = {kind: [] for kind in ("PB1", "PB2", "PB3")}
        for run, kind in bubble_kinds(stage_runs):
            bubbles[kind].append(run)
        for kind, runs in bubbles.items():
            longest = max(runs, key=lambda run: (round(run.bubble, 6), run.start))
            seconds = float(labels[kind].get_text().split()[1]) / 1e3
            assert seconds == near(longest.bubble, rel=5e-3)
            x, y = labels[kind].get_position()
            assert longest.start - longest.bubble - 1e-9 <= x <= longest.start + 1e-9
            assert longest.stage - 0.5 < y < longest.stage - 0.32
            total = float(axis.get_title(loc="right").split(f"{kind} ")[1].split()[0]) / 1e3
            assert total == near(sum(run.bubble for run in runs), rel=5e-3)


def test_a_box_says_what_is_in_it_if_it_is_wide_enough(tmp_path):
    def batch(start, end, *chunks, bubble=0.0):
        return StageRun(0, 0, 0, start, end, bubble, list(chunks))

    rows = [  # A is prefilled; 1 s later it decodes beside B; 2 s later both decode
        batch(0.0, 4.0, prefill(0, 4)),
        batch(5.0, 9.0, decode(0), prefill(1, 7), bubble=1.0),
        batch(11.0, 12.0, decode(0), decode(1), bubble=2.0),
    ]
    (axis,) = draw({"orca": rows}, tmp_path)
    assert texts(axis) == ["$A_p$", "$A_d$\n$B_p$", "$AB_d$", "PB1 2.00 s"]
    assert "makespan 12.0 s" in axis.get_title(loc="right")
    long = batch(12.0, 150.0, prefill(2, 4), prefill(3, 4))
    (axis,) = draw({"orca": [*rows, long]}, tmp_path)
    assert texts(axis)[:3] == ["$A_p$", "$A_d$\n$B_p$", "$CD_p$"]  # the third is narrow
    beyond_z = batch(12.0, 20.0, decode(0), decode(26))
    assert len(texts(draw({"orca": [*rows, beyond_z]}, tmp_path)[0])) == 4


def test_bubble_times_are_cumulative_and_none_is_shown_too(tmp_path):
    first = SimpleNamespace(bubbles=[100.0, 0.0, 1.0, 10.0], ends=[8.0, 2.0, 4.0])
    systems = {"orca, TP 8": first, "sarathi, PP 8": SimpleNamespace(bubbles=[5.0], ends=[9.0])}
    left, right = plot_bubbles(systems, "", tmp_path / "b.png").axes
    assert points(left.lines[0]) == [(0, 0), (0, 0.25), (1, 0.5), (10, 0.75), (100, 1)]
    assert points(right.lines[0]) == [(2, 0), (2, near(1 / 3)), (4, near(2 / 3)), (8, 1)]
    assert left.get_xscale() == "symlog" and left.get_xlim()[0] <= 0
    medians = {left: ("median 5.50 s", "median 5.00 s"), right: ("3 in 8.00 s", "1 in 9.00 s")}
    for axis, summaries in medians.items():
        labels = [f"{name}: {text}" for name, text in zip(systems, summaries, strict=True)]
        assert [line.get_label() for line in axis.lines] == labels
        colors = [POLICY_COLORS["orca"], POLICY_COLORS["sarathi"]]
        assert [line.get_color() for line in axis.lines] == colors
