"""Whatever a user, a machine or a signal does: one clear line, and a status that says so."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bench
import sample
from cli import console, options
from cli.loading import load_model, resolve_model
from lab.commands.frame import reporting
from policies import find_policy
from runtime.memory import check_memory, free_bytes
from tests.test_bench import HERE, TINY_MODEL, parse_model

SERVE = "serve --simulate a100-80gb --preset yi-34b --tp 2 --requests 8 --policies vllm"
ASCII = "PYTHONCOERCECLOCALE=0 PYTHONUTF8=0"  # or C would not be ASCII
SAMPLE = "sample.py --preset llama-tiny --dtype float32 --device cpu --max-new-tokens 9 --prompt"
OWN = """
from scheduler import VLLM

class Broken(VLLM):
    def schedule(self):
        return {}["nothing"]

class Alone(VLLM):
    def __init__(self):
        pass
"""


@pytest.fixture(autouse=True)
def signals():
    """console.run is the last thing that a program does: the tests take their signals back."""
    before = {number: signal.getsignal(number) for number in console.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def parse(command, *words):
    """Parse the words as `command` does: "sample", or one of bench.py."""
    return sample.parse_args(words) if command == "sample" else bench.parse_args([command, *words])


OUT_OF_MEMORY = [  # as torch 2.13 raises them
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB "
        "of which 1.02 GiB is free. Including non-PyTorch memory, this process has 13.54 GiB "
        "memory in use. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
    ),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "driver", "cublas"])
def test_no_memory_on_a_gpu_is_said_as_such_in_one_line(error, monkeypatch):
    line = exit_code(Mock(side_effect=error))
    assert line.startswith("error: no memory on the GPU for this model, batch and length: CUDA ")
    assert "\n" not in line and "non-PyTorch" not in line and len(line) < 250
    assert "2.00 GiB" in line or error is not OUT_OF_MEMORY[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_on_gpus_say_that_they_use_no_graphs(device, monkeypatch, capsys):
    stage = SimpleNamespace(model="a shard")
    ranks = SimpleNamespace(device=torch.device(device), start=lambda load_stage: stage)
    monkeypatch.setattr("parallel.ranks.Ranks", lambda *_: ranks)
    monkeypatch.setattr("cli.loading.resolve_model", lambda options: options)
    tensor_parallel = replace(parse_model(TINY_MODEL), tp=2)
    assert load_model(tensor_parallel, 16, positions_from="--max-len") == "a shard"
    has_said_so = "# no CUDA graphs with --tp or --pp" in capsys.readouterr().err
    assert has_said_so == (device == "cuda")


def test_several_processes_do_not_compile(monkeypatch):
    options = replace(parse_model(TINY_MODEL), compile=True, tp=2)
    monkeypatch.setattr("cli.loading.find_place", lambda: SimpleNamespace(world_size=2))
    with pytest.raises(ValueError, match="--compile: not with several processes"):
        resolve_model(options)


@pytest.mark.parametrize(
    "gpu_bytes, preset", [(None, "llama-160m"), (40e9, "llama-160m"), (41e9, "llama-13b")]
)
def test_the_geometry_that_nobody_named_depends_on_the_memory_of_a_gpu(
    gpu_bytes, preset, monkeypatch
):
    device = "cpu" if gpu_bytes is None else "cuda"
    properties = SimpleNamespace(total_memory=gpu_bytes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    options = replace(parse_model(TINY_MODEL), preset=None, device=device)
    assert resolve_model(options).preset == preset


def test_a_model_with_learned_positions_takes_them_all():
    options = replace(parse_model(TINY_MODEL), preset="gpt2", layers=1)
    assert load_model(options, 1024, positions_from="--max-len").config.n_layer == 1


@pytest.mark.parametrize("option", ["json", "plot"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(option, tmp_path, capsys):
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "there.png").write_text("kept", "utf-8")
    (tmp_path / "link.png").symlink_to("not-there.png")
    wrong = ["loop.png", "folder.png", "no/such.png", "there.png/x.png", "n" * 300 + ".png"]
    for file in [*(f"{tmp_path}/{name}" for name in wrong), "", "~nobody/x.png", "/proc/x.png"]:
        with pytest.raises(SystemExit) as done:
            parse("serve", f"--{option}={file}")
        error = capsys.readouterr().err
        assert done.value.code == 2 and error.count("\n") == 1 and f"error: --{option} " in error
    for name in ("there.png", "link.png", "new.png"):
        parse("serve", f"--{option}={tmp_path}/{name}")
    left = {"loop.png", "folder.png", "there.png", "link.png"}  # nothing was made or changed
    assert (
        set(os.listdir(tmp_path)) == left and (tmp_path / "there.png").read_text("utf-8") == "kept"
    )


@pytest.mark.parametrize(
    "kind, right, wrong, allowed",
    [
        (options.number(above=0, maximum=1), "1", "0", "a finite number above 0 and at most 1"),
        (options.number(minimum=0), "0", "-0.1", "a finite number of at least 0"),
        (options.whole(minimum=2, maximum=3), "3", "2.0", "a whole number of at least 2 and at"),
    ],
)
def test_a_limit_of_a_number_is_allowed_unless_it_must_be_above(kind, right, wrong, allowed):
    assert kind(right) == float(right)
    with pytest.raises(ArgumentTypeError, match=f"^{wrong}: must be {allowed}"):
        kind(wrong)


def test_a_pipe_and_a_device_stay_what_they_are(tmp_path, monkeypatch):
    code = "from cli.options import write_text; write_text('/dev/stdout', 'a'); print('b')"
    shell(f'PYTHONPATH={shlex.quote(str(HERE))} $python -c "{code}" > out', cwd=tmp_path)
    assert "b" in (tmp_path / "out").read_text("utf-8")  # still the file that is written to
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    options.write_text(tmp_path / "pipe", "two")
    assert os.read(pipe, 9) == b"two" and (tmp_path / "pipe").is_fifo()
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("its reader would see the end"))
    assert options.output_file(f"{tmp_path}/pipe") == f"{tmp_path}/pipe"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full")])
def test_a_file_that_cannot_be_written_stays_as_it_was(error, tmp_path, monkeypatch):
    file = tmp_path / "file"
    link = tmp_path / "link"
    link.symlink_to(file)
    file.write_text("one", "utf-8")

    def half(path, *_):
        path.write_bytes(b"t")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(type(error) if isinstance(error, OSError) else error):
            options.write_text(link, "two")
    assert file.read_text("utf-8") == "one"
    options.write_text(link, "two")
    assert file.read_text("utf-8") == "two" and link.is_symlink()
    assert {*os.listdir(tmp_path)} == {"file", "link"}


def test_a_report_is_kept_when_a_run_is_broken_off_if_there_is_any(tmp_path, capsys):
    choice = SimpleNamespace(json=str(tmp_path / "report.json"), chunk=8)
    report = {"machine": "this"}
    for results, files in ((0, []), (1, ["report.json"])):
        with pytest.raises(KeyboardInterrupt), reporting(choice, report):
            report |= {str(i): i for i in range(results)}
            raise KeyboardInterrupt
        assert os.listdir(tmp_path) == files
    written = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert written == {"options": vars(choice), "machine": "this", "0": 0}
    ends = ["nothing was finished", "what was measured until then is kept"]
    nothing, some = (f"\ninterrupted: {end}\n" for end in ends)
    assert capsys.readouterr().out == f"{nothing}{some}wrote {choice.json}\n"


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    cpu = torch.device("cpu")
    check_memory("little", 2**20, cpu)
    with pytest.raises(ValueError, match=r"^much: takes 1,000,000,\S+ GB, [\d,.]+ GB are free$"):
        check_memory("much", 10**18, cpu)
    monkeypatch.setattr("model.init_weights", lambda *_: pytest.fail("made a model"))
    with pytest.raises(ValueError, match="llama-tiny and a .* --seq-len 10{12}: takes .* free"):
        load_model(parse_model(TINY_MODEL), 10**12, positions_from="--seq-len")
    container = {"memory.max": "1000000", "memory.stat": "anon 400000\nfile 300000"}
    monkeypatch.setattr("runtime.memory.Path.read_text", lambda path: container[path.name])
    assert free_bytes(cpu) == 600000
    with pytest.raises(ValueError, match="llama-7b and .*with-prompt 101: takes 13.5 GB, 0.0 GB"):
        argv = ["--preset", "llama-7b", "--device", "cpu", "--dtype", "bfloat16", "--prompt", "x"]
        sample.main(argv)


def exit_code(main):
    """How the command line ends that calls `main`."""
    with pytest.raises(SystemExit) as done:
        console.run(main)
    return done.value.code


def test_what_a_user_can_cause_is_an_exit():
    for kind in (ValueError, ImportError, OSError, MemoryError):
        assert exit_code(Mock(side_effect=kind("what is wrong\nmore"))) == "error: what is wrong"
    assert exit_code(Mock(side_effect=MemoryError)) == "error: MemoryError"
    compiler = torch._inductor.exc.InvalidCxxCompiler()
    assert exit_code(Mock(side_effect=compiler)).startswith("error: --compile: No working C++")
    assert "can't allocate memory" in exit_code(lambda: torch.empty(2**58))
    assert exit_code(Mock(side_effect=KeyboardInterrupt)) == 130
    for kind in (KeyError, RuntimeError, AssertionError):  # an error of ours has its traceback
        with pytest.raises(kind):
            console.run(Mock(side_effect=kind("nothing")))


CONTROLS = "a\x1b[2J\x07b\x9b\r"


def test_control_characters_of_others_do_not_reach_a_terminal(monkeypatch, capsys):
    assert exit_code(Mock(side_effect=ValueError(CONTROLS))).isprintable()
    with pytest.raises(SystemExit):
        bench.parse_args(["--chunk", CONTROLS])
    assert capsys.readouterr().err.strip("\n").isprintable()
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, "utf-8")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    console.run(lambda: print(f"é\t{CONTROLS}\n😀"))
    assert written.getvalue().decode() == "é\ta\\x1b[2J\\x07b\\x9b\\r\n😀\n"


def test_an_error_in_a_custom_policy_keeps_its_traceback(tmp_path):
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    broken = find_policy(f"{tmp_path}/own.py:Broken")
    with pytest.raises(KeyError, match="nothing"):
        console.run(lambda: broken.schedule(None))


def shell(command, **more):
    """(status, stdout, stderr) of a shell command that may name python, in a process of its own."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "python": sys.executable}
    env = {key: value for key, value in env.items() if key != "PYTHONUNBUFFERED"}
    pipes = dict(capture_output=True, text=True, cwd=HERE, env=env)
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], **pipes | more)
    return done.returncode, done.stdout, done.stderr


