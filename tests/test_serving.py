"""`bench.py serve` and `capacity`: what they print, write and refuse. No timing is asserted."""

import csv
import json
from dataclasses import replace

import pytest

import bench
from cli.options import plain
from lab.commands import serve as serving
from lab.commands import serve_options
from lab.commands.serve import RealMachine, make_workload
from lab.commands.serve_report import conclude, print_capacities, search_json
from lab.measure import capacity, load_run, machine, metrics, run_loop
from lab.measure import timing as measure
from lab.measure.capacity import Base, Trial, judge, summarize_search
from lab.measure.machine_info import RealMachineInfo
from lab.measure.run_loop import Run
from lab.measure.timing import TOO_BUSY
from lab.measure.workload import Arrival, poisson, sample_lengths
from lab.pictures import timelines
from scheduler import Request
from tests.helpers import VirtualRun

TINY = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4"
TINY = f"{TINY} --page-size 8".split()
MACHINE = RealMachineInfo(
    device="-",
    threads=1,
    torch="-",
    model="-",
    parameters=1,
    dtype="-",
    compiled=False,
    flops_per_s=1.0,
    bytes_per_s=1.0,
    ridge_tokens=1.0,
    busy=False,
)


def parse(command, *words):
    """The options of `command`, checked, on a CPU."""
    return bench.parse_args([command, "--device", "cpu", *words])[1]


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """A machine on which nothing else runs, or of the drift that is put into the list."""
    drift = [0.0]
    monkeypatch.setattr(measure.Probe, "take", lambda *_: drift[-1])
    monkeypatch.setattr(measure, "steadily", lambda function, *_, **__: (function(), drift[-1]))
    return drift


def test_static_batching_leaves_slots_empty():
    """B-1: requests of 128 + 500, 64 + 50, 256 + 200 and 32 + 30 tokens in a batch up to its end.

    The first iteration prefills all and yields their first tokens, so a request of n output tokens
    runs n iterations: 4, 3, 2 and 1 slots are used until iteration 30, 50, 200 and 500, which is
    100, 75, 50 and 25 %. The post says "50 % on average". Weighted by their iterations it is
    (4 * 30 + 3 * 20 + 2 * 150 + 1 * 300) / (4 * 500) = 39 %, and the plain mean is 62.5 %.
    """
    lengths = [(128, 500), (64, 50), (256, 200), (32, 30)]
    requests = [Request(i, [0] * prompt, prompt, n) for i, (prompt, n) in enumerate(lengths)]
    sizes = dict(max_batch=4, max_len=700, pages=4, page_size=700)
    log = VirtualRun("request-level", lambda shape: 1.0, **sizes).run(requests).log
    used = [len(chunks) / 4 for *_, chunks in log]
    assert used == [1.0] * 30 + [0.75] * (50 - 30) + [0.5] * (200 - 50) + [0.25] * (500 - 200)
    assert sum(used) / len(used) == pytest.approx(0.39)


@pytest.fixture
def plots(monkeypatch):
    """What was to be drawn."""
    drawn = []

    def recorder(name):
        def draw(*args, **options):
            drawn.append((name, args, options))

        return draw

    for name in ("plot_serving", "plot_capacity"):
        monkeypatch.setattr(timelines, name, recorder(name))
    return drawn


