"""`bench.py paper` keeps what is done, goes on where it was, and reports it: of made-up claims.

The claims themselves are tested in test_claims.py."""

import ast
import json
import re
import shutil
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from config import EngineConfig
from lab.claims import provenance, report
from lab.claims.checks import less
from lab.claims.claim import Finding
from lab.claims.claims import CLAIMS
from lab.claims.labs import Lockstep, RealLab
from lab.claims.picture import draw
from lab.claims.table import Table
from lab.commands import paper
from lab.measure import timing, token_budget
from lab.measure.capacity import Bounded
from lab.measure.token_budget import Profiled
from tests.helpers import machine_info, parse
from tests.test_simulate import printed_tables

ROOT = Path(__file__).parents[1]
TINY = ["paper", "--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
TINY += ["--max-len", "64"]
SMALL = EngineConfig(chunk=8, max_batch=4, max_len=64, page_size=16, pages=4)
CLAIM = {claim.id: claim for claim in CLAIMS}
LINES = {"vllm": {1: 0.5, 2: None, 3: Bounded(2.5, "at least")}, "dynamic": {1: 1.0}}
MACHINE = {"model": "m", "dtype": "float32", "device": "D"}
PLOT = Table("Time over tokens", x="tokens", y="ms", log="x", spec=".2f", lines=LINES)


def finding(here, shows=True):
    """A Finding whose number is `here`, of which the paper says 55; and whether its check holds."""
    found = Finding("A6000", tables=[PLOT])
    measured = Table(x="tokens", y="ms", spec=".0f")
    measured.add(8, {"vllm": here})
    line = measured["vllm"]
    found.expect(less(0 if shows else here, line), "No row is computed twice.")
    found.publish("time of 8 tokens", 55, line, 8, unit=" ms")
    return found


class MadeUpClaims:
    """Claims that measure nothing. `results` maps some ids to a Finding, or an error that is
    raised; "busy" means a machine that is; all other claims hold."""

    def __init__(self):
        self.results = {}
        self.measured = []  # (id, Lab) of each measurement

    def measure(self, claim_id, lab):
        self.measured.append((claim_id, lab))
        result = self.results.get(claim_id, finding(55))
        if result == "busy":
            lab.busy = True
            return finding(1, shows=False)
        if isinstance(result, Finding):
            return result
        raise result

    def take(self):
        """The ids of the claims that were measured since the last call."""
        ids = [claim_id for claim_id, _ in self.measured]
        self.measured.clear()
        return ids


@pytest.fixture
def claims(monkeypatch):
    made_up = MadeUpClaims()
    replaced = []
    for claim in CLAIMS:
        function = update_wrapper(partial(made_up.measure, claim.id), claim.function)
        replaced.append(replace(claim, function=function))
    monkeypatch.setattr(paper, "CLAIMS", replaced)

    def measure_machine(model, name, rows, attention):
        return machine_info(
            device=timing.device_name(model.device),
            torch=torch.__version__,
            model=name,
            dtype=str(getattr(model, "dtype", "float32")).removeprefix("torch."),
            parameters=10,
            attention=attention,
        )

    monkeypatch.setattr(paper, "measure_machine", measure_machine)
    monkeypatch.setattr(timing, "device_name", lambda device: "A machine")
    return made_up


def run(directory, argv):
    """Run the command; what paper.json says then of each claim."""
    bench.main([*TINY, "--out", str(directory), *argv.split()])
    return json.loads((directory / "paper.json").read_text("utf-8"))["claims"]


@pytest.mark.parametrize(
    "text, ids",
    [
        ("S-T2", ["S-F8"]),  # which covers it
        ("SS-F10,SS-F11,SS-F10", ["SS-F10"]),
        ("B-*", ["B-1", "B-1b", "B-2", "B-3", "B-7"]),
        ("SS-F11, S-F9", ["SS-F10", "S-F9"]),
        ("S-F?", ["S-F3", "S-F7", "S-F8", "S-F9"]),
    ],
)
def test_only_takes_ids_and_patterns(text, ids):
    assert [claim.id for claim in paper.some_claims(text)] == ids


@pytest.mark.parametrize("word", ["S-F99", "s-f9", "S-F", ""])
def test_a_wrong_id_is_one_line(word, capsys):
    with pytest.raises(SystemExit) as done:
        bench.main(["paper", "--only", f"S-F9,{word}"])
    out, err = capsys.readouterr()
    assert (done.value.code, out, err.count("\n")) == (2, "", 1)
    assert f"error: --only {word}: no such claim; --list names them" in err


@pytest.mark.parametrize(
    "machine, folder",
    [
        (("AMD EPYC 7B13 64-Core Processor", 1, "bfloat16"), "epyc-7b13-1-thread"),
        (("AMD EPYC", 2, "float32"), "epyc-2-threads-float32"),
        (
            ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 8),
            "xeon-platinum-8481c-8-threads",
        ),
        (("NVIDIA H100 80GB HBM3", 0, "float16"), "h100-80gb-hbm3"),
        (("AMD Processor", 2), "cpu-2-threads"),
        (("../../Odd (TM) ünit/x", 3), "odd-nit-x-3-threads"),
    ],
)
def test_a_machine_has_a_folder(machine, folder):
    assert paper.folder_of(*machine) == folder