MISSING = [  # a package, what needs it, the file that lists it
    ("torch", "import bench; bench.main(['--chunk', '256'])", "requirements.txt"),
    ("starlette", "import server.__main__ as main; main.main()", "server/requirements.txt"),
    ("playwright", "from playwright import sync_api", "requirements-dev.txt"),
]
WITHOUT = """
import sys
from cli.console import run
sys.modules[{package!r}] = None  # as if it were not installed
sys.argv = ["program"]
run(lambda: exec({statements!r}))
"""


@pytest.mark.parametrize("package, statements, file", MISSING)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(package, statements, file):
    code = WITHOUT.format(package=package, statements=statements)
    status, out, error = shell(f"$python -c {shlex.quote(code)}")
    assert (
        error == f"error: {package} is not installed: {sys.executable} -m pip install -r {file}\n"
    )
    assert status == 2 and "Traceback" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, status, message",  # the whole of stderr
    [
        (f"$python {SAMPLE} x 2>&-", 0, ""),
        ("$python bench.py --chunk 0 >&- 2>&-", 2, ""),
        (f"$python bench.py {SERVE} 2>&1 >/dev/full", 1, ""),
        (
            f"HOME=/no/such PYTHONIOENCODING=ascii $python -P {SAMPLE} 'é…'",
            0,
            "# llama-tiny with random.*\n",
        ),
        ("$python -OO bench.py --help", 0, ""),
        ("PYTHONSAFEPATH=1 $python bench.py --help", 0, ""),
        ("PYTHONSAFEPATH=1 $python -m server --help", 1, ".*: No module named server\n"),
        (f"env -u HOME TERM=dumb LC_ALL=C {ASCII} $python {SAMPLE} 'é…'", 0, "# llama.*\n"),
        (f"TERM=dumb LC_ALL=C {ASCII} $python bench.py {SERVE} --html /dev/null <&-", 0, ""),
        ("$python sample.py --model '~who/x' --prompt x", 1, "error: .*~who/x.*\n"),
    ],
)
def test_an_odd_environment(command, status, message):
    code, out, error = shell(command)
    assert code == status and re.fullmatch(message, error)
    assert bool(out) == (code == 0) or "/dev/full" in command


