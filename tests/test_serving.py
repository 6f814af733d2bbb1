"""`bench.py serve` and `capacity`: what they print, write and refuse. No timing is asserted."""

import json
from dataclasses import replace

import pytest

import bench
from cli.files import plain
from lab.commands import serve as serving
from lab.commands import serve_options
from lab.commands.serve import make_workload
from lab.commands.serve_report import conclude, print_capacities, search_json
from lab.measure import capacity, machine, metrics, run_loop
from lab.measure import timing as measure
from lab.measure.capacity import Trial, judge, summarize_search
from lab.measure.run_loop import Run
from lab.measure.timing import TOO_BUSY
from lab.measure.workload import Arrival, poisson, sample_lengths
from lab.pictures import timelines
from policies.priority import PRIORITIES
from tests import helpers
from tests.helpers import machine_info

SIZES = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4"
TINY = f"{SIZES} --page-size 8".split()
MACHINE = machine_info()
CAPACITY = "--requests 4 --batch 1 --slo 50"
SERVE = "--requests 4 --qps 40 --policies vllm,orca,sarathi-serve"


def parse(command, *words):
    """The options of `command`, checked, on a CPU."""
    return helpers.parse([command, "--device", "cpu", *words])


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """A machine on which nothing else runs, or of the drift that is put into the list."""
    drift = [0.0]
    monkeypatch.setattr(measure.Probe, "take", lambda *_: drift[-1])
    monkeypatch.setattr(measure, "steadily", lambda function, *_, **__: (function(), drift[-1]))
    return drift


@pytest.fixture
def plots(monkeypatch):
    """What was to be drawn: (function, arguments)."""
    drawn = []
    for name in ("plot_serving", "plot_capacity"):
        monkeypatch.setattr(timelines, name, lambda *args, name=name: drawn.append((name, args)))
    return drawn


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs a command with the smallest model: (what it prints, what it writes)."""

    def run_command(command, words, *files, interrupted=False):
        argv = [command, *TINY, *words.split(), *files, f"--json={tmp_path}/report.json"]
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                bench.main(argv)
        else:
            bench.main(argv)
        return capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text("utf-8"))

    return run_command


def test_serve_prints_and_writes_everything(tmp_path, run, plots):
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    files = {option: tmp_path / f"run.{option}" for option in ("png", "html")}
    words = f"--requests 5 --qps 30 --classes low=2,normal=3 --policies {','.join(names)}"
    options = [f"--plot={files['png']}", f"--html={files['html']}"]
    text, report = run("serve", words, *options)
    heading = "llama-tiny|batch 32, context 32|64 tokens of KV cache|30 a second|strict, 5 of these"
    assert all(part in text for part in heading.split("|"))
    assert report["options"]["seed"] == 0 and report["machine"]["model"] == "llama-tiny"
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    assert list(report["runs"]) == names
    for name, row in report["runs"].items():
        assert row["finished"] == 5 and 0 < row["own_fraction"] < 1
        assert text.count(f"| {name} ") == 2 and f" {row['tokens_per_s']:,.0f} " in text
        point = f"\n{name}: 30.000 requests/s, P50 TTFT {row['ttft_s']['p50']:.3f} s"
        assert text.count(point) == 1
    assert report["runs"]["chunked-only"]["hybrid"] == 0 and report["conclusion"] in text
    written = [f"wrote {tmp_path}/report.json", f"wrote {files['png']}"]
    page = files["html"]
    assert text.splitlines()[-3:] == [*written, f"wrote {page}, open {page.as_uri()}"]
    assert all(f'"name": "{name}"' in page.read_text("utf-8") for name in names)
    ((name, (runs, machine, file, slo_s)),) = plots
    assert name == "plot_serving" and slo_s == report["slo_s"]
    assert list(runs) == names and file == str(files["png"]) and machine["threads"]
    arrivals = poisson(sample_lengths("sharegpt4", 5, 64, 0), 30.0, 0)
    for run in runs.values():
        served = [(c.arrival, len(c.prompt), len(c.output)) for c in run.completions]
        assert served == [arrival[:3] for arrival in arrivals] and run.iterations
        assert {PRIORITIES[c.service.priority] for c in run.completions} == {"normal", "low"}


def test_capacity_prints_and_writes_everything(tmp_path, run, plots, monkeypatch):
    def search_two(at, start, ratio):
        return ratio == 1.5 and (at(8.0), at(400.0))

    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    monkeypatch.setattr(machine, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(capacity, "search_capacity", search_two)
    names = ["vllm", "sarathi-serve"]
    words = f"{CAPACITY} --ratio 1.5 --policies {','.join(names)}"
    text, report = run("capacity", words, f"--plot={tmp_path}/c.png")
    assert list(report["results"]) == names and report["slo_s"] == 50
    for name, result in report["results"].items():
        assert [point["qps"] for point in result["points"]] == [8.0, 400.0]
        assert result["capacity_qps"] == 400 and result["bound"] == "at least"
        assert all(point["met"] and point["p99_tbt_s"] > 0 for point in result["points"])
        assert f"{name}: 8.000 requests/s, P50 TTFT" in text
    assert rows_of(text) == [("at least 400.00", "1.00x"), ("at least 400.00", "-")]
    assert "as asked for" in text and report["conclusion"] in text
    ((name, (results, *rest)),) = plots
    assert json.loads(json.dumps(results, default=plain)) == report["results"]
    assert (name, rest) == ("plot_capacity", [report["machine"], f"{tmp_path}/c.png", 50.0])


FEW = [  # options, the fewest requests
    ("--batch 4 --requests 15", 16),
    ("--simulate a100-80gb --preset llama3-8b --batch 3 --pp 2 --replicas 2 --requests 47", 48),
    ("--batch 4 --trace TRACE", 16),
]


@pytest.mark.parametrize("options, fewest", FEW)
def test_a_capacity_of_requests_that_all_run_at_once_is_refused(options, fewest, capsys, tmp_path):
    trace = tmp_path / "short.csv"
    rows = [f"{second},8,4" for second in range(15)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]), "utf-8")
    given = "short.csv with 15 requests" if "TRACE" in options else "--requests "
    message = f"{given}.*: must be at least {fewest}, 4 times what may run at once"
    with pytest.raises(ValueError, match=message):
        argv = [word.replace("TRACE", str(trace)) for word in options.split()]
        bench.main(["capacity", "--max-len=64", *argv])
    assert capsys.readouterr() == ("", "")  # before anything is loaded


def test_by_default_four_times_what_may_run_at_once_arrives():
    assert parse("capacity", "--batch", "50").requests == 200
    assert parse("capacity", "--batch", "2").requests == 128  # at least
    assert parse("serve", "--batch", "50").requests == 48
    simulated = "capacity --simulate a100-80gb --preset llama3-8b --pp 2 --replicas 2".split()
    options = helpers.parse(simulated)
    assert options.requests == options.fewest_requests == 4 * 128 * 4


def rows_of(text):
    """Capacity and its ratio to vllm in the rows of the table."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return [(row[2].strip(), row[3].strip()) for row in rows]


