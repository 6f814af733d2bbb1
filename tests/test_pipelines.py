"""What is drawn of simulations: boxes and labels against what they are made from."""

from functools import cache
from types import SimpleNamespace

from matplotlib.colors import to_hex

from config import EngineConfig
from lab.pictures import pipelines
from lab.pictures.pipelines import plot_bubbles
from lab.pictures.style import BUBBLE, DECODE, HYBRID, POLICY_COLORS, PREFILL
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import DEVICES, GEOMETRIES
from lab.simulator.simulation import bubble_kinds, simulate
from policies.micro_batches import StageRun
from tests.test_metrics import decode, prefill
from tests.test_simulation import at_once
from tests.test_views import is_png, near, points, texts


@cache
def two_stages():
    """Bubbles of all kinds, those between decodes below a thousandth of the time."""
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], 8, 2)
    arrivals = at_once((2048, 20), (1024, 20), (2040, 20), (1020, 20))
    sizes = dict(chunk=256, max_batch=2, max_len=8192, page_size=8192, pages=4)
    configs = EngineConfig("orca-best", **sizes), EngineConfig("sarathi-serve", **sizes)
    return {c.policy: simulate(cost, c, arrivals).stage_runs for c in configs}


A_PIPELINE = [  # A is prefilled; 1 s later it decodes while B is prefilled; 2 s later both decode
    StageRun(0, 0, 0, 0.0, 4.0, 0.0, [prefill(0, 4)]),
    StageRun(0, 0, 0, 5.0, 9.0, 1.0, [decode(0), prefill(1, 7)]),
    StageRun(0, 0, 0, 11.0, 12.0, 2.0, [decode(0), decode(1)]),
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


def test_a_pipeline_plot_has_a_box_for_each_batch_and_bubble(tmp_path):
    axes, figure = draw(two_stages(), tmp_path, "GPT-3")
    assert figure.get_suptitle().startswith("GPT-3\n")
    for axis, (name, stage_runs) in zip(axes, two_stages().items(), strict=True):
        expected = []
        hybrid = {False: PREFILL, True: DECODE}
        for run in stage_runs:
            kinds = {is_decode for *_, is_decode in run.chunks}
            color = HYBRID if len(kinds) == 2 else hybrid[kinds.pop()]
            start = near(run.start)
            before = near(run.start - run.bubble)
            expected.append((run.stage, start, near(run.end), color))
            expected += [(run.stage, before, start, BUBBLE["facecolor"])] if run.bubble else []
        assert boxes(axis) == expected and len({box[3] for box in expected}) == 4
        assert axis.get_ylim()[0] > axis.get_ylim()[1]  # stage 1 on top
        assert [label.get_text() for label in axis.get_yticklabels()] == ["stage 1", "stage 2"]
        labels = sorted(text for text in texts(axis) if text.startswith("PB"))
        assert axis.get_title(loc="left") == name and len(labels) == 3
        for kind, label in zip(("PB1", "PB2", "PB3"), labels, strict=True):
            bubbles = [run.bubble for run, k in bubble_kinds(stage_runs) if k == kind]
            total = axis.get_title(loc="right").split(f"{kind} ")[1].split()[0]
            seen = [float(label.removeprefix(kind).split()[0]), float(total)]
            assert seen == near([1000 * max(bubbles), 1000 * sum(bubbles)], rel=5e-3)


def test_runs_share_a_time_axis_and_label_their_longest_bubbles(tmp_path):
    first, second = draw(two_stages(), tmp_path)[0]
    runs = two_stages()["orca-best"]
    assert first.get_xlim() == second.get_xlim() and first.get_xlim()[1] >= runs[-1].end
    places = {text.get_text()[:3]: (text.get_position(), text.get_ha()) for text in first.texts}
    for kind, side in (("PB1", "right"), ("PB2", "left"), ("PB3", "center")):
        those = [run for run, k in bubble_kinds(runs) if k == kind]
        longest = max(those, key=lambda run: (round(run.bubble, 6), run.start))
        end = longest.start
        start = longest.start - longest.bubble
        x = {"right": end, "left": start, "center": (start + end) / 2}[side]
        (at, y), seen = places[kind]
        assert (at, seen) == (near(x), side) and longest.stage - 0.5 < y < longest.stage - 0.32


def test_a_box_says_what_is_in_it_if_it_is_wide_enough(tmp_path):
    (axis,) = draw({"orca": A_PIPELINE}, tmp_path)[0]
    assert texts(axis) == ["$A_p$", "$A_d$ $B_p$", "$A_d$ $B_d$", "PB1 2.00 s"]
    assert "makespan 12.0 s" in axis.get_title(loc="right")
    long = StageRun(0, 0, 0, 12.0, 150.0, 0.0, [prefill(2, 4), prefill(3, 4)])
    (axis,) = draw({"orca": [*A_PIPELINE, long]}, tmp_path)[0]  # the others are narrow
    assert texts(axis)[:3] == ["$A_p$", "$A_d$\n$B_p$", "$C_p$ $D_p$"]


def test_bubble_times_are_cumulative_and_none_is_shown_too(tmp_path):
    first = SimpleNamespace(bubbles=[100.0, 0.0, 1.0, 10.0], ends=[8.0, 2.0, 4.0])
    systems = {"orca, TP 8": first, "sarathi, PP 8": SimpleNamespace(bubbles=[5.0], ends=[9.0])}
    left, right = plot_bubbles(systems, "", tmp_path / "b.png").axes
    assert points(left.lines[0]) == [(0, 0), (0, 0.25), (1, 0.5), (10, 0.75), (100, 1)]
    assert left.get_xscale() == "symlog" and left.get_xlim()[0] <= 0
    done = [(2, 0), (2, near(1 / 3)), (4, near(2 / 3)), (8, 1)]
    assert points(right.lines[0]) == done
    assert right.lines[0].get_drawstyle() == "steps-post"
    labels = [line.get_label() for axis in (left, right) for line in axis.lines]
    assert labels[:2] == ["orca, TP 8: median 5.50 s", "sarathi, PP 8: median 5.00 s"]
    assert labels[2:] == ["orca, TP 8: 3 in 8.00 s", "sarathi, PP 8: 1 in 9.00 s"]
    styles = [(x.get_color(), x.get_drawstyle()) for x in left.lines]
    assert styles == [(POLICY_COLORS[policy], "steps-post") for policy in ("orca", "sarathi")]