PROGRAM = """
import os, signal
from cli import console

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

def main():
    print("ready")
    try:
        {}
    finally:
        print("kept")

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
console.TWICE_S = {}
console.run(main)
"""
SENDS_TWICE = "try: send('SIGTERM')\n        finally: send('SIGTERM')"
HIDES = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise ImportError from None
"""
CASES = [  # what main does, when a second signal is another one, the status, what is printed
    ("send('SIGINT')", 60, 130, "ready\nkept\n"),
    ("send('SIGTERM')", 60, 143, "ready\nkept\n"),
    ("send('SIGHUP')", 60, 129, "ready\nkept\n"),
    (SENDS_TWICE, 60, 143, "ready\nkept\n"),  # as `timeout` does
    (SENDS_TWICE, -1, 143, "ready\n"),  # as someone impatient does
    ("try: send('SIGINT')\n        except BaseException: 1 / 0", 60, 130, "ready\nkept\n"),
    ("import hides", 60, 130, "ready\n"),
]


@pytest.mark.parametrize("does, twice_s, status, printed", CASES)
def test_a_signal_ends_it_without_a_traceback(does, twice_s, status, printed, tmp_path):
    (tmp_path / "hides.py").write_text(HIDES, "utf-8")
    (tmp_path / "program.py").write_text(PROGRAM.format(does, twice_s), "utf-8")
    ended = shell(f"PYTHONPATH={shlex.quote(str(HERE))} $python program.py", cwd=tmp_path)
    assert ended == (status, printed, "")


def test_a_program_under_nohup_outlives_a_hangup():
    code = "import os, signal; from cli.console import run\n"
    code += "run(lambda: (os.kill(os.getpid(), signal.SIGHUP), print('alive')))"
    assert shell(f'trap "" HUP; $python -c "{code}"') == (0, "alive\n", "")