def a_search(rates_met, rates_failed=(), missed="P99 TBT of 3 s"):
    """A search for a capacity, of runs of nothing."""
    run = judge(Run([], [], 0.0, None), 1.0)
    trials = [Trial(qps, replace(run, missed="")) for qps in rates_met]
    trials += [Trial(qps, replace(run, missed=missed)) for qps in rates_failed]
    return summarize_search(trials)


def test_bounds_are_kept_in_capacities_their_ratios_and_the_conclusion(capsys):
    searches = {
        "vllm": a_search([1.0, 2.0], [2.05, 3.0]),
        "orca": a_search([], [4.0, 0.5]),
        "sarathi-serve": a_search([6.0, 9.0]),
        "dynamic": a_search([7.0], [7.2], missed="the queue grew"),
    }
    print_capacities(searches)
    text = capsys.readouterr().out
    assert rows_of(text) == [
        ("2.00", "1.00x"),
        ("below 0.50", "below 0.25x"),
        ("at least 9.00", "at least 4.50x"),
        ("7.00", "3.50x"),
    ]
    results = {name: search_json(search) for name, search in searches.items()}
    report = dict(results=results, slo_s=0.3, slo_busy=False)
    assert conclude(report).replace("\n", " ") == (
        "Capacity in requests/s with P99 TBT up to 0.300 s: 2.00 under vllm, below 0.50 under "
        "orca, at least 9.00 under sarathi-serve, 7.00 under dynamic. Higher rates fail under "
        "vllm (P99 TBT of 3 s), orca (P99 TBT of 3 s), dynamic (the queue grew)."
    )
    results["dynamic"]["busy"] = True
    assert "dynamic" not in conclude(report)


MET = dict(met=True, missed="", busy=False, cut_short=None)
MISSED = MET | dict(met=False, missed="P99 TBT of 0.500 s")
CUT = MET | dict(cut_short="interrupted")