def test_results_are_kept_by_machine(claims, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "README.md").write_text(report.BEGIN + report.END, "utf-8")
    monkeypatch.setattr(timing, "device_name", lambda device: "AMD EPYC")
    bench.main([*TINY, "--only", "SS-F10"])
    folder = paper.folder_of("AMD EPYC", torch.get_num_threads(), "float32")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize(
    "first, second, measured",
    [
        ("SS-F10,S-F8", "SS-F10,B-1,S-F8", ["B-1"]),
        ("SS-F10", "SS-F11", []),  # that is SS-F10
        ("SS-F10,S-F8", "SS-F10 --fresh", ["SS-F10"]),
        ("SS-F10 --quick", "SS-F10", ["SS-F10"]),  # a full result serves a quick run
        ("SS-F10", "SS-F10 --quick", []),
        ("SS-F10", "SS-F10 --dtype bfloat16", ["SS-F10"]),
        ("SS-F10", "SS-F10 --seed 1", ["SS-F10"]),
        ("SS-F10 --seed 1", "SS-F10 --seed 1", []),
        ("SS-F10", "SS-F10 --attention sdpa", ["SS-F10"]),
        pytest.param("SS-F10", "SS-F10 --preset gpt2", ["SS-F10"], marks=pytest.mark.slow),
    ],
)
def test_what_is_done_under_the_same_conditions_is_not_measured_again(
    first, second, measured, claims, tmp_path, capsys
):
    before = run(tmp_path, f"--only {first}")
    assert set(claims.take()) == before.keys()
    capsys.readouterr()
    after = run(tmp_path, f"--only {second}")
    assert claims.take() == measured
    assert f"{len(measured)} of " in capsys.readouterr().out
    for claim_id, record in before.items():
        assert (after[claim_id] == record) == (claim_id not in measured)


def test_another_machine_or_torch_is_another_measurement(claims, tmp_path, monkeypatch):
    run(tmp_path, "--only SS-F10")
    monkeypatch.setattr(timing, "device_name", lambda device: "another")
    run(tmp_path, "--only SS-F10")
    monkeypatch.setattr(torch, "__version__", "9.9")
    kept = run(tmp_path, "--only SS-F10")
    assert claims.take() == 3 * ["SS-F10"]
    options = kept["SS-F10"]["options"]
    assert (options["device"], options["torch"]) == ("another", "9.9")


