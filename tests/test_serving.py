"""`bench.py serve` and `capacity`: what they write, and what they refuse. No timing is asserted."""

import json

import pytest

import bench
from cli.model import ModelOptions
from lab.commands.options import CapacityOptions, ServeOptions
from lab.commands.serve_run import capacity_cells, find_sizes, latency_cells, make_workload
from lab.measure import capacity, metrics, run_loop
from lab.measure import timing as measure
from lab.measure.capacity import Trial, judge, summarize_search
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival, poisson, sample_lengths
from lab.pictures import timelines
from policies.priority import PRIORITIES

TINY = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4"
SIMULATED = "--simulate a100-80gb --preset llama3-8b"
CPU = ModelOptions(device="cpu")


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """A machine on which nothing else runs, or of the drift that is put into the list."""
    drift = [0.0]
    monkeypatch.setattr(measure.Probe, "take", lambda *_: drift[-1])
    monkeypatch.setattr(measure, "steadily", lambda function, *_, **__: (function(), drift[-1]))
    return drift


@pytest.fixture
def plots(monkeypatch):
    """What was to be drawn: {function: arguments}."""
    drawn = {}
    for name in ("plot_serving", "plot_capacity"):
        monkeypatch.setattr(timelines, name, lambda *args, name=name: drawn.update({name: args}))
    return drawn


@pytest.fixture
def report_of(tmp_path):
    """A function that runs a command: what it writes."""

    def run(words):
        argv = [word.replace("FOLDER", str(tmp_path)) for word in words.split()]
        bench.main([*argv, f"--json={tmp_path}/report.json"])
        return json.loads((tmp_path / "report.json").read_text("utf-8"))

    return run


def test_serve_writes_numbers_a_picture_and_a_page(tmp_path, report_of, plots):
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    load = "--requests 5 --qps 30 --classes low=2,normal=3 --page-size 8"
    files = "--plot FOLDER/run.png --html FOLDER/run.html"
    report = report_of(f"serve {TINY} {load} {files} --policies {','.join(names)}")
    assert report["options"]["kv_tokens"] == 64 and report["machine"]["model"] == "llama-tiny"
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    assert list(report["runs"]) == names and report["runs"]["chunked-only"]["hybrid"] == 0
    assert all(row["finished"] == 5 for row in report["runs"].values())
    page = (tmp_path / "run.html").read_text("utf-8")
    assert all(f'"name": "{name}"' in page for name in names)
    runs, _, file, slo_s = plots["plot_serving"]
    assert (file, slo_s) == (f"{tmp_path}/run.png", report["slo_s"])
    arrivals = poisson(sample_lengths("sharegpt4", 5, 64, 0), 30.0, 0)
    for run in runs.values():
        served = [(c.arrival, len(c.prompt), len(c.output)) for c in run.completions]
        assert served == [arrival[:3] for arrival in arrivals]
        assert {PRIORITIES[c.service.priority] for c in run.completions} == {"normal", "low"}


def test_capacity_writes_every_run_of_its_search(tmp_path, report_of, plots, monkeypatch):
    def search_two(at, start, ratio):
        return ratio == 1.5 and (at(8.0), at(400.0))

    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    monkeypatch.setattr(capacity, "search_capacity", search_two)
    load = "--requests 16 --slo 50 --ratio 1.5 --plot FOLDER/c.png"
    report = report_of(f"capacity {TINY} {load} --policies vllm,sarathi-serve")
    assert list(report["results"]) == ["vllm", "sarathi-serve"] and report["slo_s"] == 50
    for result in report["results"].values():
        assert [point["qps"] for point in result["points"]] == [8.0, 400.0]
        assert result["capacity_qps"] == 400 and result["bound"] == "at least"
    assert plots["plot_capacity"][1:] == (report["machine"], f"{tmp_path}/c.png", 50.0)


@pytest.mark.parametrize("more, fewest", [("", 16), (f"{SIMULATED} --pp 2 --replicas 2", 64)])
def test_a_capacity_of_requests_that_all_run_at_once_is_refused(more, fewest):
    command = f"capacity --max-len 64 --batch 4 {more} --requests"
    with pytest.raises(ValueError, match=f"^--requests {fewest - 1}: must be at least"):
        bench.main([*command.split(), str(fewest - 1)])


def test_gains_keep_the_bounds_of_capacities():
    run = judge(Run([], [], 0.0), 1.0)  # a miss, of nothing
    vllm = summarize_search([Trial(2.05, run), Trial(0.5, run)])
    assert dict(cell[:2] for cell in capacity_cells(vllm, vllm))["relative to vllm"] == 1
    assert capacity_cells(vllm, None)[1][1] is None
    head, value, spec = capacity_cells(vllm, None)[0]
    assert f"{head} {value:{spec}}" == "capacity in requests/s below 0.50"
    assert dict(cell[:2] for cell in latency_cells(run))["TTFT P50"] is None