@pytest.mark.parametrize(
    "runs, said",
    [
        ({"vllm": MISSED, "dynamic": MET}, "met by dynamic; not met by vllm (P99 TBT of 0.500 s)."),
        ({"vllm": MISSED}, "met by none; not met by vllm (P99 TBT of 0.500 s)."),
        ({"vllm": MET, "dynamic": MET}, "met by vllm; dynamic."),
        ({"vllm": MISSED | {"busy": True}, "dynamic": MET}, "met by dynamic."),
        ({"vllm": CUT, "dynamic": MET}, "met by dynamic."),
        ({"vllm": MET | {"busy": True}}, TOO_BUSY),
        ({"vllm": CUT}, "no run came to its end"),
    ],
)
def test_the_conclusion_of_serve_names_who_meets_the_slo(runs, said):
    report = dict(runs=runs, slo_s=0.3, slo_busy=False)
    text = conclude(report).replace("\n", " ")
    assert text in (f"SLO of 0.300 s: {said}", f"Conclusion: {said}.")
    busy_slo = conclude(report | {"slo_busy": True})
    assert TOO_BUSY in busy_slo or said == "no run came to its end"


def test_a_busy_machine_is_marked_and_nothing_concluded(run, steady, monkeypatch):
    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    steady.append(0.5)
    text, report = run("serve", f"{SERVE} --policies vllm --slo strict")
    assert report["machine"]["base_busy"] and report["runs"]["vllm"]["busy"]
    assert "\nvllm (busy): " in text and text.count("| vllm (busy) ") == 2
    assert "\na decode iteration (busy) takes " in text and text.count(TOO_BUSY) == 1


def test_an_interrupt_keeps_what_there_is(tmp_path, run, monkeypatch, plots):
    """The first policy as a whole, the second as far as it came; each was written when done."""
    served = []
    steps = []
    step = run_loop.LoadRun.step

    def interrupted(load):
        if not load.arrived:
            report = (
                json.loads((tmp_path / "report.json").read_text("utf-8"))
                if served
                else {"runs": {}}
            )
            served.append(report["runs"])
        steps.append(len(served))
        if steps.count(2) == 9:
            raise KeyboardInterrupt
        return step(load)

    monkeypatch.setattr(run_loop.LoadRun, "step", interrupted)
    files = [f"--plot={tmp_path}/i.png"]
    text, report = run("serve", f"{SERVE} --slo 50", *files, interrupted=True)
    assert [list(runs) for runs in served] == [[], ["vllm"]]
    assert [row["cut_short"] for row in report["runs"].values()] == [None, "interrupted"]
    vllm, orca = ([c.finish_reason for c in run.completions] for run in plots[0][1][0].values())
    assert vllm == ["length"] * 4 and "abort" in orca
    assert "\ninterrupted: " in text and text.count("| orca (cut short) ") == 2
    assert "orca" not in report["conclusion"] and report["conclusion"] in text
    assert text.count("\nwrote ") == 2 and list(plots[0][1][0]) == ["vllm", "orca"]


def test_an_interrupted_search_keeps_its_points(tmp_path, run, monkeypatch, plots):
    monkeypatch.setattr(metrics, "missed", lambda *_, **__: "")
    points = []

    def search(at, start, ratio):
        points.append([at(5.0), at(7.0)])
        report = json.loads((tmp_path / "report.json").read_text("utf-8"))
        assert len(report["results"]) == len(points)
        if len(points) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(capacity, "search_capacity", search)
    words = f"{CAPACITY} --policies vllm,orca,sarathi-serve"
    text, report = run("capacity", words, interrupted=True)
    assert [len(result["points"]) for result in report["results"].values()] == [2, 2]
    assert rows_of(text) == [("at least 7.00", "1.00x"), ("at least 7.00", "-")]
    assert "\ninterrupted: " in text and f"wrote {tmp_path}/report.json" in text


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path, run):
    file = tmp_path / "trace.csv"
    rows = "5,100,20\n9,40,8\n10,900,10\n13,60,4\n"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows, "utf-8")
    trace = [f"--trace={file}", "--trace-scale=0.5"]
    at_rate, name = make_workload(parse("serve", "--max-len", "64", *trace))
    assert at_rate(None) == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)]
    assert [a.time for a in at_rate(2.0)] == [0, 0.5, 1.0] and "(1 left out)" in name
    text, _ = run("serve", "--policies vllm --slo 1000 --qps 20", *trace)
    printed = " ".join(text.split())
    assert "(1 left out) at 20 a second; median prompt 30, output 4" in printed


