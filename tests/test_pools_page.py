"""Two pools on the schedule page, held against the simulated batches and transfers."""

import json

import pytest

from config import EngineConfig
from lab.commands import explore
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import Link
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.two_pools import Pools
from page.records import Recorder
from tests.pages import a_load, in_turn

SLOW = Link(bytes_per_s=5e9, step_s=1e-3)  # some 27 ms for a prompt of 1,000 tokens
SIZES = EngineConfig(chunk=1024, max_batch=16, max_len=2048, page_size=64, pages=64)


def two_pools(pools="1:1", layer_wise=False):
    """What was seen of two pools in little memory over a slow link, and its Recorder."""
    cost = CostModel.named("llama3-8b")
    kv_link = KVLink.of(cost, SLOW)
    if not layer_wise:
        kv_link = kv_link._replace(layers=1)
    recorder = Recorder()
    load = a_load()
    simulated = simulate_pools(cost, SIZES, load, Pools.parse(pools), kv_link, recorder=recorder)
    recorder.add_transfers(simulated.run.transfers)
    return simulated, recorder


def in_order(transfers):
    """The transfers in the order in which they began."""
    return sorted(transfers, key=lambda sent: sent.start)


def test_the_records_have_every_batch_and_transfer_in_order_of_time():
    simulated, recorder = two_pools("1:2")
    run = simulated.run
    records = in_turn(recorder)
    starts = [record["start"] for record in records]
    assert len(records) == len(run.iterations)
    assert starts == sorted(starts)
    for instance in range(3):
        own = [record for record in records if record["micro_batch"] == instance]
        busy_s = sum(record["end"] - record["start"] for record in own)
        assert busy_s == pytest.approx(simulated.busy[instance, 0], abs=2e-6 * len(own))
        assert not any(record["chunks" if instance else "decodes"] for record in own)
    transfers = [record["transfer"] for record in recorder.records if "transfer" in record]
    for record, sent in zip(transfers, in_order(run.transfers), strict=True):
        assert record["id"] == sent.request_id
        assert record["tokens"] == sent.tokens
        assert record["start"] == pytest.approx(sent.start, abs=1e-6)
        assert record["end"] == pytest.approx(sent.end, abs=1e-6)


@pytest.mark.parametrize("layer_wise", [False, True])
def test_lanes_have_what_is_computed_and_sent(show, layer_wise):
    simulated, recorder = two_pools(layer_wise=layer_wise)
    sent = in_order(simulated.run.transfers)
    tab = show({"pools 1:1": recorder})
    assert tab.evaluate("band_rows(focused.run.settings)") == ["prefill", "link", "decode"]
    assert any(transfer.start < transfer.prefilled for transfer in sent) == layer_wise
    link_seconds = tab.evaluate("focused.run.transfers.map(link_seconds)")
    assert link_seconds == pytest.approx([each.exposed_s for each in sent], abs=3e-6)
    end = tab.evaluate("focused.run.end")
    assert end == pytest.approx(max(each.end for each in simulated.run.iterations), abs=1e-6)
    # a long prefill is seen when decodes that began after it have ended
    prefills = [record for record in in_turn(recorder) if record["micro_batch"] == 0]
    longest = max(prefills, key=lambda record: record["end"] - record["start"])
    middle = longest["end"] - 1e-4
    tab.evaluate(f"set_view({middle}, {middle} + 5e-5)")
    shown = tab.evaluate("iterations_in_view(focused.run).map(({start}) => start)")
    assert longest["start"] in shown


def test_the_trace_of_two_pools_has_the_transfers(show):
    simulated, recorder = two_pools()
    tab = show({"pools 1:1": recorder})
    events = json.loads(tab.evaluate("trace(panes.map(pane => pane.run))"))["traceEvents"]
    on_link = [event for event in events if event["name"].endswith(" on the link")]
    ends = sorted(event["ts"] + event["dur"] for event in on_link)
    assert ends == sorted(round(1e6 * sent.end) for sent in simulated.run.transfers)
    tokens = sum(event["args"]["tokens"] for event in on_link)
    assert tokens == sum(sent.tokens for sent in simulated.run.transfers)


def test_the_preset_has_two_gpus_for_every_policy():
    load = explore.make_loads(CostModel.named(explore.MODEL), 60)[explore.TWO_GPUS]
    pools = explore.record_pools(load)
    replicas = explore.record_run("sarathi-serve", "256", load, 0.07)
    assert pools.settings["instances"] == ["prefill", "decode"]
    assert replicas.settings["instances"] == ["GPU 1", "GPU 2"]
    for recorder in (pools, replicas):
        assert {record["micro_batch"] for record in in_turn(recorder)} == {0, 1}
        requests = [record["request"]["id"] for record in recorder.records if "request" in record]
        assert sorted(requests) == list(range(60))