def test_serve_prints_and_writes_everything(tmp_path, capsys, plots):
    files = {option: tmp_path / option for option in ("csv", "json", "plot", "html")}
    files["plot"] = tmp_path / "run.png"
    to_files = [f"--{option}={file}" for option, file in files.items()]
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    load = f"--requests 5 --qps 30 --classes low=2,normal=3 --policies {','.join(names)}"
    bench.main(["serve", *TINY, *load.split(), *to_files])
    text = capsys.readouterr().out
    report = json.loads(files["json"].read_text())
    heading = "llama-tiny|batch 32, context 32|64 tokens of KV cache|30 a second|strict, 5 of these"
    assert all(part in text for part in heading.split("|"))
    assert report["options"]["seed"] == 0 and report["machine"]["model"] == "llama-tiny"
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    with open(files["csv"]) as file:
        rows = list(csv.DictReader(file))
    keys = ("request_id", "arrival", "prompt_tokens", "output_tokens")
    arrivals = list(enumerate(poisson(sample_lengths("sharegpt4", 5, 64, 0), 30.0, 0)))
    expected = [(name, i, *arrival[:3]) for name in names for i, arrival in arrivals]
    assert [(row["policy"], *(float(row[key]) for key in keys)) for row in rows] == expected
    assert {row["class"] for row in rows} == {"normal", "low"}
    assert list(report["runs"]) == names
    for name, row in report["runs"].items():
        assert row["finished"] == 5 and 0 < row["own_fraction"] < 1
        assert text.count(f"| {name} ") == 2 and f" {row['tokens_per_s']:,.0f} " in text
        assert (
            text.count(f"\n{name}: 30.000 requests/s, P50 TTFT {row['ttft_s']['p50']:.3f} s") == 1
        )
    wrote = [f"wrote {files[option]}" for option in ("json", "csv", "plot")]
    wrote.append(f"wrote {files['html']}, open {files['html'].as_uri()}")
    assert text.splitlines()[-4:] == wrote
    assert report["conclusion"] in text
    assert report["runs"]["chunked-only"]["hybrid"] == 0
    assert all(f'"name": "{name}"' in files["html"].read_text() for name in names)
    ((name, (runs, machine, file, slo_s), more),) = plots
    assert name == "plot_serving" and slo_s == report["slo_s"] and not more
    assert list(runs) == names and file == str(files["plot"]) and machine["threads"]
    run = runs["chunked-only"]
    assert len(run.completions) == 5 and run.iterations[0].chunks


def test_capacity_prints_and_writes_everything(tmp_path, capsys, plots, monkeypatch):
    def search_two(at, start, ratio):
        return ratio == 1.5 and (at(8.0), at(400.0))

    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    monkeypatch.setattr(machine, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(capacity, "search_capacity", search_two)
    files = [f"--json={tmp_path / 'c.json'}", f"--plot={tmp_path / 'c.png'}"]
    names = ["vllm", "sarathi-serve"]
    load = f"--requests 4 --batch 1 --slo 50 --ratio 1.5 --policies {','.join(names)}"
    bench.main(["capacity", *TINY, *load.split(), *files])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "c.json").read_text())
    assert list(report["results"]) == names and report["slo_s"] == 50
    for name, result in report["results"].items():
        assert [point["qps"] for point in result["points"]] == [8.0, 400.0]
        assert result["capacity_qps"] == 400 and result["bound"] == "at least"
        assert all(point["met"] and point["p99_tbt_s"] > 0 for point in result["points"])
        assert f"{name}: 8.000 requests/s, P50 TTFT" in text
    assert rows_of(text) == [("at least 400.00", "1.00x"), ("at least 400.00", "-")]
    assert "as asked for" in text and report["conclusion"] in text
    ((name, (results, *rest), more),) = plots
    assert name == "plot_capacity" and not more
    assert json.loads(json.dumps(results, default=plain)) == report["results"]
    assert rest == [report["machine"], str(tmp_path / "c.png"), 50.0]


FEW = [  # options, the fewest requests
    ("--batch 4 --requests 15", 16),
    ("--batch 3 --requests 8 --turns 3 --page-size 8", 12),  # chats count, not their turns
    ("--simulate a100-80gb --preset llama3-8b --batch 3 --pp 2 --replicas 2 --requests 47", 48),
]


@pytest.mark.parametrize("options, fewest", FEW)
def test_a_capacity_of_requests_that_all_run_at_once_is_refused(options, fewest, capsys):
    message = f"must be at least {fewest}, 4 times what may run at once"
    with pytest.raises(ValueError, match=message):
        bench.main(["capacity", "--max-len", "64", *options.split()])
    assert capsys.readouterr() == ("", "")  # before anything is loaded