def test_serve_compares_runs_with_and_without_prefix_caching(tmp_path, capsys):
    """A prefix of two pages, which all find but the first. Time is simulated."""
    load = "--requests 6 --qps 1 --lengths 64+4 --shared-prefix 128:1 --policies vllm,orca"
    file = tmp_path / "report.json"
    machine = "--simulate a100-80gb --preset llama3-8b"
    bench.main(["serve", *load.split(), *machine.split(), f"--json={file}"])
    text = capsys.readouterr().out
    runs = json.loads(file.read_text("utf-8"))["runs"]
    cached = {name: row["cached_tokens"] for name, row in runs.items()}
    assert cached == {"vllm": 0, "vllm, shared": 640, "orca": 0, "orca, shared": 640}
    assert runs["vllm, shared"]["cached"] == pytest.approx(640 / (6 * 192))
    assert text.count("|    56% |") == 2 and "; pages of 64 tokens; shared: by prompts" in text


def test_a_long_prompt_comes_before_all_others():
    at_rate, _ = make_workload(
        parse("serve", "--lengths=50+7, 4+5", "--requests=3", "--long-prompt=900")
    )
    assert [arrival[1:3] for arrival in at_rate(1.0)] == [(900, 16), (50, 7), (4, 5), (4, 5)]


def test_classes_are_drawn_in_their_shares_and_the_same_at_every_rate():
    args = parse("serve", "--requests", "4000", "--classes", "realtime=1, low=5,normal=4")
    at_rate, _ = make_workload(args)
    priorities = [arrival.priority for arrival in at_rate(1.0)]
    assert priorities == [arrival.priority for arrival in at_rate(7.0)]
    for name, share in args.classes.items():
        assert priorities.count(name) / 4000 == pytest.approx(share / 10, abs=0.03)
    assert {a.priority for a in make_workload(parse("serve"))[0](1.0)} == {"normal"}


DEFAULTS = {
    "cpu": dict(
        chunk=128, batch=32, max_len=1024, requests=48, page_size=[64], kv_tokens=10 * 1024
    ),
    "cuda": dict(
        chunk=512, batch=128, max_len=8192, requests=500, page_size=[256], kv_tokens=42 * 8192
    ),
}


@pytest.mark.parametrize("device", DEFAULTS)
def test_the_default_memory_is_a_third_of_the_batch_in_small_pages(device, monkeypatch):
    monkeypatch.setattr(serve_options, "resolve_model", lambda model, **_: model)  # no GPU is here
    options = parse("serve", "--device", device)
    assert {name: getattr(options, name) for name in DEFAULTS[device]} == DEFAULTS[device]


@pytest.mark.parametrize(
    "words, page_sizes",
    [
        ("--max-len 41", [21]),
        ("--simulate a100-80gb --preset llama3-8b", [64]),
        ("--page-size 16,64,max,512 --max-len 512", [16, 64, 512]),
    ],
)
def test_pages_are_small_unless_others_are_asked_for(words, page_sizes):
    assert parse("serve", *words.split()).page_size == page_sizes


@pytest.mark.parametrize(
    "words, runs",
    [
        ("", [False]),
        ("--shared-prefix 20:2", [False, True]),
        ("--prefix-caching on", [True]),
    ],
)
def test_prefix_caching_is_compared_where_prompts_begin_alike(words, runs):
    assert parse("serve", *words.split()).prefix_caching == runs


LOADS = [
    ("--policies vllm:64", "'vllm:64': vllm does not go by a chunk size"),
    ("--policies dynamic:64", "'dynamic:64': dynamic does not go by a chunk size"),
    ("--policies sarathi:0", "chunk=0: must be at least 1"),
    ("--lengths 500", "--lengths '500': must be sharegpt4, arxiv or PROMPT"),
    ("--lengths 5+5,6+6 --requests 1", "--requests 1: must be at least 2"),
    ("--lengths 500+50 --shared-prefix 512:4", "of at most 512, --max-len less --shared-prefix"),
    ("--lengths 1000+50", "'1000.50': .* of at most 1024, --max-len"),
    ("--trace TMP/trace.csv", "column 'num_decode_tokens' is 0 times in the header"),
    ("--lengths 5+" + 5000 * "9", "must be sharegpt4, arxiv or PROMPT"),
]


@pytest.mark.parametrize("arguments, message", LOADS)
def test_an_invalid_load_is_refused_before_a_model_is_loaded(
    arguments, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(serving, "load_model", None)
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens\n1,2\n", "utf-8")
    arguments = [word.replace("TMP", str(tmp_path)) for word in arguments.split()]
    with pytest.raises(ValueError, match=message):
        bench.main(["serve", *arguments, "--device", "cpu"])