def test_an_interrupt_keeps_what_there_is(report_of, tmp_path, monkeypatch, plots):
    steps = []
    step = run_loop.LoadRun.step

    def interrupted(load):
        steps.append(load)
        if len({id(load) for load in steps}) == 2 and steps.count(load) == 9:
            raise KeyboardInterrupt
        return step(load)

    monkeypatch.setattr(run_loop.LoadRun, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load = "--requests 4 --qps 40 --slo 50 --plot FOLDER/i.png"
        report_of(f"serve {TINY} {load} --policies vllm,orca,sarathi-serve")
    runs = json.loads((tmp_path / "report.json").read_text("utf-8"))["runs"]
    assert list(runs) == ["vllm"] == list(plots["plot_serving"][0])


def test_a_busy_machine_is_marked(report_of, steady, capsys):
    steady.append(0.5)
    report = report_of(f"serve {TINY} --requests 4 --policies vllm")
    assert report["slo_busy"] and report["runs"]["vllm"]["busy"]
    assert capsys.readouterr().out.count("| vllm (busy) ") == 2


def load_of(**options):
    """The arrivals of these options at a rate."""
    options = ServeOptions(**options)
    return make_workload(options, find_sizes(options, CPU, (48, 500)), 0)[0]


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path):
    rows = "5,50,10\n9,20,4\n10,900,10\n13,30,2\n"
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows, "utf-8")
    at_rate = load_of(trace=file, max_len=64)
    assert at_rate(None) == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)]
    assert [arrival.time for arrival in at_rate(2.0)] == [0, 0.5, 1.0]


def test_a_long_prompt_comes_before_all_others_which_may_share_prefixes():
    load = load_of(lengths="50+7, 4+5", requests=3, long_prompt=900, shared_prefix="10:2")
    assert [arrival[1:3] for arrival in load(1.0)] == [(910, 16), (60, 7), (14, 5), (14, 5)]


def test_classes_are_drawn_in_their_shares_and_the_same_at_every_rate():
    load = load_of(requests=4000, classes="realtime=1, low=5,normal=4")
    names = [arrival.priority for arrival in load(1.0)]
    assert names == [arrival.priority for arrival in load(7.0)]
    for name, share in {"realtime": 0.1, "low": 0.5, "normal": 0.4}.items():
        assert names.count(name) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "device, sizes",
    [("cpu", (48, 1024, 128, 32, [64], 10240)), ("cuda", (500, 8192, 512, 128, [256], 42 * 8192))],
)
def test_the_default_memory_is_a_third_of_the_batch_in_small_pages(device, sizes):
    found = find_sizes(ServeOptions(), ModelOptions(device=device), (48, 500))
    assert (found.requests, found.max_len, found.chunk, found.batch) == sizes[:4]
    assert (found.page_size, found.kv_tokens) == sizes[4:]
    assert found.prefix_caching == [False]


def test_sizes_that_are_given_are_kept_and_checked():
    options = ServeOptions(page_size="16,max,512", max_len=512, shared_prefix="20:2")
    sizes = find_sizes(options, CPU, (48, 500))
    assert sizes.page_size == [16, 512] and sizes.prefix_caching == [False, True]
    for wrong in ({"kv_tokens": 63, "max_len": 64}, {"pools": "1:1"}, {"replicas": 2}):
        with pytest.raises(ValueError, match="^--"):
            find_sizes(CapacityOptions(**wrong), CPU, (48, 500))


def test_a_simulated_run_has_the_numbers_that_it_had(report_of):
    load = "--requests 60 --qps 20 --lengths 88+20 --max-len 4096 --shared-prefix 512:4"
    report = report_of(f"serve {SIMULATED} {load} --policies vllm,sarathi-serve")
    numbers = {
        name: (row["p99_tbt_s"], row["tokens_per_s"]) for name, row in report["runs"].items()
    }
    assert numbers == NUMBERS
    assert report["runs"]["vllm, shared"]["cached_tokens"] > 0


NUMBERS = {  # P99 TBT, tokens/s
    "vllm": (0.9495054333532614, 11973.307661288854),
    "vllm, shared": (0.03924338509240581, 12653.805377698953),
    "sarathi-serve": (0.03827771556822546, 11984.162819457208),
    "sarathi-serve, shared": (0.020001838342058598, 12649.104305161833),
}
