"""What is drawn of simulated pipelines, against what it is made from."""

from matplotlib.colors import to_hex
from pytest import approx

from config import EngineConfig
from lab.pictures.pipelines import plot_pipeline
from lab.pictures.style import BUBBLE
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from tests.test_simulation import at_once


def test_a_pipeline_plot_has_a_box_for_each_batch_and_bubble(tmp_path):
    cost = CostModel.named("gpt3-175b", tp=8, pp=2)
    arrivals = at_once((2048, 20), (1024, 20), (2040, 20), (1020, 20))
    sizes = dict(
        chunk=256,
        max_batch=2,
        max_len=8192,
        page_size=8192,
        pages=4,
    )
    runs = simulate(cost, EngineConfig("orca-best", **sizes), arrivals).stage_runs
    kinds = {"orca-best": bubble_kinds(runs)}
    (axis,) = plot_pipeline({"orca-best": runs}, kinds, "", tmp_path / "p.png").axes
    expected = []
    for run in runs:
        expected.append((run.stage, run.start, run.end, False))
        if run.bubble:
            expected.append((run.stage, run.start - run.bubble, run.start, True))
    drawn = [box for box in axis.patches if box.get_fill()]
    assert len(drawn) == len(expected) and {row[-1] for row in expected} == {False, True}
    for box, (stage, start, end, is_bubble) in zip(drawn, expected, strict=True):
        assert (round(box.get_center()[1]), box.get_x()) == (stage, approx(start))
        assert box.get_x() + box.get_width() == approx(end)
        assert (to_hex(box.get_facecolor()) == BUBBLE["facecolor"]) == is_bubble
