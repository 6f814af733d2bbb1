"""`bench.py paper` keeps what is done, goes on where it was, and reports it: of made-up claims.

What it simulates is tested in test_report.py, the claims themselves in tests of their own."""

import json
import re
import shutil
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from experiments import measure
from experiments.claims import Finding, Panel
from simulator import report
from tests.test_report import printed_tables

ROOT = Path(__file__).parents[1]
TINY = "paper --model llama-tiny --device cpu --dtype float32 --max-len 64".split()
LINES = {"vllm": [(1, 0.5), (2, None), (3, 2.5)], "dynamic": [(1, 1.0)]}
PANEL = Panel("Time over tokens", "tokens", "ms", LINES, "x")
TABLE = ("What was timed", {"tokens": "", "ms": ".2f"}, [[1, 0.5], [2, "at least 2.00"]])
IDS = "S-F3 SS-F4 S-F4a SS-F3 S-F4b SS-F5 S-F7 SS-F6 S-F8 S-T2 S-T4 S-F9 S-F11 S-F10 S-F13 SS-F7 "
IDS += "SS-F9 SS-F14 SS-F10 SS-F11 SS-F12 SS-T4 B-1 B-2 B-7"  # of the issue: all on one device


class Claims:
    """Made-up claims. `does` maps some to what happens: a Finding, or an error that is raised; all
    others hold. `seen` lists the claims that were measured, with their Setups."""

    def __init__(self):
        self.does, self.seen = {}, []

    def __getitem__(self, key):
        return lambda setup: self.measure(key, setup)

    def measure(self, key, setup):
        self.seen.append((key, setup))
        its = self.does.get(key, Finding([TABLE], "55 ms", True))
        if isinstance(its, Finding):
            return its
        raise its

    def take(self):
        """The names of those that were measured since this was asked."""
        names = [key for key, _ in self.seen]
        self.seen.clear()
        return names


@pytest.fixture
def claims(monkeypatch):
    its = Claims()
    monkeypatch.setattr(report, "device_claims", lambda: its)
    machine = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "ridge_tokens": 1.0, "busy": False}
    machine |= {"device": "A machine", "threads": 1, "torch": "2", "compiled": False}

    def describe(model, args, rows):
        its = {"dtype": args.dtype, "model": args.init_from or args.model, "parameters": 10}
        return machine | its

    monkeypatch.setattr(report, "describe_machine", describe)
    return its


def run(directory, words):
    """Run the command; what paper.json says then of each claim."""
    bench.main([*TINY, "--out", str(directory), *words.split()])
    return json.loads((directory / "paper.json").read_text())["claims"]


def test_what_the_papers_say_is_there_for_every_claim():
    published = tomllib.loads((ROOT / "experiments/published.toml").read_text("utf-8"))
    named = [name for key, its in published.items() for name in [key, *its.get("also", [])]]
    assert sorted(named) == sorted(IDS.split())
    for its in published.values():
        assert all(its[name] for name in ("title", "paper", "shape"))
        quick, full = its["seconds"]
        assert 0 < quick <= full
    for which, minutes in ((0, 6), (1, 45)):  # on two CPU cores, in all
        assert sum(its["seconds"][which] for its in report.CLAIMS.values()) <= 60 * minutes
    for its in report.SIMULATED.values():
        assert all(its[name] for name in ("title", "paper", "also"))
        assert callable(getattr(report.papers, its["function"]))
    assert not report.SIMULATED.keys() & report.MEASURED.keys()
    assert not {*IDS.split()} & report.SIMULATED.keys()


@pytest.mark.skipif(not find_spec("experiments.paper_loads"), reason="no claims are there yet")
def test_every_claim_has_a_function():
    modules = map(import_module, ("experiments.paper_iterations", "experiments.paper_loads"))
    found = [key for module in modules for key in module.CLAIMS]
    assert sorted(found) == sorted(report.MEASURED)


