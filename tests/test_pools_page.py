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
SIZES = EngineConfig(
    chunk=1024,
    max_batch=16,
    max_len=2048,
    page_size=64,
    pages=64,
)


def two_pools(pools="1:1", layer_wise=False):
    """What was seen of two pools in little memory over a slow link, and its Recorder."""
    cost = CostModel.named("llama3-8b")
    kv_link = KVLink.of(cost, SLOW)
    if not layer_wise:
        kv_link = kv_link._replace(layers=1)
    recorder = Recorder()
    simulated = simulate_pools(
        cost,
        SIZES,
        a_load(),
        Pools.parse(pools),
        kv_link,
        recorder=recorder,
    )
    recorder.add_transfers(simulated.run.transfers)
    return simulated, recorder


def in_order(run):
    """The transfers in the order in which they began."""
    return sorted(run.transfers, key=lambda sent: sent.start)


def test_the_records_have_every_batch_and_transfer_in_order_of_time():
    simulated, recorder = two_pools("1:2")
    run = simulated.run
    records = in_turn(recorder)
    starts = [record["start"] for record in records]
    assert len(records) == len(run.iterations)
    assert starts == sorted(starts)
    busy_s = [0.0, 0.0, 0.0]
    for record in records:
        instance = record["micro_batch"]
        busy_s[instance] += record["end"] - record["start"]
        assert not record["chunks" if instance else "decodes"]
    expected = [simulated.busy[instance, 0] for instance in range(3)]
    assert busy_s == pytest.approx(expected, abs=2e-6 * len(records))
    transfers = [record["transfer"] for record in recorder.records if "transfer" in record]
    for record, sent in zip(transfers, in_order(run), strict=True):
        assert record.pop("id") == sent.request_id
        for field, value in record.items():
            assert value == pytest.approx(getattr(sent, field), abs=1e-6)


@pytest.mark.parametrize("layer_wise", [False, True])
def test_lanes_have_what_is_computed_and_sent(show, layer_wise):
    simulated, recorder = two_pools(layer_wise=layer_wise)
    sent = in_order(simulated.run)
    tab = show({"pools 1:1": recorder})
    assert tab.evaluate("band_rows(focused.run.settings)") == ["prefill", "link", "decode"]
    assert any(transfer.start < transfer.prefilled for transfer in sent) == layer_wise
    link_seconds = tab.evaluate("focused.run.transfers.map(link_seconds)")
    assert link_seconds == pytest.approx([each.exposed_s for each in sent], abs=3e-6)
    end = tab.evaluate("focused.run.end")
    records = in_turn(recorder)
    assert end == max(record["end"] for record in records)
    # a long prefill is seen when decodes that began after it have ended
    prefills = [record for record in records if record["micro_batch"] == 0]
    longest = max(prefills, key=lambda record: record["end"] - record["start"])
    middle = longest["end"] - 1e-4
    tab.evaluate(f"set_view({middle}, {middle} + 5e-5)")
    shown = tab.evaluate("iterations_in_view(focused.run).map(({start}) => start)")
    assert longest["start"] in shown
    events = json.loads(tab.evaluate("trace([focused.run])"))["traceEvents"]
    on_link = [event for event in events if event["name"].endswith(" on the link")]
    ends = {event["ts"] + event["dur"] for event in on_link}
    assert ends == {round(1e6 * transfer.end) for transfer in sent}


def test_the_preset_has_two_gpus_for_every_policy():
    cost = CostModel.named(explore.MODEL)
    load = explore.make_loads(cost, 60)[explore.TWO_GPUS]
    pools = explore.record_pools(load)
    replicas = explore.record_run("sarathi-serve", "256", load, 0.07)
    assert pools.settings["instances"] == ["prefill", "decode"]
    assert replicas.settings["instances"] == ["GPU 1", "GPU 2"]
    for recorder in (pools, replicas):
        assert {record["micro_batch"] for record in in_turn(recorder)} == {0, 1}
        assert sum("request" in record for record in recorder.records) == 60