def test_what_was_busy_or_failed_is_tried_again(claims, tmp_path, capsys):
    claims.results["S-F8"] = "busy"
    claims.results["SS-F10"] = ValueError("--batch 18: takes 40 GB, 20 GB are free\nand more")
    claims.results["SS-F12"] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    records = run(tmp_path, "--only S-F8,SS-F10,SS-F12,B-1")
    assert claims.take() == ["S-F8", "SS-F10", "SS-F12", "B-1"]
    assert records["SS-F10"]["why"] == "--batch 18: takes 40 GB, 20 GB are free"
    assert re.match("no memory on the GPU .*: CUDA out of memory", records["SS-F12"]["why"])
    text = capsys.readouterr().out
    assert [record["verdict"] for record in records.values()] == [
        "too busy to tell",
        "not measured",
        "not measured",
        "as in the paper",
    ]
    assert "**not measured**: --batch 18: takes 40 GB, 20 GB are free\n" in text
    claims.results.clear()
    run(tmp_path, "--only S-F8,SS-F10,SS-F12,B-1")
    assert claims.take() == ["S-F8", "SS-F10", "SS-F12"]


def test_a_record_of_an_older_version_is_measured_again(claims, tmp_path):
    kept = run(tmp_path, "--only SS-F10,B-1")
    claims.take()
    kept["B-1"] = {"claim": "B-1", "number": 5, "paper": "6"}
    (tmp_path / "paper.json").write_text(json.dumps({"claims": kept}), "utf-8")
    again = run(tmp_path, "--only SS-F10,B-1")
    assert claims.take() == ["B-1"] and again["SS-F10"] == kept["SS-F10"]
    assert again["B-1"]["numbers"]


def test_an_error_of_ours_is_not_hidden(claims, tmp_path):
    claims.results["SS-F10"] = RuntimeError("nothing to do with memory")
    with pytest.raises(RuntimeError):
        run(tmp_path, "--only S-F8,SS-F10")
    assert list(json.loads((tmp_path / "paper.json").read_text("utf-8"))["claims"]) == ["S-F8"]


def test_an_interrupted_run_keeps_what_is_done_and_goes_on_there(claims, tmp_path, capsys):
    claims.results["SS-F10"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--only S-F8,SS-F10,SS-F12")
    assert claims.take() == ["S-F8", "SS-F10"]
    assert "3 of 3 claims left to do\n" in capsys.readouterr().out
    assert "S-F8" in (tmp_path / "paper.md").read_text("utf-8")
    claims.results.clear()
    assert list(run(tmp_path, "--only S-F8,SS-F10,SS-F12")) == ["S-F8", "SS-F10", "SS-F12"]
    assert claims.take() == ["SS-F10", "SS-F12"]


def test_the_list_says_what_there_is_and_what_is_done(claims, tmp_path, capsys):
    run(tmp_path, "--only SS-F10 --quick")
    claims.take()
    capsys.readouterr()
    before = (tmp_path / "paper.json").stat().st_mtime_ns
    bench.main([*TINY, "--out", str(tmp_path), "--list", "--quick"])
    text = capsys.readouterr().out
    for claim in CLAIMS:
        quick, full = claim.seconds
        done = ", done" if claim.id == "SS-F10" else ""
        assert f"{claim.name} ({quick} s{done})\n    {claim.sentence}\n" in text
    bench.main([*TINY, "--out", str(tmp_path / "new"), "--list", "--only", claim.id])
    assert f"{claim.name} ({full} s)\n" in capsys.readouterr().out
    assert claims.take() == []
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "paper.json").stat().st_mtime_ns == before


def test_a_result_says_how_old_it_is_if_the_code_has_changed(claims, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "git", lambda *words: "47")
    records = run(tmp_path, "--only SS-F10")
    kept = records["SS-F10"]["provenance"]
    assert kept["code"] == provenance.code_hash() and kept["commit"] == "47"
    assert provenance.age(kept) == provenance.age({}) == ""
    records["SS-F10"]["provenance"] = kept | {"code": "another"}
    (tmp_path / "paper.json").write_text(json.dumps({"claims": records}), "utf-8")
    capsys.readouterr()
    bench.main([*TINY, "--out", str(tmp_path), "--list", "--only", "SS-F10"])
    assert ", done, measured 47 commits ago)\n" in capsys.readouterr().out