ONLY = {
    "S-F9": ["S-F9"],
    "SS-F4": ["S-F3"],  # which covers it
    "S-F4a,SS-F3,S-F4a": ["S-F4a"],
    "B": ["B-1", "B-2", "B-7"],
    "S-F12": ["pipeline"],
    "SS-F10, capacity": ["SS-F10", "capacity"],
    "S-F7": ["S-F7"],  # that is simulated, too
    "post,simulated,SS-F6": ["post", *(key for key in report.SIMULATED if key != "post"), "S-F7"],
}


@pytest.mark.parametrize("text, keys", ONLY.items())
def test_only_takes_ids_names_and_beginnings(text, keys):
    assert report.claims(text) == keys


@pytest.mark.parametrize("word", ["S-F99", "s-f9", "S-F", "", "sim", "simulated-", "B-1x"])
def test_a_wrong_id_is_one_line(word, capsys):
    with pytest.raises(SystemExit) as done:
        bench.main(["paper", "--only", f"S-F9,{word}"])
    out, err = capsys.readouterr()
    assert (done.value.code, out, err.count("\n")) == (2, "", 1)
    assert f"error: --only {word}: no such claim; --list names them" in err


SLUGS = {
    ("AMD EPYC", 2): "epyc-2-threads",
    ("AMD EPYC 7B13 64-Core Processor", 1): "epyc-7b13-1-thread",
    ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 8): "xeon-platinum-8481c-8-threads",
    ("AMD Ryzen 9 7950X 16-Core Processor", 16): "ryzen-9-7950x-16-threads",
    ("NVIDIA H100 80GB HBM3", 0): "h100-80gb-hbm3",
    ("NVIDIA GeForce RTX 4090", 0): "geforce-rtx-4090",
    ("Apple M2", 8): "apple-m2-8-threads",
    ("AMD Processor", 2): "cpu-2-threads",
    ("../../Odd (TM) ünit/x", 3): "odd-nit-x-3-threads",
}


@pytest.mark.parametrize("machine, slug", SLUGS.items())
def test_a_machine_has_a_folder(machine, slug):
    assert report.machine_slug(*machine) == slug


def test_results_are_kept_by_machine(claims, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "device_name", lambda device: "AMD EPYC")
    bench.main([*TINY, "--only", "S-F7"])
    (folder,) = Path("results").iterdir()
    assert (
        folder.name == f"epyc-{torch.get_num_threads()}-thread{'s' * (torch.get_num_threads() > 1)}"
    )


def test_what_is_done_is_not_measured_again(claims, tmp_path, capsys):
    records = run(tmp_path, "--only S-F7,S-F3")
    assert claims.take() == ["S-F7", "S-F3"] and list(records) == ["S-F3", "S-F7"]
    assert run(tmp_path, "--only S-F7,B-1,S-F3").keys() == {"S-F3", "S-F7", "B-1"}
    assert claims.take() == ["B-1"] and "1 of 3 claims are left to do" in capsys.readouterr().out
    again = run(tmp_path, "--only SS-F6")  # that is S-F7
    assert claims.take() == [] and again["S-F7"] == records["S-F7"]


def test_fresh_measures_again_what_is_asked_for_and_keeps_the_rest(claims, tmp_path):
    records = run(tmp_path, "--only S-F7,S-F3")
    claims.take()
    claims.does["S-F7"] = Finding([], "60 ms", False, "why not")
    fresh = run(tmp_path, "--only S-F7 --fresh")
    assert claims.take() == ["S-F7"] and fresh["S-F7"]["here"] == "60 ms"
    assert fresh["S-F3"] == records["S-F3"]


CHANGES = ["--dtype bfloat16", "--seed 1", "--max-len 65", "--attention sdpa", "--model gpt2"]


@pytest.mark.parametrize("change", CHANGES)
def test_another_option_is_another_measurement(change, claims, tmp_path):
    run(tmp_path, "--only S-F7")
    claims.take()
    run(tmp_path, f"--only S-F7 {change}")
    assert claims.take() == ["S-F7"]
    run(tmp_path, f"--only S-F7 {change}")
    assert claims.take() == []