def test_by_default_four_times_what_may_run_at_once_arrives(tmp_path):
    assert parse("capacity").requests == 128 == 4 * parse("capacity").batch
    assert parse("capacity", "--batch", "50").requests == 200
    assert parse("capacity", "--batch", "2").requests == 128
    assert parse("serve", "--batch", "50").requests == 48
    simulated = "capacity --simulate a100-80gb --preset llama3-8b --pp 2 --replicas 2".split()
    _, options = bench.parse_args(simulated)
    assert options.requests == options.fewest_requests == 4 * 128 * 4
    trace = tmp_path / "short.csv"
    rows = [f"{second},8,4" for second in range(15)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    few = ["capacity", "--batch", "4", "--max-len", "64", "--trace", str(trace)]
    with pytest.raises(ValueError, match=r"short\.csv with 15 requests: must be at least 16"):
        bench.main(few)


def rows_of(text):
    """Capacity and its ratio to vllm in the rows of the table."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return [(row[2].strip(), row[3].strip()) for row in rows]


def a_search(rates_met, rates_failed, missed="P99 TBT of 3 s"):
    """A search for a capacity."""
    trials = [Trial(qps, a_verdict()) for qps in rates_met]
    trials += [Trial(qps, a_verdict(missed)) for qps in rates_failed]
    return summarize_search(trials)


def a_verdict(missed=""):
    """A JudgedRun of nothing."""
    return replace(judge(Run([], [], 0.0, None), 1.0), missed=missed)


SEARCHES = {
    "vllm": a_search([1.0, 2.0], [2.05, 3.0]),
    "orca": a_search([], [4.0, 0.5]),
    "sarathi-serve": a_search([6.0, 9.0], []),
    "dynamic": a_search([7.0], [7.2], missed="the queue grew"),
}
RESULTS = {name: search_json(search) for name, search in SEARCHES.items()}


def test_bounds_are_kept_in_capacities_their_ratios_and_the_conclusion(capsys):
    print_capacities(SEARCHES, "requests/s")
    expected = [("2.00", "1.00x"), ("below 0.50", "below 0.25x")]
    expected += [("at least 9.00", "at least 4.50x"), ("7.00", "3.50x")]
    assert rows_of(capsys.readouterr().out) == expected
    two = {"vllm": a_search([1.0], []), "dynamic": a_search([3.0], [])}
    print_capacities(two, "chats/s")  # an unknown gain
    text = capsys.readouterr().out
    assert rows_of(text)[1] == ("at least 3.00", "-") and "| capacity in chats/s |" in text
    report = dict(results=RESULTS, slo_s=0.3, slo_busy=False, unit="chats/s")

    def conclusion(**changes):
        return " ".join(conclude(report | changes).split())

    text = conclusion()
    each = "2.00 under vllm, below 0.50 under orca, at least 9.00 under sarathi-serve, 7.00 under"
    assert each in text
    ends = "vllm (P99 TBT of 3 s), orca (P99 TBT of 3 s), dynamic (the queue grew)."
    assert text.endswith(f"Higher rates fail under {ends}") and "Capacity in chats/s" in text
    busy = {name: result | {"busy": True} for name, result in RESULTS.items()}
    assert TOO_BUSY in conclusion(results=busy) == conclusion(slo_busy=True)
    assert "dynamic" not in conclusion(results=RESULTS | {"dynamic": busy["dynamic"]})


def said(runs, **more):
    """The conclusion of `serve`."""
    return " ".join(conclude(dict(runs=runs, slo_s=0.3, slo_busy=False) | more).split())


def test_the_conclusion_of_serve_names_who_meets_the_slo():
    row = dict(met=True, missed="", busy=False, cut_short=None)
    runs = {"vllm": row | dict(met=False, missed="P99 TBT of 0.500 s"), "sarathi-serve": row}
    assert said(runs).endswith(
        "0.300 s: met by sarathi-serve; not met by vllm (P99 TBT of 0.500 s)."
    )
    assert "met by none; not met by vllm" in said({"vllm": runs["vllm"]})
    assert said(runs | {"vllm": row}).endswith("met by vllm; sarathi-serve.")
    for more in ({"busy": True}, {"cut_short": "interrupted"}):
        assert "vllm" not in said(runs | {"vllm": runs["vllm"] | more})
    assert TOO_BUSY in said(runs, slo_busy=True)
    assert TOO_BUSY in said({name: run | {"busy": True} for name, run in runs.items()})
    assert "no run came to its end" in said({"vllm": row | {"cut_short": "interrupted"}})


CAPACITY = "--requests 4 --batch 1 --policies vllm --slo 1e4"
SERVE = "--requests 4 --qps 40 --policies vllm,orca,sarathi-serve --slo"


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_a_busy_machine_is_marked_and_nothing_concluded(
    command, capsys, steady, tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    steady.append(0.5)
    load = f"{SERVE} strict" if command == "serve" else CAPACITY
    bench.main([command, *TINY, *load.split(), "--json", str(tmp_path / "b.json")])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["machine"]["base_busy"]
    assert "\nvllm (busy): " in text and text.count("| vllm (busy) ") == 2 * (command == "serve")
    assert "\na decode iteration (busy) takes " in text or command == "capacity"
    assert text.count(TOO_BUSY) == (command == "serve")  # that every rate was met is no chance
    rows = report.get("runs") or report["results"]
    assert rows["vllm"]["busy"] == (command == "serve")


def test_an_interrupt_keeps_what_there_is(tmp_path, capsys, monkeypatch, plots):
    """The first policy as a whole, the second as far as it came; each was written when done."""
    csv_file = tmp_path / "i.csv"
    json_file = tmp_path / "i.json"
    served = []
    steps = []
    step = run_loop.LoadRun.step

    def interrupted(load):
        if not load.arrived:
            served.append(json.loads(json_file.read_text())["runs"] if served else {})
        steps.append(len(served))
        if steps.count(2) == 9:
            raise KeyboardInterrupt
        return step(load)

    monkeypatch.setattr(run_loop.LoadRun, "step", interrupted)
    files = ["--csv", str(csv_file), "--json", str(json_file), "--plot", str(tmp_path / "i.png")]
    with pytest.raises(KeyboardInterrupt):
        bench.main(["serve", *TINY, *SERVE.split(), "50", *files])
    text = capsys.readouterr().out
    report = json.loads(json_file.read_text())
    assert [list(runs) for runs in served] == [[], ["vllm"]]
    assert [row["cut_short"] for row in report["runs"].values()] == [None, "interrupted"]
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    assert [row["policy"] for row in rows][:5] == ["vllm"] * 4 + ["orca"]
    assert {row["finish_reason"] for row in rows[:4]} == {"length"} and "abort" in str(rows[4:])
    assert "\ninterrupted: " in text and text.count("| orca (cut short) ") == 2
    assert "orca" not in report["conclusion"] and report["conclusion"] in text
    assert text.count("\nwrote ") == 3 and list(plots[0][1][0]) == ["vllm", "orca"]


def test_an_interrupted_search_keeps_its_points(tmp_path, capsys, monkeypatch, plots):
    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    file = tmp_path / "i.json"
    points = []

    def search(at, start, ratio):
        points.append([at(5.0), at(7.0)])
        assert len(json.loads(file.read_text())["results"]) == len(points)
        if len(points) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(capacity, "search_capacity", search)
    load = "--requests 4 --batch 1 --policies vllm,orca,sarathi-serve --slo 50 --json".split()
    with pytest.raises(KeyboardInterrupt):
        bench.main(["capacity", *TINY, *load, str(file)])
    text = capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert [len(result["points"]) for result in results.values()] == [2, 2]
    assert "\ninterrupted: " in text and rows_of(text) == [
        ("at least 7.00", "1.00x"),
        ("at least 7.00", "-"),
    ]
    assert f"wrote {file}" in text


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path, monkeypatch, capsys):
    file = tmp_path / "trace.csv"
    rows = "5,100,20\n9,40,8\n10,900,10\n13,60,4\n"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    argv = ["serve", "--trace", str(file), "--trace-scale", "0.5", "--max-len", "64"]
    at_rate, name = make_workload(parse(*argv))
    assert at_rate(None) == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)]
    assert [a.time for a in at_rate(2.0)] == [0, 0.5, 1.0] and "1 left out" in name
    chats, name = make_workload(parse(*argv, "--turns", "2", "--page-size", "8"))
    firsts = chats(None)[:3]
    later_turns = chats(None)[3:]
    assert [a.time for a in firsts] == [0, 4, 8] and [a.follows for a in later_turns] == [0, 1, 2]
    assert "3 chats of" in name and name.endswith(
        "(1 left out) of up to 2 turns, 1 s after each answer"
    )
    served = []

    def compare_runs(comparison):
        served.append(comparison.arrivals_at(comparison.options.qps))

    monkeypatch.setattr(machine, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(serving, "compare_runs", compare_runs)
    for rate_options, rate in (([], "at its own rate"), (["--qps", "2"], "at 2 a second")):
        bench.main([*argv, *rate_options, *TINY, "--slo", "1000"])
        assert f"(1 left out) {rate}; median prompt 30, output 4" in capsys.readouterr().out
        assert served.pop() == at_rate(float(rate_options[-1]) if rate_options else None)


def test_serve_compares_runs_with_and_without_prefix_caching(tmp_path, capsys):
    """Each prefix of 20 tokens has two pages of 8. They are found by all but who came first."""
    machine = "--simulate a100-80gb --preset llama3-8b --max-len 64 --page-size 8"
    load = "--requests 6 --qps 1 --policies vllm,orca --lengths 12+4 --shared-prefix 20:1"
    for options, names in (
        ("", ["vllm", "vllm, shared", "orca", "orca, shared"]),
        ("--prefix-caching off", ["vllm", "orca"]),
        ("--prefix-caching on", ["vllm", "orca"]),
    ):
        argv = f"serve {machine} {load} {options} --json {tmp_path}/s.json".split()
        bench.main(argv)
        text = capsys.readouterr().out
        runs = json.loads((tmp_path / "s.json").read_text())["runs"]
        assert list(runs) == names and text.count("| vllm ") == 2
        for name, row in runs.items():
            cached_tokens = 5 * 16 if "shared" in name or "on" in options else 0
            assert (row["finished"], row["cached_tokens"]) == (6, cached_tokens)
            assert row["cached"] == pytest.approx(cached_tokens / (6 * 32))
        assert "6 requests of 12+4 tokens, each after a prefix of 20 (1 in all), Poisson" in text
        assert ("; pages of 8 tokens; shared: by prompts" in text) == (options[-3:] != "off")
        assert "|    42% |" in text or options[-3:] == "off"
    for parsed, expected in (
        (parse("serve"), [False]),
        (parse("serve", "--turns", "2"), [False, True]),
    ):
        assert parsed.prefix_caching == expected


def test_chats_are_served_and_find_their_own_past(tmp_path, capsys, monkeypatch):
    """A prefix of 8 and 12 + 4 tokens, then 12 more. Two pages of 8 stay of the first turn; the
    third lacks the last token, whose keys nobody needed."""
    sent = []
    serve = load_run.serve

    def spy(*args, **options):
        sent.append(args[3])
        return serve(*args, **options)

    monkeypatch.setattr(load_run, "serve", spy)
    files = f"--csv {tmp_path}/c.csv --json {tmp_path}/c.json --html {tmp_path}/c.html"
    load = "--requests 3 --qps 30 --policies sarathi-serve --lengths 24+8 --kv-tokens 1024"
    load += " --turns 2 --shared-prefix 8:1 --slo 50"
    bench.main(["serve", *TINY, *load.split(), *files.split()])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "c.json").read_text())
    assert (
        "load: 3 chats of 24+8 tokens of up to 2 turns, 1 s after each answer, each after a" in text
    )
    assert "at 30 a second" in text and "\nsarathi-serve, shared: 30.000 chats/s, P50" in text
    assert {row["finished"] for row in report["runs"].values()} == {6}
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
    assert lengths == [*[(20, 4)] * 3, *[(36, 4)] * 3] * 2
    cached = [int(row["cached_tokens"]) for row in rows]
    assert cached[:6] == [0] * 6 and cached[9:] == [16] * 3
    assert sent[0] == sent[1] and [len(prompt) for prompt in sent[0]] == [20] * 3 + [12] * 3
    assert len({tuple(prompt[:8]) for prompt in sent[0][:3]}) == 1


def test_custom_lengths_follow_each_other():
    def lengths(*argv):
        at_rate, _ = make_workload(parse(*argv))
        return [arrival[1:3] for arrival in at_rate(1.0)]

    one = ["capacity", "--lengths", "50+7", "--requests", "3"]
    two = ["serve", "--lengths", "50+7, 4+5", "--requests", "3", "--long-prompt", "900"]
    assert lengths(*one) == [(50, 7)] * 3
    assert lengths(*two) == [(900, 16), (50, 7), (4, 5), (4, 5)]


def test_classes_are_drawn_in_their_shares_and_the_same_at_every_rate():
    args = parse("serve", "--requests", "4000", "--classes", "realtime=1, low=5,normal=4")
    assert args.classes == {"realtime": 1, "low": 5, "normal": 4}
    at_rate, _ = make_workload(args)
    priorities = [arrival.priority for arrival in at_rate(1.0)]
    assert priorities == [arrival.priority for arrival in at_rate(7.0)]
    for name, share in args.classes.items():
        assert priorities.count(name) / 4000 == pytest.approx(share / 10, abs=0.03)
    assert {a.priority for a in make_workload(parse("serve"))[0](1.0)} == {"normal"}


@pytest.mark.parametrize("on_gpu, some", [(0, (128, 32, 1024, 10)), (1, (512, 128, 8192, 42))])
def test_the_default_memory_is_a_third_of_the_batch_in_small_pages(on_gpu, some, monkeypatch):
    monkeypatch.setattr(serve_options, "resolve_model", lambda model, **_: model)  # no GPU is here
    args = parse("serve", "--device", ("cpu", "cuda")[on_gpu])
    *sizes, max_len, requests = some
    assert [args.chunk, args.batch, args.max_len] == [*sizes, max_len]
    assert args.page_size == [(64, 256)[on_gpu]] and args.kv_tokens == requests * max_len
    assert args.requests == (500 if on_gpu else 48)
    assert parse("serve", "--max-len", "41").page_size == [21]
    simulated = ["--simulate", "a100-80gb", "--preset", "llama3-8b"]
    assert parse("serve", *simulated).page_size == [64]
    sizes = "16,64, max, 512"
    assert parse("serve", "--page-size", sizes, "--max-len", "512").page_size == [16, 64, 512]


LOADS = [
    ("--policies vllm:64", "'vllm:64': vllm does not go by a chunk size"),
    ("--policies sarathi:0", "chunk=0: must be a whole number of at least 1"),
    ("--lengths 500", "--lengths '500': must be sharegpt4, arxiv or PROMPT"),
    ("--lengths 5+5,6+6 --requests 1", "--requests 1: must be at least 2"),
    ("--lengths 500+50 --shared-prefix 512:4", "of at most 512, --max-len less --shared-prefix"),
    ("--lengths 1000+50", "'1000.50': .* of at most 1024, --max-len"),
    ("--trace TMP/trace.csv", "column 'num_decode_tokens' is 0 times in the header"),
    ("--lengths 5+" + 5000 * "9", "must be sharegpt4, arxiv or PROMPT"),
]


@pytest.mark.parametrize("arguments, message", LOADS)
@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_an_invalid_load_is_refused_before_a_model_is_loaded(
    command, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(serving, "load_model", None)
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens\n1,2\n")
    arguments = arguments.replace("TMP", str(tmp_path)).split()
    with pytest.raises(ValueError, match=message):
        bench.main([command, *arguments, "--device", "cpu"])


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_an_slo_below_a_decode_iteration_is_refused_before_serving(command, monkeypatch):
    monkeypatch.setattr(RealMachine, "serve", None)
    monkeypatch.setattr(capacity, "measure_base", lambda *_: (Base(0.065, 0.001, 32, 512), 0.0))
    message = "SLO of 0.01 s: below one decode iteration, which takes 0.065 s"
    with pytest.raises(ValueError, match=message):
        bench.main([command, *TINY, "--slo", "0.01"])