def test_the_hash_of_code_knows_no_words_but_all_imports():
    one = 'def f(x):\n    """Words."""\n    return x  # more\n'
    other = "def f(x):\n\n    return x\n"
    dumps = [ast.dump(provenance.tree_of(source)) for source in (one, other, one + "f(1)\n")]
    assert dumps[0] == dumps[1] != dumps[2]
    source = "import lab.claims\ndef f():\n    from lab.claims import labs\n    import json\n"
    files = provenance.imported_by(provenance.tree_of(source))
    names = {str(file.relative_to(ROOT)) for file in files}
    assert names == {"lab/claims/__init__.py", "lab/claims/labs.py"}


def test_the_report_is_markdown_of_what_is_kept(claims, tmp_path, capsys):
    claims.results["S-T4"] = finding(50, shows=False)
    kept = run(tmp_path, "--only S-F9,S-T4")
    printed = capsys.readouterr().out
    page = (tmp_path / "paper.md").read_text("utf-8")
    summary, numbers, timed, *_ = printed_tables(page)
    assert summary == [
        ["claim", "paper", "here", "verdict"],
        ["[S-T4](#s-t4): time of 8 tokens", "55 ms", "50 ms at tokens 8", "not seen here"],
        ["[S-F9](#s-f9): time of 8 tokens", "55 ms", "55 ms at tokens 8", "as in the paper"],
    ]
    assert numbers == [
        ["number", "of", "paper", "here", "same size?"],
        ["time of 8 tokens", "A6000", "55 ms", "50 ms at tokens 8", "yes, within 2x"],
    ]
    assert timed == [
        ["tokens", "vllm", "dynamic"],
        ["1", "0.50", "1.00"],
        ["2", "-", "-"],
        ["3", "at least 2.50", "-"],
    ]
    for key in kept:
        heading = f'<a id="{key.lower()}"></a>\n\n## {CLAIM[key].name}\n\n{CLAIM[key].sentence}\n\n'
        assert heading in page
        assert kept[key]["command"] == f"`paper --only {key}`"
    verdict = "**not seen here**: 50 < vllm: not at 8; it should be so: No row is computed twice\n"
    reason = "\n\n- 50 < vllm: No row is computed twice.\n\nTime over tokens: ms\n\n| tokens"
    for text in (printed, page):
        assert f"{verdict}\n| number" in text
        assert reason in text
    assert "A machine, threads: 1, torch " in page
    assert "llama-tiny, 10 parameters" in page
    assert "](paper-S-T4.png)" in page
    assert (tmp_path / "paper-S-T4.png").read_bytes().startswith(b"\x89PNG")


def test_nobody_learns_where_files_lie(claims, tmp_path, monkeypatch):
    checkpoint = tmp_path / "a-model"
    model = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(paper, "load_model", lambda *_, **settings: model)
    options = "--device cpu --dtype float32 --max-len 64 --only SS-F10,SS-F12".split()
    directory = tmp_path / "o"
    bench.main(["paper", *options, "--model", str(checkpoint), "--out", str(directory)])
    for name in ("paper.json", "paper.md"):
        text = (directory / name).read_text("utf-8")
        assert "a-model" in text
        assert str(tmp_path) not in text
        assert str(ROOT) not in text


