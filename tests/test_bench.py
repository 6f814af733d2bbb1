"""The command line runs, says what it should, and refuses what makes no sense."""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
import sample
import server.__main__
from cli.loading import add_model_options, load_model, model_options, resolve_model
from cli.options import OptionParser, number, policies_with_chunks
from policies import POLICIES

HERE = Path(__file__).parent.parent
TINY_MODEL = ["--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
TINY = [*TINY_MODEL, "--chunk", "32", "--batch", "3", "--seq-len", "80"]
OWN = """
from scheduler import VLLM

class Mine(VLLM):
    def schedule(self):
        return super().schedule()
"""


def process(*command):
    """Run a script of this folder in a process of its own, without a network."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, *command]
    return subprocess.run(argv, capture_output=True, text=True, cwd=HERE, env=env)


@pytest.fixture
def own(tmp_path):
    """A file with policies of one's own."""
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    return f"{tmp_path}/own.py"


def test_offline_serves_every_policy_and_one_of_a_file(tmp_path, own):
    policies = [name for name in POLICIES if name != "dynamic"] + [f"{own}:Mine"]
    files = [f"--json={tmp_path / 'r.json'}", f"--plot={tmp_path / 't.png'}"]
    bench.main([*TINY, "--requests=10", "--policies", ",".join(policies), *files])
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["options"]["chunk"] == 32 and report["options"]["pd_ratio"] == 16
    assert report["options"]["policies"] == policies
    here = report["machine"]
    assert (here["dtype"], here["model"]) == ("float32", "llama-tiny")
    assert report["equal_texts"] == 10
    rows = report["end_to_end"]
    assert list(rows) == policies and rows["request-level"]["gain"] == 1
    # 10 requests of 75 + 5 tokens; the first two want 1 and 3; the last of each is not computed
    computed = 10 * 75 + 8 * 5 + 1 + 3 - 10
    for row in rows.values():
        assert round(row["tokens_per_iteration"] * row["iterations"]) == computed
    assert rows[f"{own}:Mine"]["iterations"] == rows["vllm"]["iterations"]
    assert rows["request-level"]["longest_stall_s"] == 0 and rows["vllm"]["longest_stall_s"] > 0
    assert (tmp_path / "t.png").stat().st_size > 10_000


MODEL_OPTIONS = {
    *("preset", "model", "device", "dtype", "attention"),
    *("seed", "compile", "threads", "tp", "pp"),
}


WITHOUT_MODEL = ("simulate", "explore", "check", "today")


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_help_explains_every_option_with_its_default(command, capsys):
    with pytest.raises(SystemExit) as done:
        bench.main([command, "--help"])
    text = capsys.readouterr().out
    blocks = re.findall(r"^  --[\w-]+.*?(?=^  ?\S|^$)", text, re.MULTILINE | re.DOTALL)
    options = [re.match(r"  --([\w-]+)", block)[1] for block in blocks]
    assert done.value.code == 0
    assert all("(default: " in " ".join(block.split()) for block in blocks)
    if command == "offline":
        files = {"json", "plot", "html"}
        sizes = {"batch", "seq-len", "pd-ratio", "chunk", "policies", "requests"}
        assert set(options) == MODEL_OPTIONS | sizes | files | {"layers"}
        text = " ".join(text.split())
        assert all(f"(default: {default})" in text for default in ("256", "off", "none"))
    elif command not in WITHOUT_MODEL:
        assert set(options) > MODEL_OPTIONS and ("qps" in options) == (command == "serve")
    if command == "batches":
        assert "(default: 16 on a CPU, 64 on a GPU)" in " ".join(text.split())
    if command in ("serve", "capacity"):
        load = {"requests", "lengths", "trace", "slo", "page-size", "kv-tokens"}
        assert load < set(options)


def test_help_names_the_commands_and_does_not_wait_for_torch():
    code = "import sys, bench\ntry: bench.main(['--help'])\n"
    done = process("-c", code + "finally: assert 'torch' not in sys.modules")
    assert done.returncode == 0 and not done.stderr
    assert all(f"    {name} " in done.stdout for name in bench.COMMANDS)


ALIASES = {"": "offline", "--chunk 64": "offline"}
NEEDED = {
    "batches": "64",
    "check": "vllm",
}
WORDS = [*ALIASES.items(), *((f"{name} {NEEDED.get(name, '')}", name) for name in bench.COMMANDS)]


@pytest.mark.parametrize("words, command", WORDS)
def test_the_first_word_is_a_command(words, command):
    module, options = bench.parse_args(words.split())
    assert module.__name__ == bench.COMMANDS[command][0]
    if hasattr(options, "json"):  # where it says which command it was
        assert options.command == command


NONSENSE = {  # options whose value is refused by the name of the option
    "offline": "--chunk=1.5 --batch=1 --pd-ratio=0 --pd-ratio=nan --requests=0 --threads=0 "
    "--seed=-1",
    "serve": "--qps=0 --qps=nan --slo=0 --page-size=0 --page-size=big --kv-tokens=1000 "
    "--long-prompt=1024 --requests=0 --max-waiting=0 --classes=vip=0.1 "
    "--trace-scale=0 --plot=x.txt",
    "capacity": "--slo=0 --page-size=2000",
    "batches --slo=1": "--slo=0 --decodes=0 --tile=0",
}
A100 = "--simulate a100-80gb --preset llama3-8b"
SLOTS = "--page-size {}: must be below --max-len, or --prefix-caching off"
NO_PAIR = ("512", "0:4", "1:-2", "x:2", "9:" + 12 * "9")
REFUSED = [
    (f"{command} {option}", f"{option.replace('=', ' ', 1)}: must ")
    for command, options in NONSENSE.items()
    for option in options.split()
]
REFUSED += [
    ("--chunk 0", "--chunk 0: must be a whole number of at least 1"),
    ("--chunk 4 --batch 6", "--chunk 4: must be at least --batch 6"),
    ("--chunk 2000", "--chunk 2000: must be at least --batch 6 and at most --seq-len 1000"),
    ("--policies sarathi,fifo", "'fifo': must be one of request-level, "),
    ("--policies no_such.py:Mine", "No such file"),
    ("--policies dynamic", "--policies dynamic: follows an SLO"),
    ("--policies sarathi:64x", "'sarathi:64x'"),
    ("--policies ,", "--policies ',': give at least one"),
    ("--pd-ratio -1", "--pd-ratio -1: must be a finite number above 0"),
    ("--json /proc/f.json", "--json /proc/f.json: cannot be written: "),
    ("--json .", "--json .: cannot be written: Is a directory"),
    ("--dtype int8", "--dtype invalid choice: 'int8'"),
    ("sevre", "invalid choice: 'sevre'"),
    ("capacity --qps 1", "unrecognized arguments: --qps 1"),
    ("serve --slo hard", "--slo hard: must be strict, relaxed, a multiple from 1x to 100x, or"),
    ("serve --page-size 16,2000", "--page-size 2000: must be at most --max-len 1024"),
    ("serve --policies sarathi:x", "'sarathi:x': must be one of request-level"),
    ("serve --classes low=0.1,low=0.2", "low=0.1,low=0.2: must be some of realtime, high, normal"),
    ("serve --classes low=0", "--classes 0: must be"),
    ("serve --trace x --lengths 5+5", "--trace: has its own lengths"),
    ("serve --trace-scale 0.5", "--trace-scale: goes with --trace"),
    ("serve --trace x --shared-prefix 9:1", "--trace: has its own lengths, no --lengths, --long"),
    *(
        (f"serve --shared-prefix {x}", f"--shared-prefix {x}: must be LENGTH:COUNT")
        for x in NO_PAIR
    ),
    ("capacity --shared-prefix 1023:4", "1023: must leave 2 of --max-len 1024 tokens"),
    ("serve --shared-prefix 24:4 --long-prompt 1000", "1000: must be below 1000, --max-len less"),
    ("serve --prefix-caching yes", "--prefix-caching invalid choice: 'yes'"),
    ("serve --prefix-caching on --page-size 16,max", f"{SLOTS.format(1024)}"),
    ("batches", "batches: give some, as in 2048/256 6x1@1024, or else --slo"),
    ("batches 8 --slo 1", "batches: give some, as in 2048/256 6x1@1024, or else --slo"),
    ("batches 8 --tile 2", "--tile: goes with --slo"),
    ("--model llama-160m", "--model llama-160m: is a preset, write --preset llama-160m"),
    (f"serve {A100} --pools 2", "--pools '2': must be PREFILL:DECODE"),
    (f"serve {A100} --pools 1:1 --pp 2", "--pools: goes without --pp and --replicas"),
    (f"serve {A100} --pools 1:1 --replicas 2", "--pools: goes without --pp and --replicas"),
    (f"serve {A100} --pools 1:1 --kv-link string", "--kv-link invalid choice: 'string'"),
    ("capacity --simulate h100", "--simulate h100: needs --preset, from llama-tiny, gpt2"),
]


@pytest.mark.parametrize("words, message", REFUSED)
def test_what_makes_no_sense_is_refused_at_once(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as done:
        bench.parse_args(words.split())
    assert message in capsys.readouterr().err and done.value.code == 2


def parse_model(argv):
    """The ModelOptions of a command line."""
    parser = OptionParser()
    add_model_options(parser, default_preset="llama-160m")
    return model_options(parser.parse_args(argv))


NO_MODEL = [
    ("--preset llama-9b", "'llama-9b': must be one of "),
    ("--preset gpt2 --model x", "--preset gpt2, --model x: a geometry and a checkpoint"),
    ("--preset gpt2", "--seq-len 2000: this model is limited to 1024"),
    ("--device foo", "--device foo: must be cpu, cuda"),
    ("--device cuda:99", "--device cuda:99: torch .* sees . CUDA devices"),
    ("--pp 2", "--pp 2: needs 2 processes, not 1: torchrun --nproc-per-node 2 "),
]


@pytest.mark.parametrize("words, message", NO_MODEL)
def test_a_model_that_cannot_be_had_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        model = parse_model(f"--device cpu --dtype bfloat16 {words}".split())
        load_model(model, 2000, positions_from="--seq-len")


@pytest.mark.parametrize("program", [bench, sample, server.__main__])
def test_a_preset_that_is_given_as_a_model_is_named_in_the_error(program, capsys):
    with pytest.raises(SystemExit):
        program.parse_args(["--model", "llama-tiny"])
    error = capsys.readouterr().err
    assert "--model llama-tiny: is a preset, write --preset llama-tiny" in error


def test_a_model_of_the_hub_or_a_directory_may_have_a_name_of_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("llama-tiny").mkdir()
    for name in ("gpt2", "llama-tiny"):
        _, options = bench.parse_args(["--model", name])
        assert (options.model.model, options.model.preset) == (name, None)


def test_what_was_left_open_is_filled_in(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, options = bench.parse_args(["--preset", "llama-tiny", "--seq-len", "9000", "--batch", "5"])
    assert (options.requests, options.pd_ratio) == (None, 256 / 4)
    resolved = resolve_model(parse_model(["--preset", "llama-tiny"]))
    assert (resolved.device, resolved.preset) == ("cpu", "llama-tiny")
    assert resolve_model(parse_model([])).preset == "llama-160m"
    model = load_model(resolved, 9000, positions_from="--seq-len")
    assert model.config.max_positions == 9000 and resolved.dtype == str(model.dtype)[6:]


@pytest.mark.parametrize(
    "capability, dtype",
    [
        ((7, 5), "float16"),  # T4
        ((8, 0), "bfloat16"),  # A100
        ((9, 0), "bfloat16"),  # H100
    ],
)
def test_the_default_type_is_one_that_the_tensor_cores_multiply(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    options = parse_model(["--preset", "llama-tiny", "--device", "cuda"])
    assert resolve_model(options).dtype == dtype
    assert resolve_model(replace(options, dtype="float32")).dtype == "float32"


def test_types_of_options_say_what_is_allowed():
    assert policies_with_chunks(" vllm, sarathi:64,,vllm ") == ["vllm", "sarathi:64"]
    share = number(minimum=0, maximum=1)
    assert share("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="2: .* of at least 0 and at most 1"):
        share("2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["sample.py --help", "bench.py --help", "bench.py explore --help"]
)
def test_a_reader_that_goes_away_is_no_error(command):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE, env=env)
    process = subprocess.Popen([sys.executable, *command.split()], **pipes)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141


@pytest.mark.slow
def test_explore_ends_with_the_address_of_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench.main(["explore", "--requests", "1"])
    page = tmp_path / "explore.html"
    assert capsys.readouterr().out == f"wrote explore.html, open {page.as_uri()}\n"
    bench.main(["explore", "--requests", "1", "--html", "/dev/null"])
    assert capsys.readouterr().out == "wrote /dev/null\n"