def test_another_machine_or_torch_is_another_measurement(claims, tmp_path, monkeypatch):
    run(tmp_path, "--only S-F7")
    monkeypatch.setattr(report, "device_name", lambda device: "another")
    run(tmp_path, "--only S-F7")
    monkeypatch.setattr(torch, "__version__", "9.9")
    kept = run(tmp_path, "--only S-F7")
    assert claims.take() == 3 * ["S-F7"]
    options = kept["S-F7"]["options"]
    assert (options["device"], options["torch"]) == ("another", "9.9")


def test_a_full_run_is_good_for_a_quick_one_but_not_the_other_way_round(claims, tmp_path):
    run(tmp_path, "--only S-F7 --quick")
    ((_, setup),) = claims.seen
    assert setup.args.quick and setup.args.seed == 0 and setup.model.config.n_layer
    run(tmp_path, "--only S-F7")
    run(tmp_path, "--only S-F7")
    kept = run(tmp_path, "--only S-F7 --quick")
    assert claims.take() == ["S-F7", "S-F7"] and kept["S-F7"]["options"]["quick"] is False


def test_what_was_busy_or_failed_is_tried_again(claims, tmp_path, capsys):
    claims.does["S-F3"] = Finding([TABLE], "1", False, "noise", busy=True)
    claims.does["S-F7"] = ValueError("--batch 18: takes 40 GB, 20 GB are free\nand more")
    claims.does["S-F8"] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    records = run(tmp_path, "--only S-F3,S-F7,S-F8,B-1")
    assert claims.take() == ["S-F3", "S-F7", "S-F8", "B-1"]
    assert records["S-F7"]["why"] == "--batch 18: takes 40 GB, 20 GB are free"
    assert records["S-F8"]["why"].startswith("CUDA out of memory")
    text = capsys.readouterr().out
    verdicts = re.findall(r"- verdict: (.*)", text)
    assert verdicts == ["too busy to tell", "not measured", "not measured", "holds"]
    assert "- why: --batch 18: takes 40 GB, 20 GB are free\n" in text
    claims.does.clear()
    records = run(tmp_path, "--only S-F3,S-F7,S-F8,B-1")
    assert claims.take() == ["S-F3", "S-F7", "S-F8"] and all(
        r["verdict"] == "holds" for r in records.values()
    )


def test_an_error_of_ours_is_not_hidden(claims, tmp_path):
    claims.does["S-F7"] = RuntimeError("nothing to do with memory")
    with pytest.raises(RuntimeError):
        run(tmp_path, "--only S-F3,S-F7")
    assert list(json.loads((tmp_path / "paper.json").read_text())["claims"]) == ["S-F3"]


