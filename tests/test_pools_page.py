"""Two pools on the schedule page: a lane for each instance, and one for the link between them."""

import json
import re
from itertools import pairwise

import pytest

import bench
from config import EngineConfig
from lab.commands import explore, serve_run
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import Link
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.two_pools import Pools
from page.records import Recorder
from tests.pages import a_load, in_turn, seconds

SLOW = Link(bytes_per_s=5e9, step_s=1e-3)  # some 27 ms for a prompt of 1,000 tokens


def two_pools(pools="1:1", layer_wise=False):
    """What was seen of two pools in little memory over a slow link, and its Recorder."""
    cost = CostModel.named("llama3-8b")
    config = EngineConfig(chunk=1024, max_batch=16, max_len=2048, page_size=64, pages=64)
    kv_link = KVLink.of(cost, SLOW)
    if not layer_wise:
        kv_link = kv_link._replace(layers=1)
    recorder = Recorder()
    simulated = simulate_pools(
        cost, config, a_load(), Pools.parse(pools), kv_link, recorder=recorder
    )
    recorder.add_transfers(simulated.run.transfers)
    return simulated, recorder


def test_the_records_have_every_batch_and_transfer_in_order_of_time():
    simulated, recorder = two_pools("1:2")
    run = simulated.run
    assert recorder.settings["instances"] == ["prefill", "decode 1", "decode 2"]
    assert sum(completion.preemptions for completion in run.completions)
    records = in_turn(recorder)
    assert len(records) == len(run.iterations)
    starts = [record["start"] for record in records]
    assert starts == sorted(starts) != [iteration.start for iteration in run.iterations]
    for instance in range(3):
        own = [record for record in records if record["micro_batch"] == instance]
        busy = sum(record["end"] - record["start"] for record in own)
        assert busy == pytest.approx(simulated.busy[instance, 0], abs=2e-6 * len(own))
        assert not any(record["chunks" if instance else "decodes"] for record in own)
        assert any(record["waiting"] for record in own)
        assert any(record["why"] for record in own) == (instance == 0)  # decodes have no queue
    transfers = [record["transfer"] for record in recorder.records if "transfer" in record]
    for record, sent in zip(transfers, in_order(run.transfers), strict=True):
        names = "source target tokens prefilled start end".split()
        expected = {"id": sent.request_id} | {name: getattr(sent, name) for name in names}
        assert record == pytest.approx(expected, abs=1e-6)


def in_order(transfers):
    """The transfers in the order in which they began."""
    return sorted(transfers, key=lambda sent: sent.start)


