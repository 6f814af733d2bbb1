"""Two pools on a clock that counts: times of the link by hand, limits, and `serve`.

Times of the LAW are sums of binary fractions: no sum is rounded, and == may be asked."""

import json
from dataclasses import replace

import pytest

import bench
from config import EngineConfig
from lab.measure.metrics import find_stalls
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS, Link
from lab.simulator.pools import KVLink, Ports, simulate_pools
from lab.simulator.simulation import simulate
from lab.simulator.two_pools import Pools
from tests.test_simulation import Law

LINK = Link(bytes_per_s=1024, step_s=0.25)
CONFIG = EngineConfig(
    "sarathi-serve",
    chunk=64,
    max_batch=8,
    max_len=128,
    page_size=4,
    pages=256,
)
# a second for each 8 tokens, and at least one second
LAW = Law(lambda batch: max(1.0, sum(length for _, _, length in batch) / 8))


def serve_pools(arrivals, kv_link, pools="1:1", config=CONFIG):
    """The Run of some requests by two pools with the LAW."""
    return simulate_pools(LAW, config, arrivals, Pools.parse(pools), kv_link).run


@pytest.mark.parametrize(
    "layers, token_bytes, end",
    [
        # 64 tokens of prefill take 8 s; at the end 64 * 16 bytes take 0.25 + 1 s
        (1, 16, 9.25),
        # a layer takes 0.25 + 0.25 s, the first is there at 2 s: only the last one is exposed
        (4, 16, 8.5),
        # a layer takes 0.25 + 4 s: the link is slower than the prefill, 2 + 4 * 4.25
        (4, 256, 19.0),
    ],
)
def test_the_end_of_a_transfer_is_as_computed_by_hand(layers, token_bytes, end):
    run = serve_pools([Arrival(0.0, 64, 3)], KVLink(LINK, token_bytes, layers))
    (sent,) = run.transfers
    assert (sent.prefilled, sent.end, sent.tokens) == (8.0, end, 64)
    assert (sent.waited_s, sent.exposed_s) == (0.0, end - 8.0)
    (request,) = run.completions
    assert request.token_times == [8.0, end + 1.0, end + 2.0]


@pytest.mark.parametrize(
    "prompt, pools, kv_link, ends",
    [
        # two prompts in a batch of 8 s; a layer of one takes 0.25 + 0.25 s
        (32, "1:1", KVLink(LINK, 32, 4), [8.5, 9.0]),
        # two senders share the port of a receiver, or each has its own
        (64, "2:1", KVLink(LINK, 16), [9.25, 10.5]),
        (64, "2:2", KVLink(LINK, 16), [9.25, 9.25]),
    ],
)
def test_transfers_wait_for_each_other_at_a_port(prompt, pools, kv_link, ends):
    run = serve_pools([Arrival(0.0, prompt, 2)] * 2, kv_link, pools)
    assert [sent.end for sent in run.transfers] == ends


def test_a_port_is_not_held_while_it_waits_for_the_next_layer():
    ports = Ports()
    slow = ports.send(
        0,
        2,
        first=1.0,
        last=100.0,
        layers=100,
        layer_s=0.25,
    )
    fast = ports.send(
        1,
        2,
        first=30.0,
        last=30.0,
        layers=1,
        layer_s=1.0,
    )
    assert (slow, fast) == (100.25, 31.0)


def test_the_bytes_on_a_link_are_those_of_the_cache():
    cost = CostModel.named("llama2-70b", tp=4)
    token_bytes = 2 * 2 * 80 * 8 * 128  # K and V of 16 bits, 80 layers, 8 heads
    assert KVLink.of(cost, LINKS["infiniband"]) == (LINKS["infiniband"], token_bytes / 4, 80)
    shared = KVLink.of(cost, LINKS["ethernet"])  # by the GPUs of a node
    assert shared.token_bytes == token_bytes


def test_a_request_is_sent_again_after_a_preemption():
    config = replace(CONFIG, pages=32, chunk=128)
    run = serve_pools([Arrival(0.0, 50, 60)] * 2, KVLink(LINK, 1), config=config)
    assert [request.preemptions for request in run.completions] == [0, 1]  # the newest
    assert [len(request.token_times) for request in run.completions] == [60, 60]
    assert [sent.request_id for sent in run.transfers] == [0, 1, 1]
    # between its first token, or that of a later prefill, and the end of its transfer none decodes
    for sent in run.transfers:
        for iteration in run.iterations:
            if sent.prefilled < iteration.start < sent.end:
                assert sent.request_id not in [chunk.request_id for chunk in iteration.chunks]


def test_a_decode_does_not_stall_for_prefills_on_another_instance():
    arrivals = [Arrival(0.0, 8, 20), Arrival(4.0, 64, 2), Arrival(6.0, 64, 2)]
    run = serve_pools(arrivals, KVLink(LINK, 1))
    assert find_stalls(run.completions, run.iterations) == []
    together = simulate(LAW, CONFIG, arrivals).run
    assert find_stalls(together.completions, together.iterations) != []


def test_serve_compares_two_pools_with_as_many_replicas(tmp_path):
    file = tmp_path / "serve.json"
    load = "--simulate a100-80gb --preset llama3-8b --max-len 1024 --requests 12 --qps 20"
    policies = "--policies sarathi-serve --pools 1:2"
    bench.main(["serve", *load.split(), *policies.split(), "--json", str(file)])
    report = json.loads(file.read_text("utf-8"))
    assert report["options"]["replicas"] == 3
    assert list(report["runs"]) == ["sarathi-serve", "pools 1:2", "pools 1:2 chunks"]
    assert all(run["finished"] == 12 for run in report["runs"].values())