def test_an_interrupted_run_keeps_what_is_done_and_goes_on_there(claims, tmp_path, capsys):
    claims.does["S-F7"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--only S-F3,S-F7,S-F8")
    assert claims.take() == ["S-F3", "S-F7"]
    assert f"{tmp_path}: 3 of 3 claims are left to do\n" in capsys.readouterr().out
    assert "S-F3" in (tmp_path / "paper.md").read_text()
    claims.does.clear()
    assert list(run(tmp_path, "--only S-F3,S-F7,S-F8")) == ["S-F3", "S-F7", "S-F8"]
    assert claims.take() == ["S-F7", "S-F8"]


def test_no_model_is_loaded_for_what_needs_none(claims, tmp_path, monkeypatch):
    run(tmp_path, "--only S-F7")
    monkeypatch.setattr(report.options, "load_model", lambda *_: pytest.fail("loaded"))
    run(tmp_path, "--only S-F7")
    assert "bubbles" in run(tmp_path, "--only S-F7,bubbles --processes 1")


def test_the_list_says_what_there_is_and_what_is_done(claims, tmp_path, capsys):
    run(tmp_path, "--only S-F7 --quick")
    claims.take(), capsys.readouterr()
    before = (tmp_path / "paper.json").stat().st_mtime_ns
    bench.main([*TINY, "--out", str(tmp_path), "--list", "--quick"])
    text = capsys.readouterr().out
    title, (quick, full) = report.NAMES["S-F7"], report.CLAIMS["S-F7"]["seconds"]
    heads = [line for line in text.splitlines() if line[0] != " "]
    done = [line for line in heads if line.endswith(", done)")]
    assert len(heads) == len(report.CLAIMS) and done == [f"{title} ({quick} s, done)"]
    assert all(its["paper"] in text for its in report.CLAIMS.values())
    bench.main([*TINY, "--out", str(tmp_path / "new"), "--list", "--only", "S-F7"])
    assert f"{title} ({full} s)\n" in capsys.readouterr().out
    assert claims.take() == [] and not (tmp_path / "new").exists()
    assert (tmp_path / "paper.json").stat().st_mtime_ns == before


def test_the_report_is_markdown_of_what_is_kept(claims, tmp_path, capsys):
    claims.does["S-F7"] = Finding([TABLE], "50 / 60 ms", False, "there are no tiles", [PANEL])
    claims.does["S-F8"] = Finding([], "3x", None)
    kept = run(tmp_path, "--only S-F8,S-F7,bubbles --processes 1")
    text, page = capsys.readouterr().out, (tmp_path / "paper.md").read_text()
    summary, timed, bubbles = printed_tables(page)
    assert summary[0] == ["claim", "command", "paper", "here", "verdict"]
    said, names = report.CLAIMS, [report.NAMES[key] for key in ("S-F7", "S-F8", "bubbles")]
    found = [("50 / 60 ms", "does not hold"), ("3x", "see the numbers"), ("-", "see the numbers")]
    commands = [f"`paper --only {key}`" for key in kept]
    papers = [said[key]["paper"] for key in kept]
    assert [tuple(row) for row in summary[1:]] == [
        (*words, *its) for *words, its in zip(names, commands, papers, found, strict=True)
    ]
    said = said["S-F7"]
    assert timed == [["tokens", "ms"], ["1", "0.50"], ["2", "at least 2.00"]]
    assert [row[0] for row in bubbles] == ["ms", "orca-best", "sarathi-serve"]
    lines = f"- paper: {said['paper']}\n- must show: {said['shape']}\n- here: 50 / 60 ms\n"
    lines += "- verdict: does not hold\n- why: there are no tiles\n\nWhat was timed\n\n| tokens"
    assert lines in text and lines in page
    titles = re.findall(r"(?m)^## (.*)", page)
    assert titles == [row[0] for row in summary[1:]]
    assert "A machine, threads: 1, torch 2\nllama-tiny, 10 parameters, float32\n" in page
    for name in ("paper-S-F7.png", "paper-bubbles.png"):
        assert f"]({name})" in page and (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "paper-S-F8.png" not in page
    assert kept["S-F7"]["panels"][0] == json.loads(json.dumps(PANEL))


def test_nobody_learns_where_files_lie(claims, tmp_path):
    checkpoint = tmp_path / "a-model"
    args = ["paper", "--device", "cpu", "--dtype", "float32", "--max-len", "64", "--init-from"]
    model = SimpleNamespace(device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.options, "load_model", lambda args, length: model)
        bench.main([*args, str(checkpoint), "--out", str(tmp_path / "o"), "--only", "S-F7,S-F8"])
    for name in ("paper.json", "paper.md"):
        text = (tmp_path / "o" / name).read_text()
        assert "a-model" in text and str(tmp_path) not in text and str(ROOT) not in text


def test_the_index_of_results_is_made_and_what_stands_around_it_stays(
    claims, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(report, "RESULTS", results)
    readme = results / "README.md"
    shutil.copy(ROOT / "results/README.md", readme)
    before, begin, rest = readme.read_text().partition(report.BEGIN)
    assert begin and report.END in rest
    after = rest.partition(report.END)[2]
    run(results / "one", "--only S-F7")
    claims.does["S-F7"] = Finding([], "none", False, "why")
    run(results / "two", "--only S-F7,B-1 --quick")
    run(tmp_path / "elsewhere", "--only S-F8")
    text = readme.read_text()
    assert text.startswith(before + begin) and text.endswith(report.END + after)
    one, two = printed_tables(text.partition(begin)[2])
    heads = ["[one](one/paper.md)", "[two](two/paper.md)"]
    assert re.findall(r"(?m)^### (.*)", text) == heads and one[0] == two[0]
    assert one[0] == ["claim", "command", "paper", "here", "verdict"]
    cells = [report.NAMES["S-F7"], "`paper --only S-F7`"]
    assert one[1:] == [[*cells, report.CLAIMS["S-F7"]["paper"], "55 ms", "holds"]]
    assert [row[1] for row in two[1:]] == [
        "`paper --only S-F7 --quick`",
        "`paper --only B-1 --quick`",
    ]
    assert two[1][-2:] == ["none", "does not hold"]
    run(results / "two", "--only B-1 --quick")  # nothing is new
    assert readme.read_text() == text


def test_several_ranks_are_refused(claims, tmp_path):
    with pytest.raises(ValueError, match="^--tp, --pp: claims are of one device"):
        run(tmp_path / "new", "--tp 2 --only S-F7")
    assert claims.take() == [] and not (tmp_path / "new").exists()


def test_a_claim_that_failed_shows_no_older_picture(claims, tmp_path):
    claims.does["S-F7"] = Finding([], "1", True, panels=[PANEL])
    assert run(tmp_path, "--only S-F7")["S-F7"]["picture"] == "paper-S-F7.png"
    claims.does["S-F7"] = ValueError("no memory")
    assert run(tmp_path, "--only S-F7 --fresh")["S-F7"]["picture"] == ""
    assert "](" not in (tmp_path / "paper.md").read_text()


def test_a_directory_that_cannot_be_written_or_read_is_one_line(claims, tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", "/proc/nothing"):
        with pytest.raises(OSError):
            run(Path(where), "--only S-F7")
    (tmp_path / "full/paper.json.part").mkdir(parents=True)
    with pytest.raises(OSError):
        run(tmp_path / "full", "--only S-F7")
    assert claims.take() == []
    (tmp_path / "paper.json").write_text("{")
    with pytest.raises(ValueError, match=f"^{tmp_path}/paper.json: "):
        run(tmp_path, "--only S-F7")


def test_the_name_of_a_device():
    assert measure.device_name(torch.device("cpu"))


def test_panels_are_drawn_side_by_side(tmp_path):
    from views.panels import plot_panels

    more = PANEL._replace(title="Another", lines={"vllm": [(1, 4.0)], "own": [(1, 2.0), (2, 3.0)]})
    panels = [PANEL, more, PANEL]
    machine = {"model": "m", "dtype": "float32", "device": "D", "threads": 2}
    figure = plot_panels(panels, "S-F7", tmp_path / "p.png", machine)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "Time over tokens",
        "Another",
        "Time over tokens",
    ]
    first, second, _ = figure.axes
    assert (first.get_xscale(), first.get_yscale()) == ("log", "linear")
    assert (first.get_xlabel(), first.get_ylabel()) == ("tokens", "ms")
    x, y = first.lines[0].get_data(orig=False)
    assert list(x) == [1, 2, 3] and (y[0], y[2]) == (0.5, 2.5) and y[1] != y[1]  # not a number
    assert first.lines[0].get_color() == second.lines[0].get_color()
    assert first.lines[0].get_marker() == second.lines[0].get_marker()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["vllm", "dynamic", "own"]
    looks = {
        (line.get_color(), line.get_marker()) for axis in (first, second) for line in axis.lines
    }
    assert (
        len(looks) == 3
        and "S-F7" in figure.get_suptitle()
        and "D, 2 threads" in figure.get_suptitle()
    )
    (alone,) = plot_panels(panels[:1], "", tmp_path / "p.png").axes
    assert alone.get_title(loc="left") == "Time over tokens"