@pytest.mark.parametrize("layer_wise", [False, True])
def test_lanes_say_what_is_computed_sent_and_idle(show, layer_wise):
    simulated, recorder = two_pools(layer_wise=layer_wise)
    run = simulated.run
    records = in_turn(recorder)
    prefills = [record for record in records if record["micro_batch"] == 0]
    tab = show({"pools 1:1": recorder})
    assert tab.evaluate("band_rows(focused.run.settings)") == ["prefill", "link", "decode"]
    assert tab.evaluate("[0, 1].map(n => row_of(focused.run.settings, n))") == [0, 2]
    sent = in_order(run.transfers)
    assert any(transfer.start < transfer.prefilled for transfer in sent) == layer_wise
    link_seconds = tab.evaluate("focused.run.transfers.map(link_seconds)")
    assert link_seconds == pytest.approx([t.exposed_s for t in sent], abs=3e-6)
    # a long prefill is seen when decodes that began after it have ended
    longest = max(prefills, key=lambda record: record["end"] - record["start"])
    middle = longest["end"] - 1e-4
    tab.evaluate(f"set_view({middle}, {middle} + 5e-5)")
    shown = tab.evaluate("iterations_in_view(focused.run).map(({start}) => start)")
    assert longest["start"] in shown
    assert len(shown) > 1

    note = tab.text_content(".run p.soft")
    assert note.startswith("Two pools: ")
    assert f"{len(run.transfers)} transfers" in note
    begin, end = tab.evaluate("[focused.run.begin, focused.run.end]")
    assert end == pytest.approx(max(i.end for i in run.iterations), abs=1e-6)
    shares = re.search(r"Idle: prefill ([\d.]+) %, decode ([\d.]+) % of the time", note)
    for instance, share in enumerate(shares.groups()):
        idle = 1 - simulated.busy[instance, 0] / (end - begin)
        assert float(share) == pytest.approx(100 * idle, abs=0.1)

    def described(lane, time, pattern):
        """What is said of a lane: the seconds in the groups of a pattern."""
        y = f"panes[0].band('stages')[0] + 18 * {lane} + 5"
        text = tab.evaluate(f"describe(panes[0], {time}, {y})")
        match = re.search(pattern, text)
        assert match, text
        return list(map(seconds, match.groups()))

    before, after = max(pairwise(prefills), key=lambda pair: pair[1]["start"] - pair[0]["end"])
    idle = after["start"] - before["end"]
    idle_text = r"^Prefill is idle for ([\d.]+ m?s): "
    assert described(0, before["end"] + idle / 2, idle_text) == pytest.approx([idle], rel=5e-3)
    described(0, after["start"] + 1e-4, r"^Prefill computes [\d,]+ tokens of prefill in ")
    decode = next(record for record in records if record["decodes"])
    described(2, decode["start"] + 1e-4, f"^Decode computes {len(decode['decodes'])} decode")

    waited = max(run.transfers, key=lambda sent: sent.waited_s)
    assert waited.waited_s > 1e-3
    times = pytest.approx([waited.exposed_s, waited.waited_s], rel=5e-3)
    tab.evaluate(f"set_view({waited.start} - 0.01, {waited.start} + 0.01)")
    name = f"Request {waited.request_id}: {waited.tokens:,} tokens, "
    said = r"([\d.]+ m?s) on the link, waited ([\d.]+ m?s) for memory\."
    assert described(1, (waited.start + waited.end) / 2, name + said) == times
    gap = tab.evaluate(  # the second token says the same
        "id => describe_request(focused.run, id, focused.run.lanes.get(id).gaps[0][1] - 1e-4)",
        waited.request_id,
    )
    patterns = r"([\d.]+ m?s) on the link", r"(\S+ m?s) for memory"
    assert [seconds(re.search(pattern, gap)[1]) for pattern in patterns] == times


def test_the_trace_of_two_pools_shows_transfers(show):
    simulated, recorder = two_pools()
    tab = show({"pools 1:1": recorder})
    events = json.loads(tab.evaluate("trace(panes.map(pane => pane.run))"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names[:2] == ["prefill", "decode"]
    sent = {
        (event["tid"] - 1, event["ts"] + event["dur"], event["args"]["tokens"])
        for event in events
        if event["name"].endswith(" on the link")
    }
    assert sent == {
        (transfer.request_id, round(1e6 * transfer.end), transfer.tokens)
        for transfer in simulated.run.transfers
    }
    assert not any(event["name"].startswith("stall") for event in events)


def test_the_preset_has_two_gpus_for_every_policy():
    load = explore.make_loads(CostModel.named(explore.MODEL), 60)[explore.TWO_GPUS]
    runs = {
        ("prefill", "decode"): explore.record_pools(load),
        ("GPU 1", "GPU 2"): explore.record_run("sarathi-serve", "256", load, 0.07),
    }
    for names, recorder in runs.items():
        assert recorder.settings["instances"] == list(names)
        assert {record["micro_batch"] for record in in_turn(recorder)} == {0, 1}
        requests = [record["request"]["id"] for record in recorder.records if "request" in record]
        assert sorted(requests) == list(range(60))


def test_the_page_of_serve_has_a_lane_for_each_instance(tmp_path, monkeypatch):
    recorders = {}

    def spy(title, machine, runs, **options):
        recorders.update(runs)
        return ""

    monkeypatch.setattr(serve_run, "page", spy)
    machine = "--simulate a100-80gb --preset llama3-8b --pools 1:1"
    load = "--requests 6 --qps 4 --policies vllm"
    bench.main(["serve", *machine.split(), *load.split(), f"--html={tmp_path}/page.html"])
    seen = {}
    for name, recorder in recorders.items():
        transfers = sum("transfer" in record for record in recorder.records)
        seen[name] = transfers, recorder.settings["instances"]
        starts = [record["start"] for record in in_turn(recorder)]
        assert starts == sorted(starts)
    assert seen == {
        "vllm": (0, ["replica 1", "replica 2"]),
        "pools 1:1": (6, ["prefill", "decode"]),
    }
