"""`bench.py serve` and `capacity`: what they write adds up. No timing is asserted."""

import json

import pytest

import bench
from cli.model import ModelOptions
from lab.commands import load
from lab.commands.options import CapacityOptions, ServeOptions
from lab.measure import timing
from lab.measure.workload import Arrival, sample_lengths
from lab.simulator.machine import SimulatedMachine

TINY = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4"
SIMULATED = "--simulate a100-80gb --preset llama3-8b"
CPU = ModelOptions(device="cpu")


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda *_: 0.0)


@pytest.fixture
def report_of(tmp_path):
    """A function that runs a command: what it writes."""

    def run(words):
        argv = [word.replace("FOLDER", str(tmp_path)) for word in words.split()]
        bench.main([*argv, f"--json={tmp_path}/report.json"])
        return json.loads((tmp_path / "report.json").read_text("utf-8"))

    return run


def test_serve_writes_numbers_that_add_up_a_picture_and_a_page(tmp_path, report_of):
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    files = "--plot FOLDER/run.png --html FOLDER/run.html"
    command = f"serve {TINY} --requests 5 --qps 30 --page-size 8 {files} --policies"
    report = report_of(f"{command} {','.join(names)}")
    assert report["options"]["kv_tokens"] == 64 and report["machine"]["model"] == "llama-tiny"
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    assert list(report["runs"]) == names
    assert report["runs"]["chunked-only"]["hybrid"] == 0
    tokens = sum(map(sum, sample_lengths("sharegpt4", 5, 64, 0)))
    for row in report["runs"].values():
        assert row["finished"] == row["requests"] == 5
        computed = row["tokens_per_iteration"] * row["iterations"] - row["recomputed_tokens"]
        assert computed == pytest.approx(tokens - 5)  # the last of an output is not computed
        assert row["prefill_only"] + row["hybrid"] + row["decode_only"] == pytest.approx(1)
    page = (tmp_path / "run.html").read_text("utf-8")
    assert all(f'"name": "{name}"' in page for name in names)
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_a_capacity_is_the_highest_rate_that_was_met(report_of):
    sizes = "--requests 16 --batch 4 --max-len 512 --slo 0.05 --policies vllm"
    result = report_of(f"capacity {SIMULATED} {sizes}")["results"]["vllm"]
    met = {point["met"]: [] for point in result["points"]}
    for point in result["points"]:
        assert point["met"] == (point["p99_tbt_s"] <= 0.05 and not point["missed"])
        met[point["met"]].append(point["qps"])
    assert result["capacity_qps"] == max(met[True]) and result["bound"] == ""
    assert met[False].count(min(met[False])) == 2
    assert 1 < min(met[False]) / max(met[True]) <= 1.05


def test_an_interrupt_keeps_the_runs_that_are_finished(report_of, tmp_path, monkeypatch):
    serve = SimulatedMachine.serve

    def interrupted(machine, config, *args, **settings):
        if config.policy == "orca":
            raise KeyboardInterrupt
        return serve(machine, config, *args, **settings)

    monkeypatch.setattr(SimulatedMachine, "serve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report_of(f"serve {SIMULATED} --requests 4 --policies vllm,orca,sarathi-serve")
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert list(report["runs"]) == ["vllm"]


def arrivals_of(qps=None, **options):
    """The arrivals of these options at a rate."""
    options = ServeOptions(**options)
    return load.arrivals_of(options, load.find_sizes(options, CPU), 0, qps)


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path):
    rows = "5,50,10\n9,20,4\n10,900,10\n13,30,2\n"
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows, "utf-8")
    own_rate = arrivals_of(trace=file, max_len=64)
    assert own_rate == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)]
    times = [arrival.time for arrival in arrivals_of(2.0, trace=file, max_len=64)]
    assert times == [0, 0.5, 1.0]


def test_a_long_prompt_comes_before_all_others_which_may_share_prefixes():
    arrivals = arrivals_of(
        lengths="50+7, 4+5",
        requests=3,
        long_prompt=900,
        shared_prefix="10:2",
    )
    assert [arrival[1:3] for arrival in arrivals] == [(910, 16), (60, 7), (14, 5), (14, 5)]


def test_classes_are_drawn_in_their_shares_and_the_same_at_every_rate():
    options = {"requests": 4000, "classes": "realtime=1, low=5,normal=4"}
    names = [arrival.priority for arrival in arrivals_of(**options)]
    assert names == [arrival.priority for arrival in arrivals_of(7.0, **options)]
    for name, share in {"realtime": 0.1, "low": 0.5, "normal": 0.4}.items():
        assert names.count(name) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "device, page_size, kv_tokens", [("cpu", 64, 10240), ("cuda", 256, 344064)]
)
def test_the_default_memory_is_a_third_of_the_batch_in_small_pages(device, page_size, kv_tokens):
    sizes = load.find_sizes(ServeOptions(), ModelOptions(device=device))
    assert sizes.page_size == [page_size]
    assert sizes.kv_tokens == kv_tokens == sizes.batch // 3 * sizes.max_len
    assert sizes.prefix_caching == [False]


def test_sizes_that_are_given_are_kept_and_checked():
    options = ServeOptions(page_size="16,max,512", max_len=512, shared_prefix="20:2")
    sizes = load.find_sizes(options, CPU)
    assert sizes.page_size == [16, 512] and sizes.prefix_caching == [False, True]
    for wrong in ({"kv_tokens": 63, "max_len": 64}, {"pools": "1:1"}, {"replicas": 2}):
        with pytest.raises(ValueError, match="^--"):
            load.find_sizes(CapacityOptions(**wrong), CPU)


@pytest.mark.parametrize("more, fewest", [("", 16), (f"{SIMULATED} --pp 2 --replicas 2", 64)])
def test_a_capacity_of_requests_that_all_run_at_once_is_refused(more, fewest):
    command = f"capacity --max-len 64 --batch 4 {more} --requests {fewest - 1}"
    with pytest.raises(ValueError, match=f"^--requests {fewest - 1}: must be at least {fewest}"):
        bench.main(command.split())
