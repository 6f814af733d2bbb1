"""`bench.py paper` keeps what is done, goes on where it was, and reports it: of made-up claims.

The claims themselves are tested in test_claims.py."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from cli import options
from lab.commands import paper, serving
from lab.measure import timing as measure
from lab.measure.capacity import Bounded
from lab.papers.claims import Finding, Table
from tests.test_simulate import printed_tables

ROOT = Path(__file__).parents[1]
TINY = "paper --model llama-tiny --device cpu --dtype float32 --max-len 64".split()
LINES = {"vllm": {1: 0.5, 2: None, 3: Bounded(2.5, "at least")}, "dynamic": {1: 1.0}}
TABLE = Table("Time over tokens", "tokens", "ms", "x", ".2f", LINES)


class Claims:
    """Made-up claims. `does` maps some to what happens: a Finding, or an error that is raised; all
    others hold. `seen` lists the claims that were measured, with their Setups."""

    def __init__(self):
        self.does, self.seen = {}, []

    def measure(self, its, setup):
        (key,) = (key for key, claim in paper.CLAIMS.items() if claim is its)
        self.seen.append((key, setup))
        its = self.does.get(key, Finding([TABLE], "55 ms", [], False))
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
    monkeypatch.setattr(paper.claims, "measure", its.measure)
    machine = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "ridge_tokens": 1.0, "busy": False}
    machine |= {"threads": 1, "compiled": False}

    def describe(model, args, rows):
        its = {"dtype": args.dtype, "model": args.init_from or args.model, "parameters": 10}
        its |= {"device": measure.device_name(model.device), "torch": torch.__version__}
        return machine | its

    monkeypatch.setattr(measure, "describe_machine", describe)
    monkeypatch.setattr(measure, "device_name", lambda device: "A machine")
    return its


def run(directory, words):
    """Run the command; what paper.json says then of each claim."""
    bench.main([*TINY, "--out", str(directory), *words.split()])
    return json.loads((directory / "paper.json").read_text())["claims"]


ONLY = {
    "S-F9": ["S-F9"],
    "S-T2": ["S-F8"],  # which covers it
    "SS-F10,SS-F11,SS-F10": ["SS-F10"],
    "B-*": ["B-1", "B-2", "B-7"],
    "SS-F11, S-F9": ["SS-F10", "S-F9"],
    "S-F?": ["S-F3", "S-F7", "S-F8", "S-F9"],
}


@pytest.mark.parametrize("text, keys", ONLY.items())
def test_only_takes_ids_and_patterns(text, keys):
    assert paper.some_claims(text) == keys


@pytest.mark.parametrize("word", ["S-F99", "s-f9", "S-F", "", "sim", "B-1x"])
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
    assert paper.folder_of(*machine) == slug


def test_results_are_kept_by_machine(claims, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    (tmp_path / "README.md").write_text(paper.BEGIN + paper.END)
    monkeypatch.setattr(measure, "device_name", lambda device: "AMD EPYC")
    bench.main([*TINY, "--threads", "2", "--only", "SS-F10"])
    assert [its.name for its in tmp_path.iterdir() if its.is_dir()] == ["epyc-2-threads"]


def test_what_is_done_is_not_measured_again(claims, tmp_path, capsys):
    records = run(tmp_path, "--only SS-F10,S-F8")
    assert claims.take() == ["SS-F10", "S-F8"] and list(records) == ["S-F8", "SS-F10"]
    assert run(tmp_path, "--only SS-F10,B-1,S-F8").keys() == {"S-F8", "SS-F10", "B-1"}
    assert claims.take() == ["B-1"] and "1 of 3 claims left to do" in capsys.readouterr().out
    again = run(tmp_path, "--only SS-F11")  # that is SS-F10
    assert claims.take() == [] and again["SS-F10"] == records["SS-F10"]


def test_fresh_measures_again_what_is_asked_for_and_keeps_the_rest(claims, tmp_path):
    records = run(tmp_path, "--only SS-F10,S-F8")
    claims.take()
    claims.does["SS-F10"] = Finding([TABLE], "60 ms", ["why not"], False)
    fresh = run(tmp_path, "--only SS-F10 --fresh")
    assert claims.take() == ["SS-F10"] and fresh["SS-F10"]["here"] == "60 ms"
    assert fresh["S-F8"] == records["S-F8"]


CHANGES = ["--dtype bfloat16", "--seed 1", "--attention sdpa", "--model gpt2"]


@pytest.mark.parametrize("change", CHANGES)
def test_another_option_is_another_measurement(change, claims, tmp_path):
    run(tmp_path, "--only SS-F10")
    claims.take()
    run(tmp_path, f"--only SS-F10 {change}")
    assert claims.take() == ["SS-F10"]
    run(tmp_path, f"--only SS-F10 {change}")
    assert claims.take() == []


def test_another_machine_or_torch_is_another_measurement(claims, tmp_path, monkeypatch):
    run(tmp_path, "--only SS-F10")
    monkeypatch.setattr(measure, "device_name", lambda device: "another")
    run(tmp_path, "--only SS-F10")
    monkeypatch.setattr(torch, "__version__", "9.9")
    kept = run(tmp_path, "--only SS-F10")
    assert claims.take() == 3 * ["SS-F10"]
    options = kept["SS-F10"]["options"]
    assert (options["device"], options["torch"]) == ("another", "9.9")


def test_a_full_run_is_good_for_a_quick_one_but_not_the_other_way_round(claims, tmp_path):
    run(tmp_path, "--only SS-F10 --quick")
    ((_, setup),) = claims.seen
    assert setup.size == "quick" and "--seed=0" in setup.options and setup.model.config.n_layer
    run(tmp_path, "--only SS-F10")
    run(tmp_path, "--only SS-F10")
    kept = run(tmp_path, "--only SS-F10 --quick")
    assert claims.take() == ["SS-F10", "SS-F10"] and kept["SS-F10"]["options"]["quick"] is False


def test_what_was_busy_or_failed_is_tried_again(claims, tmp_path, capsys):
    claims.does["S-F8"] = Finding([TABLE], "1", ["noise"], True)
    claims.does["SS-F10"] = ValueError("--batch 18: takes 40 GB, 20 GB are free\nand more")
    claims.does["SS-F12"] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    records = run(tmp_path, "--only S-F8,SS-F10,SS-F12,B-1")
    assert claims.take() == ["S-F8", "SS-F10", "SS-F12", "B-1"]
    assert records["SS-F10"]["why"] == "--batch 18: takes 40 GB, 20 GB are free"
    assert records["SS-F12"]["why"].startswith("CUDA out of memory")
    text = capsys.readouterr().out
    verdicts = re.findall(r"- verdict: (.*)", text)
    assert verdicts == ["too busy to tell", "not measured", "not measured", "holds"]
    assert "- why: --batch 18: takes 40 GB, 20 GB are free\n" in text
    claims.does.clear()
    records = run(tmp_path, "--only S-F8,SS-F10,SS-F12,B-1")
    assert claims.take() == ["S-F8", "SS-F10", "SS-F12"] and all(
        r["verdict"] == "holds" for r in records.values()
    )


def test_an_error_of_ours_is_not_hidden(claims, tmp_path):
    claims.does["SS-F10"] = RuntimeError("nothing to do with memory")
    with pytest.raises(RuntimeError):
        run(tmp_path, "--only S-F8,SS-F10")
    assert list(json.loads((tmp_path / "paper.json").read_text())["claims"]) == ["S-F8"]


def test_an_interrupted_run_keeps_what_is_done_and_goes_on_there(claims, tmp_path, capsys):
    claims.does["SS-F10"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--only S-F8,SS-F10,SS-F12")
    assert claims.take() == ["S-F8", "SS-F10"]
    assert "3 of 3 claims left to do\n" in capsys.readouterr().out
    assert "S-F8" in (tmp_path / "paper.md").read_text()
    claims.does.clear()
    assert list(run(tmp_path, "--only S-F8,SS-F10,SS-F12")) == ["S-F8", "SS-F10", "SS-F12"]
    assert claims.take() == ["SS-F10", "SS-F12"]


def test_the_list_says_what_there_is_and_what_is_done(claims, tmp_path, capsys):
    run(tmp_path, "--only SS-F10 --quick")
    claims.take(), capsys.readouterr()
    before = (tmp_path / "paper.json").stat().st_mtime_ns
    bench.main([*TINY, "--out", str(tmp_path), "--list", "--quick"])
    text = capsys.readouterr().out
    title, (quick, full) = paper.NAMES["SS-F10"], paper.CLAIMS["SS-F10"]["seconds"]
    heads = [line for line in text.splitlines() if line[0] != " "]
    done = [line for line in heads if line.endswith(", done)")]
    assert len(heads) == len(paper.CLAIMS) and done == [f"{title} ({quick} s, done)"]
    assert all(its["paper"] in text for its in paper.CLAIMS.values())
    bench.main([*TINY, "--out", str(tmp_path / "new"), "--list", "--only", "SS-F10"])
    assert f"{title} ({full} s)\n" in capsys.readouterr().out
    assert claims.take() == [] and not (tmp_path / "new").exists()
    assert (tmp_path / "paper.json").stat().st_mtime_ns == before


def test_the_report_is_markdown_of_what_is_kept(claims, tmp_path, capsys):
    claims.does["S-T4"] = Finding([TABLE], "50 / 60 ms", ["there are no tiles"], False)
    kept = run(tmp_path, "--only S-F9,S-T4")
    text, page = capsys.readouterr().out, (tmp_path / "paper.md").read_text()
    summary, timed, _ = printed_tables(page)
    said, names = paper.CLAIMS, [paper.NAMES[key] for key in ("S-T4", "S-F9")]
    found = [("50 / 60 ms", "does not hold"), ("55 ms", "holds")]
    commands = [f"`paper --only {key}`" for key in kept]
    papers = [said[key]["paper"] for key in kept]
    assert summary[0] == ["claim", "command", "paper", "here", "verdict"]
    assert [tuple(row) for row in summary[1:]] == [
        (*words, *its) for *words, its in zip(names, commands, papers, found, strict=True)
    ]
    assert timed[0] == ["tokens", "vllm", "dynamic"]
    assert timed[1:] == [["1", "0.50", "1.00"], ["2", "-", "-"], ["3", "at least 2.50", "-"]]
    lines = f"- paper: {said['S-T4']['paper']}\n- must show: 1.02 < sarathi\n"
    lines += "- here: 50 / 60 ms\n- verdict: does not hold\n- why: there are no tiles; "
    lines += said["S-T4"]["because"].format(ridge_tokens=1)
    lines += "\n\nTime over tokens: ms\n\n| tokens"
    assert lines in text and lines in page
    assert re.findall(r"(?m)^## (.*)", page) == names
    assert "A machine, threads: 1, torch " in page and "llama-tiny, 10 parameters" in page
    assert "](paper-S-T4.png)" in page
    assert (tmp_path / "paper-S-T4.png").read_bytes().startswith(b"\x89PNG")
    (its,) = kept["S-T4"]["tables"]
    assert its["title"] == "Time over tokens"
    assert its["lines"]["vllm"] == {"1": 0.5, "2": None, "3": 2.5}


def test_nobody_learns_where_files_lie(claims, tmp_path):
    checkpoint = tmp_path / "a-model"
    args = ["paper", "--device", "cpu", "--dtype", "float32", "--max-len", "64", "--init-from"]
    model = SimpleNamespace(device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper.options, "load_model", lambda args, length: model)
        bench.main(
            [*args, str(checkpoint), "--out", str(tmp_path / "o"), "--only", "SS-F10,SS-F12"]
        )
    for name in ("paper.json", "paper.md"):
        text = (tmp_path / "o" / name).read_text()
        assert "a-model" in text and str(tmp_path) not in text and str(ROOT) not in text


def test_the_index_of_results_is_made_and_what_stands_around_it_stays(
    claims, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(paper, "RESULTS", results)
    readme = results / "README.md"
    shutil.copy(ROOT / "results/README.md", readme)
    before, begin, rest = readme.read_text().partition(paper.BEGIN)
    assert begin and paper.END in rest
    after = rest.partition(paper.END)[2]
    run(results / "one", "--only SS-F10")
    claims.does["SS-F10"] = Finding([TABLE], "none", ["why"], False)
    run(results / "two", "--only SS-F10,B-1 --quick")
    run(tmp_path / "elsewhere", "--only SS-F12")
    text = readme.read_text()
    assert text.startswith(before + begin) and text.endswith(paper.END + after)
    one, two = printed_tables(text.partition(begin)[2])
    heads = ["[one](one/paper.md)", "[two](two/paper.md)"]
    assert re.findall(r"(?m)^### (.*)", text) == heads and one[0] == two[0]
    assert one[0] == ["claim", "command", "paper", "here", "verdict"]
    cells = [paper.NAMES["SS-F10"], "`paper --only SS-F10`"]
    assert one[1:] == [[*cells, paper.CLAIMS["SS-F10"]["paper"], "55 ms", "holds"]]
    assert [row[1] for row in two[1:]] == [
        "`paper --only SS-F10 --quick`",
        "`paper --only B-1 --quick`",
    ]
    assert two[1][-2:] == ["none", "does not hold"]
    run(results / "two", "--only B-1 --quick")  # nothing is new
    assert readme.read_text() == text


def test_several_ranks_are_refused(claims, tmp_path):
    with pytest.raises(ValueError, match="^--tp, --pp: claims are of one device"):
        run(tmp_path / "new", "--tp 2 --only SS-F10")
    assert claims.take() == [] and not (tmp_path / "new").exists()


def test_a_claim_that_failed_shows_no_older_picture(claims, tmp_path):
    claims.does["SS-F10"] = Finding([TABLE], "1", [], False)
    assert "](paper-SS-F10.png)" in run(tmp_path, "--only SS-F10")["SS-F10"]["text"]
    claims.does["SS-F10"] = ValueError("no memory")
    run(tmp_path, "--only SS-F10 --fresh")
    assert "](" not in (tmp_path / "paper.md").read_text()


def test_a_directory_that_cannot_be_written_is_one_line(claims, tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", "/proc/nothing"):
        with pytest.raises(OSError):
            run(Path(where), "--only SS-F10")
    (tmp_path / "full/paper.json.part").mkdir(parents=True)
    with pytest.raises(OSError):
        run(tmp_path / "full", "--only SS-F10")
    assert claims.take() == []


def test_the_name_of_a_device():
    assert measure.device_name(torch.device("cpu"))


def test_tables_are_drawn_side_by_side(tmp_path):
    from views.panels import plot_panels

    more = TABLE._replace(title="Another", lines={"vllm": {1: 4.0}, "own": {1: 2.0, 2: 3.0}})
    machine = {"model": "m", "dtype": "float32", "device": "D", "threads": 2}
    figure = plot_panels([TABLE, more, TABLE], "SS-F10", tmp_path / "p.png", machine)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["Time over tokens", "Another", "Time over tokens"]
    first, second, _ = figure.axes
    assert (first.get_xscale(), first.get_yscale()) == ("log", "linear")
    assert (first.get_xlabel(), first.get_ylabel()) == ("tokens", "ms")
    x, y = first.lines[0].get_data(orig=False)
    assert list(x) == [1, 2, 3] and (y[0], y[2]) == (0.5, 2.5) and y[1] != y[1]  # not a number
    assert first.lines[0].get_color() == second.lines[0].get_color()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["vllm", "dynamic", "own"]
    title = figure.get_suptitle()
    assert "SS-F10" in title and "D, 2 threads" in title


def test_commands_run_on_the_model_that_is_there_and_what_is_alike_runs_once(monkeypatch, capsys):
    _, args = bench.parse_args(TINY)
    model = options.load_model(args, "max_len")
    its, made = paper.Setup(args, model, {}).bench, []
    monkeypatch.setattr(options, "load_model", lambda *_: pytest.fail("loaded"))
    words = (
        "offline --seq-len 16 --batch 2 --chunk 4 --requests 5 --policies request-level,sarathi:2"
    )
    report = its(words)
    assert report["end_to_end"].keys() == {"request-level", "sarathi:2"}
    assert its(words) is report and capsys.readouterr().out == ""
    real = serving.RealMachine.__init__
    monkeypatch.setattr(
        serving.RealMachine, "__init__", lambda *given: (made.append(1), real(*given))[1]
    )
    load = "--lengths 8+4 --max-len 64 --requests 6 --ratio 2 --policies vllm"
    for multiple in ("50x", "100x"):
        assert its(f"capacity --slo {multiple} {load}")["results"].keys() == {"vllm"}
    assert made == [1]
