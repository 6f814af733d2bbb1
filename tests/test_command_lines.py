"""Random command lines of all programs are right, or one line says why not.

NANOSARATHI_COMMAND_LINES=1000 tries so many, 300 are the default. They are parsed and resolved in
this process. Each program explains itself in a process of its own."""

import contextlib
import io
import os
import random
import re
import shlex

import pytest
import torch

import bench
import sample
import server.__main__
from cli.console import explain
from tests import forked
from tests.helpers import ROOT, repository

COUNT = int(os.environ.get("NANOSARATHI_COMMAND_LINES", "300"))
BATCH = 20  # command lines of one test
RUNS_ALONE = r'(?m)^if __name__ == "__main__"|^ArgumentParser\('
PROGRAM_FILES = [
    str(path)
    for path in repository("*.py")
    if "tests" not in path.parts and re.search(RUNS_ALONE, (ROOT / path).read_text("utf-8"))
]
POSITIONALS = {  # arguments of each command, each list one choice
    "batches": [["8"], ["6x1@1024"], ["2 * 2048/256 + 6x1@512", "b=512"], ["0"], ["a=8", "a=9"]],
    "check": [["vllm"], ["own.py:Own"], ["x.py:Mine"], ["binary:X"], [""]],
    "explore": [[], ["vllm"], ["x"]],
    "sample": [["--prompt", "x"], ["--prompt", ""]],
}
NONSENSE = [
    *("1e300", "1e-300", str(10**15)),
    *("0", "-1", "1.5", "nan", "inf", "-inf", "1e400", "1e-400", str(10**30), "9" * 5000, "0x10"),
    *("", " ", "x", "--", "-", ",", "=", "x,y", "1,2", "é…", "\u202eabc", "😀", "x" * 5000, "\n"),
    *(".", "..", "/", "/dev/null", "/dev/null/x", "/no/such", "~nobody", "*", "%s", "{}", "\\"),
]
FILES = {  # what lies in the folder of each command line
    "trace.csv": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,3\n0.1,9,2\n",
    "late.csv": b"arrived_at,num_prefill_tokens,num_decode_tokens\n4e9,5,3\nnan,9,2\n",
    "heads.csv": b"arrived_at,num_prefill_tokens,num_decode_tokens\n",
    "empty": b"",
    "binary": bytes(range(256)),
    "own.py": b"from scheduler import VLLM\nclass Own(VLLM):\n    def schedule(self): 1 / 0\n",
    "config.json": b"[]",
}
GOOD = {  # values that some options take
    "--preset": ["llama-tiny", "gpt2", "llama3-8b", "falcon-180b"],
    "--model": ["gpt2", "llama-tiny", "."],
    "--policies": ["vllm", "sarathi:16,sarathi-serve", "dynamic", "own.py:Own"],
    "--policy": ["priority", "own.py:Own", "own.py:Other", "binary:Own"],
    "--trace": [*FILES],
    "--simulate": ["a100-80gb", "h100"],
    "--page-size": ["16", "max", "16,max"],
    "--lengths": ["sharegpt4", "5+5", "100+20,30+60"],
    "--slo": ["strict", "relaxed", "0.5"],
    "--device": ["cpu", "cuda", "cuda:1"],
    "--dtype": ["float32", "bfloat16"],
    "--attention": ["sdpa", "matmul", "flash", "xformers"],
    "--only": ["S-F9", "SS-*", "bubbles", "all"],
    "--prefix-caching": ["on", "off", "both"],
}
SIZES = ["1", "2", "7", "16", "64"]
PROGRAMS = {
    "sample": sample.parse_args,
    "server": server.__main__.parse_args,
}


def help_of(command):
    """What a command's --help prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        parse([*command, "--help"])
    return text.getvalue()


def parse(words):
    """The options of a command line of bench.py, or of one of PROGRAMS and its options."""
    program, *argv = words
    if program in PROGRAMS:
        return PROGRAMS[program](argv)
    return bench.parse_args(words)


def options_of(command):
    """{option: whether it takes a value} of a command, as its --help tells."""
    lines = re.findall(r"(?m)^  (--[\w-]+)( \S+)?", help_of(command))
    return {"--help": False} | {name: bool(value) for name, value in lines}


COMMANDS = {(name,): options_of([name]) for name in [*bench.COMMANDS, *PROGRAMS]}


def random_option(rng, options):
    """The words of a random option, with a value that may make no sense."""
    name = rng.choice(sorted(options))
    if rng.random() < 0.05:
        name = rng.choice(["--no-such", "-x", "--", "---", name[:-1], name + "s"])
    if not options.get(name, True):
        return [name]
    values = NONSENSE if rng.random() < 0.5 else GOOD.get(name, SIZES)
    value = rng.choice(values)
    return [f"{name}={value}"] if rng.random() < 0.5 else [name, value]


def random_command(rng):
    """The words of a random command line, for `parse`."""
    command = rng.choice(sorted(COMMANDS))
    words = [*command, *rng.choice(POSITIONALS.get(command[0], [[]]))]
    for _ in range(rng.randint(0, 4)):
        words += random_option(rng, COMMANDS[command])
    return words


def complaint_about(words):
    """What is wrong with the end of a command line that is parsed here; "" if nothing is."""
    errors = io.StringIO()
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            parse(words)
    except SystemExit as end:
        text = errors.getvalue()
        if end.code == 0 and not text and output.getvalue():  # --help
            return ""
        if end.code != 2 or text.count("\n") != 1 or not text.endswith("\n"):
            return f"status {end.code}, {text!r}"
        return ""
    except Exception as error:  # as console.run does
        message = explain(error)
        if not isinstance(message, str) or "\n" in message:
            return repr(error)
        return ""
    return errors.getvalue()


@pytest.fixture
def folder(tmp_path):
    """A folder with FILES."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def quick(folder, monkeypatch):
    """No GPU, no other Python, no change of threads, in a folder with FILES."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.mark.parametrize("seed", range(-(-COUNT // BATCH)))
def test_a_random_command_line_is_parsed_or_refused_in_a_line(seed, quick):
    rng = random.Random(seed)
    for _ in range(BATCH):
        words = random_command(rng)
        assert complaint_about(words) == "", shlex.join(words)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_option_takes_a_text_that_is_empty(command, quick, capsys):
    for option, takes_value in COMMANDS[command].items():
        if not takes_value or option in ("--prompt", "--api-key", "--host"):
            continue
        for value in ("", " ", "--"):
            with pytest.raises(SystemExit) as end:
                parse([*command, f"{option}={value}"])
            error = capsys.readouterr().err
            assert end.value.code == 2 and error.count("\n") == 1, (option, value)
            assert f"error: {option} " in error, (option, value)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({*PROGRAM_FILES} - {"examples/nano.py"}))  # has no options
def test_a_program_explains_itself_and_knows_its_options(file, tmp_path):
    words = [str(ROOT / file)]
    if file.count("/"):
        words = ["-m", file.removesuffix(".py").removesuffix("/__main__").replace("/", ".")]
    done = forked.run(*words, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.split()) > 10
    done = forked.run(*words, "--no-such-option", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert "error: " in lines[-1] and len(lines) <= 2


def test_all_programs_are_tried():
    assert {"bench.py", "sample.py", "server/__main__.py"} < set(PROGRAM_FILES)
    assert {"examples/offline.py", "examples/compare.py"} < set(PROGRAM_FILES)
