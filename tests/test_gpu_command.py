"""`bench.py gpu`: steps that are processes, each with a limit, and a folder that says what is done.

No GPU is needed: one is pretended, and steps are small programs, or the smallest model on a CPU."""

import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

import bench
from lab.commands import gpu
from lab.commands.gpu import DONE, LIMIT_S, Step, all_steps, largest_preset, run_steps
from lab.papers.measured import CLAIMS

MACHINE = {"device": "a GPU", "preset": "llama-tiny"}
A100 = SimpleNamespace(total_memory=80 * 10**9, major=8, minor=0, multi_processor_count=108)


@pytest.fixture
def a100(monkeypatch):
    """A GPU that is pretended."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: A100)


def program(name, text, limit_s=60.0):
    """A step that runs this text in Python."""
    return Step(name, ["-c", textwrap.dedent(text)], limit_s)


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_is_named_and_the_next_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True)"
    steps = [
        program("good", "print('a table')"),
        program("bad", "print('half'); raise SystemExit('error: no memory')"),
        program("slow", f"{deaf}; time.sleep(600)", limit_s=3.0),
        program("last", "print('another')"),
    ]
    outcomes = {}
    run_steps(steps, tmp_path, MACHINE, outcomes)
    assert [outcome.status for outcome in outcomes.values()] == [
        DONE,
        "failed with status 1: error: no memory",
        "timed out after 3 s",
        DONE,
    ]
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert texts == {
        "good.txt": "a table\n",
        "bad.part.txt": "half\n",
        "slow.part.txt": "x\n",
        "last.txt": "another\n",
    }
    readme = (tmp_path / "README.md").read_text()
    assert "[good](good.txt)" in readme and "[slow](slow.part.txt)" in readme
    assert "timed out after 3 s" in readme and "error: no memory" in readme
    assert capsys.readouterr().out.count("\n") == len(steps)

    began = []
    run_steps(steps, tmp_path, MACHINE, outcomes, lambda step, _: began.append(step.name) or DONE)
    assert began == ["bad", "slow"]  # what is done is not run again


def test_a_step_that_runs_out_of_time_may_keep_what_it_has(tmp_path):
    keeps = """
        import signal, time
        signal.signal(15, signal.default_int_handler)
        try:
            print("begun", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("kept")
    """
    assert gpu.run_step(program("long", keeps, limit_s=3.0), tmp_path) == "timed out after 3 s"
    assert (tmp_path / "long.part.txt").read_text() == "begun\nkept\n"


@pytest.mark.usefixtures("a100")
def test_an_interrupt_keeps_what_is_done_and_the_next_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "all_steps", lambda *_: [Step(name, []) for name in "abc"])
    ran = []

    def run_until_b(step, out):
        ran.append(step.name)
        if step.name == "b" and ran.count("b") == 1:
            raise KeyboardInterrupt
        (out / f"{step.name}.txt").write_text("a table")
        return DONE

    monkeypatch.setattr(gpu, "run_step", run_until_b)
    argv = ["gpu", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        bench.main(argv)
    assert capsys.readouterr().out.splitlines()[-1].startswith("interrupted: ")
    steps = json.loads((tmp_path / "machine.json").read_text())["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {"a": DONE, "b": "interrupted"}
    bench.main(argv)
    assert ran == ["a", "b", "b", "c"]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"look at {tmp_path}/README.md")
    bench.main([*argv, "--fresh", "--only", "c"])
    assert ran == ["a", "b", "b", "c", "c"]
    steps = json.loads((tmp_path / "machine.json").read_text())["steps"]
    assert [step["status"] for step in steps.values()] == [DONE] * 3


@pytest.mark.usefixtures("a100")
def test_a_run_with_a_step_that_failed_ends_with_its_name(tmp_path, monkeypatch, capsys):
    steps = [program("bad", "raise SystemExit(3)"), program("good", "print('a table')")]
    monkeypatch.setattr(gpu, "all_steps", lambda *_: steps)
    with pytest.raises(SystemExit) as end:
        bench.main(["gpu", "--out", str(tmp_path)])
    assert end.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("table-2.txt; not done: bad")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device", "cuda:99"], "--device cuda:99: torch .* sees 1 CUDA devices"),
        (["--only", "serve,x"], "--only x: the steps are tests, chunk-256, "),
        (["--preset", "gpt2"], "is of preset llama-tiny, not gpt2; or --fresh"),
    ],
)
@pytest.mark.usefixtures("a100")
def test_what_makes_no_sense_is_refused_before_any_step(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_step", None)
    gpu.write_outcomes(tmp_path, {"device": "A100", "preset": "llama-tiny"}, {})
    with pytest.raises(ValueError, match=message):
        bench.main(["gpu", "--out", str(tmp_path), *words])


@pytest.mark.parametrize("device", ["cpu", "meta", "x"])
def test_a_device_that_is_no_gpu_is_refused(device, capsys):
    with pytest.raises(SystemExit):
        bench.main(["gpu", "--device", device])
    assert f"--device {device}: must be cuda, cuda:1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "gigabytes, preset",
    [
        (15.8, "gpt2-xl"),  # T4
        (25.3, "llama3-8b"),  # RTX 4090
        (42.3, "llama-13b"),  # A100-40
        (51.0, "llama-13b"),  # A6000
        (150.0, "llama-13b"),  # H200: not larger than the papers' on one GPU
        (2.0, "gpt2-medium"),
        (0.1, "llama-160m"),
    ],
)
def test_the_preset_is_the_largest_that_fits(gigabytes, preset):
    assert largest_preset(int(gigabytes * 1e9)) == preset


@pytest.mark.parametrize("preset", ["llama-13b", "gpt2-xl"])
@pytest.mark.usefixtures("a100")
def test_every_step_is_a_command_and_all_claims_are_among_them(preset, tmp_path):
    """Their options are parsed as by the step itself."""
    claims = []
    names = []
    for step in all_steps(preset, "cuda", tmp_path):
        names.append(step.name)
        program, *argv = step.argv
        assert step.limit_s >= LIMIT_S
        if step.name == "tests":
            assert program == "-m" and argv == ["pytest", "-q", "-rs", *gpu.TESTS]
            continue
        assert program == "bench.py"
        module, options = bench.parse_args(argv)
        model = options.model if hasattr(options, "model") else options
        assert (model.preset, model.device) == (preset, "cuda")
        assert model.compile == (step.name == "batches-compiled")
        if module.__name__.endswith("paper"):
            claims += options.claims
            assert options.out == str(tmp_path) and not options.quick
        else:
            assert options.json == str(tmp_path / f"{step.name}.json")
    assert names[:6] == ["tests", "chunk-256", "table-2", "serve", "capacity", "batches"]
    assert "batches-compiled" in names
    assert claims == CLAIMS


@pytest.mark.slow
@pytest.mark.usefixtures("a100")
def test_the_smallest_model_on_a_cpu_goes_through(tmp_path, monkeypatch, capsys):
    steps = [step for step in all_steps("llama-tiny", "cpu", tmp_path) if step.name == "batches"]
    monkeypatch.setattr(gpu, "all_steps", lambda *_: steps)
    bench.main(["gpu", "--preset", "llama-tiny", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("batches, at most 9 min: done, ")
    assert lines[-1] == f"look at {tmp_path}/README.md, first at chunk-256.txt and table-2.txt"
    rows = json.loads((tmp_path / "batches.json").read_text())["batches"]
    assert len(rows) == 4 and "| 1024/256 " in (tmp_path / "batches.txt").read_text()
    machine = json.loads((tmp_path / "machine.json").read_text())["machine"]
    assert machine["preset"] == "llama-tiny" and "torch " in machine["versions"]
    assert f"Python {sys.version.split()[0]}" in machine["system"]
