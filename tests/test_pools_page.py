"""Two pools on the schedule page: a lane for each instance, and one for the link between them."""

import json
import re

import pytest

import bench
from config import EngineConfig
from lab.commands import explore, serve
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import Link
from lab.simulator.pools import KVLink, simulate_pools
from page.records import Recorder
from policies.pools import Pools
from tests.pages import a_load, in_turn, opened_runs

SLOW = Link(bytes_per_s=5e9, step_s=1e-3)  # some 27 ms for a prompt of 1,000 tokens


def two_pools(pools="1:1", pages=128, layers=1):
    """What was seen of two pools in little memory over a slow link, and its Recorder."""
    cost = CostModel.named("llama3-8b")
    config = EngineConfig(chunk=1024, max_batch=16, max_len=2048, page_size=64, pages=pages)
    kv_link = KVLink.of(cost, SLOW, layer_wise=layers > 1)
    recorder = Recorder()
    simulated = simulate_pools(
        cost, config, a_load(), Pools.parse(pools), kv_link, recorder=recorder
    )
    recorder.add_transfers(simulated.run.transfers)
    return simulated, recorder


def test_the_records_have_every_batch_and_transfer_in_order_of_time():
    simulated, recorder = two_pools("1:2", pages=64)
    run = simulated.run
    assert recorder.settings["instances"] == ["prefill", "decode 1", "decode 2"]
    assert sum(completion.preemptions for completion in run.completions)
    records = in_turn(recorder)
    assert len(records) == len(run.iterations)
    starts = [record["start"] for record in records]
    assert starts == sorted(starts)
    assert [i.start for i in run.iterations] != sorted(i.start for i in run.iterations)
    busy = [0.0] * 3
    for record in records:
        instance = record["micro_batch"]
        busy[instance] += record["end"] - record["start"]
        assert not (record["decodes"] if instance == 0 else record["chunks"])
    expected = [simulated.busy[instance, 0] for instance in range(3)]
    assert busy == pytest.approx(expected, abs=2e-6 * len(records))
    transfers = [record["transfer"] for record in recorder.records if "transfer" in record]
    assert len(transfers) == len(run.transfers) >= len(run.completions)
    times = {(sent.request_id, round(sent.end, 6)): sent for sent in run.transfers}
    for transfer in transfers:
        sent = times[transfer["id"], transfer["end"]]
        assert transfer["tokens"] == sent.tokens and transfer["target"] == sent.target
        assert transfer["start"] == pytest.approx(sent.start, abs=1e-6)
        assert transfer["prefilled"] == pytest.approx(sent.prefilled, abs=1e-6)


def test_a_decode_instance_gives_no_reason_for_the_queue():
    _, recorder = two_pools()
    records = in_turn(recorder)
    assert any(record["waiting"] for record in records if record["micro_batch"] == 1)
    assert not any(record["why"] for record in records if record["micro_batch"] == 1)
    assert any(record["why"] for record in records if record["micro_batch"] == 0)


def milliseconds(text):
    """What the page writes as "81.2 ms" or "1.23 s"."""
    number, unit = text.split()
    return float(number) * {"ms": 1.0, "s": 1e3}[unit]