def test_the_index_of_results_is_made_and_what_stands_around_it_stays(
    claims, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(report, "RESULTS", results)
    readme = results / "README.md"
    shutil.copy(ROOT / "results/README.md", readme)
    before, begin, rest = readme.read_text("utf-8").partition(report.BEGIN)
    assert begin and report.END in rest
    after = rest.partition(report.END)[2]
    run(results / "one", "--only SS-F10")
    claims.results["SS-F10"] = finding(9, shows=False)
    run(results / "two", "--only SS-F10,B-1 --quick")
    run(tmp_path / "elsewhere", "--only SS-F12")
    text = readme.read_text("utf-8")
    assert text.startswith(before + begin) and text.endswith(report.END + after)
    tables = text.partition(begin)[2]
    assert re.findall(r"(?m)^### (.*)", text) == ["[one](one/paper.md)", "[two](two/paper.md)"]
    head = ["claim", "paper", "here", "verdict"]
    said = {key: f"{key}: {CLAIM[key].clause}" for key in ("SS-F10", "B-1")}
    assert printed_tables(tables) == [
        [head, [said["SS-F10"], "55 ms", "55 ms at tokens 8", "as in the paper"]],
        [
            head,
            [said["SS-F10"], "55 ms", "9 ms at tokens 8", "not seen here"],
            [said["B-1"], "55 ms", "55 ms at tokens 8", "as in the paper"],
        ],
    ]
    assert max(map(len, tables.splitlines())) <= 140
    kept = json.loads((results / "two/paper.json").read_text("utf-8"))["claims"]
    assert kept["B-1"]["command"] == "`paper --only B-1 --quick`"
    run(results / "two", "--only B-1 --quick")  # nothing is new
    assert readme.read_text("utf-8") == text


def test_several_ranks_are_refused(claims, tmp_path):
    with pytest.raises(ValueError, match="^--tp, --pp: claims are of one device"):
        run(tmp_path / "new", "--tp 2 --only SS-F10")
    assert claims.take() == [] and not (tmp_path / "new").exists()


def test_a_claim_that_failed_shows_no_older_picture(claims, tmp_path):
    run(tmp_path, "--only SS-F10")
    assert "](paper-SS-F10.png)" in (tmp_path / "paper.md").read_text("utf-8")
    claims.results["SS-F10"] = ValueError("no memory")
    run(tmp_path, "--only SS-F10 --fresh")
    assert "](paper-SS-F10.png)" not in (tmp_path / "paper.md").read_text("utf-8")


def test_a_directory_that_cannot_be_written_is_one_line(claims, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    for where in (tmp_path / "file", "/proc/nothing"):
        with pytest.raises(OSError):
            run(Path(where), "--only SS-F10")
    (tmp_path / "full/paper.part.json").mkdir(parents=True)
    with pytest.raises(OSError):
        run(tmp_path / "full", "--only SS-F10")
    assert claims.take() == []


def test_the_name_of_a_device():
    assert timing.device_name(torch.device("cpu"))


def hollow(axis):
    """The places of the paper's numbers."""
    lines = [line for line in axis.lines if line.get_markerfacecolor() == "white"]
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines]


def test_few_sizes_and_names_are_bars_with_the_papers_numbers_on_them(tmp_path):
    found = Finding("A6000")
    table = found.table(x="context", y="gain")
    table.add(2048, {"orca": 1.0, "sarathi": 1.25})
    table.add("all", {"sarathi": Bounded(1.5, "at least")})
    found.publish("at 2K", 1.33, table["sarathi"], 2048)
    found.publish("in another table", 1.5, 0.5 * table["sarathi"], 2048, device="A100")
    in_seconds = replace(table["orca"], spec=".2f")
    found.publish("seconds of another machine", 9, in_seconds, 2048, within=None, unit=" s")
    figure = draw(found, "S-T4: gains", tmp_path / "p.png", {**MACHINE, "threads": 2})
    panel, strip = figure.get_axes()
    assert sorted(bar.get_width() for bar in panel.patches) == [1.0, 1.25, 1.5]
    ((x, y),) = hollow(panel)
    (bar,) = [bar for bar in panel.patches if bar.get_width() == 1.25]
    assert x == 1.33
    assert y == pytest.approx(bar.get_y() + bar.get_height() / 2)
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["2,048", "all"]
    texts = [text.get_text() for text in panel.texts]
    assert "1.25x \N{WHITE DIAMOND}1.33x" in texts
    assert "\N{GREATER-THAN OR EQUAL TO} 1.50x" in texts
    assert [tick.get_text() for tick in strip.get_yticklabels()] == ["in another table"]
    assert hollow(strip) == [(1.5, 0)]
    assert strip.patches[0].get_width() == 0.625
    assert "hollow: published, SARATHI: A6000; A100" in figure.get_suptitle()


@pytest.mark.parametrize("published, marks", [(19.0, 1), (21.0, 0)])
def test_a_paper_number_far_outside_a_plot_does_not_squeeze_it(published, marks, tmp_path):
    found = Finding()
    table = found.table(x="batch", y="times", spec=".0fx")
    table.add(1, {"sarathi": 5.0})
    found.publish("far", published, table["sarathi"], 1)
    figure = draw(found, "S-F8: x", tmp_path / "p.png", MACHINE)
    assert len(hollow(figure.get_axes()[0])) == marks


@pytest.fixture
def tiny(monkeypatch):
    """A RealLab of a tiny model that serves requests of 64 tokens."""
    options = parse(TINY)
    model = paper.load_model(options.model, options.max_len, positions_from="--max-len")
    monkeypatch.setattr(RealLab, "_config", lambda *_: SMALL)
    return RealLab(model, machine_info(), options.model, "cpu")


def machines_of(lab):
    """The kinds of the machines that were made for claims."""
    kinds = [type(result).__name__ for result in lab.results.values()]
    return [kind for kind in kinds if kind.endswith("Machine")]


@pytest.mark.slow
def test_serving_claims_share_a_machine_and_print_nothing(tiny, capsys):
    load = {"lengths": "8+4", "requests": 6, "batch": 4}
    for multiple in ("50x", "100x"):
        found = tiny.capacity(["vllm"], slo=multiple, **load)
        assert found.qps.keys() == {"vllm"} and found.slo_s > 0
    assert machines_of(tiny) == ["RealMachine"]
    served = tiny.serve(["vllm", "sarathi-serve:8"], **load)
    again = tiny.serve(["vllm", "orca"], **load)
    assert again.records["vllm"] is served.records["vllm"]  # policies run one after another
    busier = tiny.serve(["vllm"], load=1.0, **load)
    assert busier.records["vllm"] is not served.records["vllm"]
    assert list(served.runs) == ["vllm", "sarathi-serve:8"]
    assert served.runs["vllm"].finished == 6
    gains = tiny.gains(["request-level", "sarathi:2"], Lockstep(16, 2, 4, 5), pd_ratio=4)
    assert gains.keys() == {"request-level", "sarathi:2"} and gains["request-level"] == 1
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_token_budgets_meet_the_slos_that_they_are_for(tiny, monkeypatch):
    def time_by_law(runner, cases, repeats=2):
        return [Profiled(*case, seconds=1e-3 * (2 + case[0])) for case in cases]

    monkeypatch.setattr(token_budget, "time_iterations", time_by_law)
    monkeypatch.setattr(timing.Probe, "take", lambda *_: 0.0)
    found = tiny.token_budgets(["1x", "2x"], decodes=4, max_budget=64, tile=4)
    assert found.slos_s["1x"] == pytest.approx(0.034)  # 32 decodes
    assert found.budgets == {"1x": 32, "2x": 64} and not found.busy
    assert found.budgets["2x"].bound == "at least" and not found.budgets["1x"].bound
    assert tiny.token_budgets(["1x", "2x"], decodes=4, max_budget=64, tile=4) is found


def test_the_papers_number_stands_beside_ours_in_a_table():
    found = Finding(tables=[PLOT])
    found.publish("first", 0.7, PLOT["vllm"], 1, unit=" ms")
    found.publish("of no table", 0.9, 1 * PLOT["dynamic"], 1)
    texts = found.numbers_in(PLOT)
    assert texts == {("vllm", 1): "0.70 ms"}
    assert "| 0.50 (paper: 0.70 ms) |" in PLOT.markdown(texts)


def test_what_is_kept_of_a_claim_is_numbers_from_which_all_is_printed():
    found = finding(Bounded(50.0, "at least"), shows=False)
    found.publish("a name", Bounded(2.5, "below"), PLOT["vllm"], 3)
    kept = json.loads(json.dumps(found.to_json()))
    again = Finding.from_json(kept)
    assert again.tables[0].lines == LINES and type(again.tables[0].xs[0]) is int
    assert again.tables[0].lines["vllm"][3].bound == "at least"
    assert (again.checks, again.published) == (found.checks, found.published)
    assert again.why(busy=False) == found.why(busy=False) and again.published[1].paper.bound


def test_a_claim_says_what_it_says_in_a_dozen_words():
    for claim in CLAIMS:
        assert 4 <= len(claim.clause.split()) <= 20
        assert len(f"{claim.id}: {claim.clause}") <= 90