@pytest.mark.parametrize("layers", [1, 32])
def test_lanes_say_what_is_computed_sent_and_idle(browser, tmp_path, layers):
    simulated, recorder = two_pools(pages=64, layers=layers)
    run = simulated.run
    waited = max(run.transfers, key=lambda sent: sent.waited_s)
    assert waited.waited_s > 1e-3
    records = in_turn(recorder)
    prefills = [record for record in records if record["micro_batch"] == 0]
    pairs = list(zip(prefills, prefills[1:], strict=False))
    before, after = max(pairs, key=lambda pair: pair[1]["start"] - pair[0]["end"])
    with opened_runs(browser, tmp_path, {"pools 1:1": recorder}) as tab:
        top = tab.evaluate("panes[0].band('stages')[0]")
        assert tab.evaluate("band_rows(focused.run.settings)") == ["prefill", "link", "decode"]

        assert tab.evaluate("[0, 1].map(n => row_of(focused.run.settings, n))") == [0, 2]
        sent = sorted(run.transfers, key=lambda sent: sent.start)
        assert any(transfer.start < transfer.prefilled for transfer in sent) == (layers > 1)
        link_seconds = tab.evaluate("focused.run.transfers.map(link_seconds)")
        assert link_seconds == pytest.approx([t.exposed_s for t in sent], abs=3e-6)
        # a long prefill is seen when decodes that began after it have ended
        middle = max(prefills, key=lambda record: record["end"] - record["start"])["end"] - 1e-4
        tab.evaluate(f"set_view({middle}, {middle} + 5e-5)")
        shown = tab.evaluate("iterations_in_view(focused.run).map(({start}) => start)")
        now = [r["start"] for r in records if r["start"] < middle and r["end"] > middle + 5e-5]
        assert len(now) == 2 and set(now) <= set(shown)
        tab.evaluate("set_view(-Infinity, Infinity)")

        def told(row, time):
            return tab.evaluate(f"describe(panes[0], {time}, {top + 18 * row + 5})")

        note = tab.text_content(".run p.soft")
        begin, end = tab.evaluate("[focused.run.begin, focused.run.end]")
        shares = re.search(r"Idle: prefill ([\d.]+) %, decode ([\d.]+) % of the time", note)
        for instance, share in enumerate(shares.groups()):
            idle = 1 - simulated.busy[instance, 0] / (end - begin)
            assert float(share) == pytest.approx(100 * idle, abs=0.1)
        assert end == pytest.approx(max(i.end for i in run.iterations), abs=1e-6)
        assert f"{len(run.transfers)} transfers" in note and note.startswith("Two pools: ")

        idle = told(0, (before["end"] + after["start"]) / 2)
        gap = re.match(r"Prefill is idle for ([\d.]+ m?s): ", idle)
        assert milliseconds(gap[1]) == pytest.approx(
            1e3 * (after["start"] - before["end"]), rel=5e-3
        )
        assert re.match(
            r"Prefill computes [\d,]+ tokens of prefill in ", told(0, after["start"] + 1e-4)
        )
        decode = next(record for record in records if record["decodes"])
        assert told(2, decode["start"] + 1e-4).startswith(
            f"Decode computes {len(decode['decodes'])} decode"
        )
        tab.evaluate(f"set_view({waited.start} - 0.01, {waited.start} + 0.01)")
        texts = told(1, (waited.start + waited.end) / 2)
        name = f"Request {waited.request_id}: {waited.tokens:,} tokens, "
        text = next((text for text in re.split(r"(?<=\.) ", texts) if text.startswith(name)), texts)
        said = re.fullmatch(
            rf"{name}([\d.]+ m?s) on the link, waited ([\d.]+ m?s) for memory\.", text
        )
        assert said, texts
        assert [milliseconds(part) for part in said.groups()] == pytest.approx(
            [1e3 * waited.exposed_s, 1e3 * waited.waited_s], rel=5e-3
        )
        # the second token says the same
        gap = tab.evaluate(
            "id => describe_request(focused.run, id, focused.run.lanes.get(id).gaps[0][1] - 1e-4)",
            waited.request_id,
        )
        assert f"{said[2]} for memory and {said[1]} on the link" in gap


def test_the_trace_of_two_pools_shows_transfers(browser, tmp_path):
    simulated, recorder = two_pools(pages=64)
    with opened_runs(browser, tmp_path, {"pools 1:1": recorder}) as tab:
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
    pools = explore.record_pools(load)
    replicas = explore.record_run("sarathi-serve", "256", load, 0.07)
    assert pools.settings["instances"] == ["prefill", "decode"]
    assert replicas.settings["instances"] == ["GPU 1", "GPU 2"]
    for recorder in (pools, replicas):
        assert len({record["micro_batch"] for record in in_turn(recorder)}) == 2
        requests = [record["request"]["id"] for record in recorder.records if "request" in record]
        assert sorted(requests) == list(range(60))


def test_the_page_of_serve_has_a_lane_for_each_instance(tmp_path, monkeypatch):
    recorders = {}

    def spy(title, machine, runs, **options):
        recorders.update(runs)
        return ""

    monkeypatch.setattr(serve, "page", spy)
    options = "--simulate a100-80gb --preset llama3-8b --pools 1:1 --requests 6 --qps 4"
    bench.main(f"serve {options} --policies vllm --html {tmp_path}/page.html".split())
    transfers = {
        name: sum("transfer" in record for record in recorder.records)
        for name, recorder in recorders.items()
    }
    assert transfers == {"vllm": 0, "pools 1:1": 6, "pools 1:1 chunks": 6}
    instances = {name: recorder.settings["instances"] for name, recorder in recorders.items()}
    assert instances == {
        "vllm": ["replica 1", "replica 2"],
        "pools 1:1": ["prefill", "decode"],
        "pools 1:1 chunks": ["prefill", "decode"],
    }
    for recorder in recorders.values():
        starts = [record["start"] for record in in_turn(recorder)]
        assert starts == sorted(starts)
