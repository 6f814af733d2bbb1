"""What `simulate` and `fit` print, write and refuse, and how they end."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest

import bench
from examples import fit_device
from lab.claims.claim import Finding, claim
from lab.claims.claims import Experiment
from lab.claims.table import Table
from lab.commands import simulate
from lab.simulator.cost_model import matrices, product_seconds
from lab.simulator.devices import A100, GEOMETRIES
from lab.simulator.fit import COLUMNS

A100S = "--simulate a100-80gb"


def printed_tables(text):
    """The Markdown tables in a text, as lists of rows of cells, their heads among them."""
    tables = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("| "):
            if not previous.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        previous = line
    return tables


def number(cell):
    """What a printed number says, and by how much it may be rounded."""
    digits = len(cell.rstrip("x%").partition(".")[2])
    scale = 100 if cell.endswith("%") else 1
    return float(cell.rstrip("x%").replace(",", "")) / scale, 0.501 * 10**-digits / scale


def assert_printed(cell, value):
    """A printed cell begins with the number of the report but for rounding, or is "-" of None."""
    if value is None:
        assert cell == "-"
        return
    printed, rounding = number(cell.removeprefix("at least ").removeprefix("below ").split()[0])
    value = float(str(value).split()[-1])
    assert printed == pytest.approx(value, abs=rounding)


def test_every_claim_is_printed_and_written_alike(tmp_path, capsys):
    file = tmp_path / "all.json"
    argv = ["simulate", "--requests", "16", "--cpu-ms", "3", "--processes", "1"]
    argv += ["--only", "sarathi, bubbles", "--json", str(file), "--plot", str(tmp_path / "p.png")]
    bench.main(argv)
    text = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert (report["options"]["requests"], report["options"]["cpu_ms"]) == (16, 3)
    assert "3 ms of CPU per stage, 16 requests: too short a run" in text
    claims = {row["claim"]: row for row in report["claims"]}
    assert list(claims) == ["S-F8", "S-F7", "S-F3", "S-F4a", "S-4.2", "S-4.3.1", "SS-F8"]
    printed = iter(printed_tables(text))
    errors = {True: [], False: []}  # of the numbers that were fitted, and of the others
    bounds = []
    for row in claims.values():
        assert f"{row['title']}\n" in text and f"\n{row['text']}\n" in text
        if row["numbers"]:
            (head, *lines) = next(printed)
            assert head == ["number", "paper", "simulated", "error"]
            for (name, paper, ours, error), beside in zip(lines, row["numbers"], strict=True):
                assert name == beside["text"]
                assert_printed(ours.rstrip(","), beside["simulated"])
                assert paper == "-" or beside["error"] is None or number(paper.split()[0])
                if beside["met"] is not None:
                    assert error == ("met" if beside["met"] else "not met")
                    bounds.append(beside["met"])
                    continue
                assert error.endswith(" (fitted)") == beside["fitted"]
                assert_printed(error, beside["error"])
                if beside["error"] is not None:
                    errors[beside["fitted"]].append(beside["error"])
                    expected = beside["simulated"] / beside["paper"] - 1
                    assert beside["error"] == pytest.approx(expected)
        for table in row["tables"]:
            (head, *lines) = next(printed)
            assert head == [table["x"], *table["lines"]]
            for place, (_, *cells) in enumerate(lines):
                for cell, line in zip(cells, table["lines"].values(), strict=True):
                    values = list(line.values())
                    if len(values) == len(lines):
                        assert_printed(cell, values[place])
    assert next(printed, None) is None
    pictures = [tmp_path / f"p-{claim}.png" for claim in claims]
    assert set(tmp_path.glob("*.png")) == set(pictures)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert text.endswith("".join(f"wrote {path}\n" for path in [file, *pictures]))
    for is_fitted, start in ((False, "that nothing was fitted to"), (True, "2,047)")):
        sizes = list(map(abs, errors[is_fitted]))
        within_10, within_25 = [sum(size <= limit for size in sizes) for limit in (0.1, 0.25)]
        counts = f"{within_10} of {len(sizes)} within 10%, {within_25} within 25%"
        assert len(sizes) > 10 and f"{start}: {counts}\n" in text
    assert f'- bounds, such as "below 5%": {sum(bounds)} of {len(bounds)}\n' in text
    assert bounds == [False]  # of a prefill the other operations take 9 %


def processes_of(session):
    """The ids of the processes of a session that still run."""
    command = ["ps", "-A", "-o", "pid=,sess=,stat="]
    table = subprocess.run(command, capture_output=True, text=True)
    rows = [line.split() for line in table.stdout.splitlines()]
    return [int(pid) for pid, sid, state in rows if int(sid) == session and state[0] != "Z"]


def wait_for(done, seconds=120):
    """Whether done() becomes true in this time, which a test is lost without."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


def test_an_interrupt_keeps_the_claims_that_are_done_and_their_pictures(tmp_path, monkeypatch):
    def draw_and_find(lab):
        Path(lab.picture).write_text("a picture")
        return Finding(has_picture=True, tables=[Table("a title")])

    def make(function, claim_id):
        function.__doc__ = f"{claim_id}: a sentence."
        return Experiment([claim("a claim")(function)])

    interrupted = Mock(side_effect=KeyboardInterrupt)
    experiments = {"pipeline": make(draw_and_find, "S-F1"), "bubbles": make(interrupted, "S-F2")}
    monkeypatch.setattr(simulate, "EXPERIMENTS", experiments)
    files = [f"--json={tmp_path}/r.json", f"--plot={tmp_path}/p.png"]
    with pytest.raises(KeyboardInterrupt):
        bench.main(["simulate", "--only=pipeline,bubbles", *files])
    (kept,) = json.loads((tmp_path / "r.json").read_text())["claims"]
    assert kept["claim"] == "S-F1" and kept["tables"][0]["title"] == "a title"
    assert (tmp_path / "p-S-F1.png").read_text() == "a picture"


def test_jobs_in_other_processes_keep_their_order_and_their_errors():
    assert [*simulate.results_of(1, "", max, [(1, 2), (5, 4, 3), [6]])] == [2, 5, 6]
    with pytest.raises(IndexError, match="^list index out of range$"):
        list(simulate.results_of(1, "", itemgetter(0), [[1], []]))
    assert wait_for(lambda: not multiprocessing.active_children())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())  # here all signals come through


def times_called(file):
    """How often this was called with the file, in any process."""
    with open(file, "a") as log:
        log.write("x")
    return os.path.getsize(file)


def test_a_job_of_two_experiments_is_simulated_once(tmp_path):
    one = str(tmp_path / "one")
    other = str(tmp_path / "other")
    workers = simulate.Workers(1)
    assert workers(times_called, [one, other, one]) == [1, 1, 1]
    assert workers(times_called, [other]) == [1]
    assert workers(os.path.getsize, [other]) == [1]


# how it is sent: by a terminal to the whole group, or to the process; and what that exits with
ENDINGS = [
    (os.killpg, signal.SIGINT, 1, 130),
    (os.killpg, signal.SIGINT, 2, 130),
    (os.kill, signal.SIGTERM, 1, 143),
    (os.kill, signal.SIGKILL, 1, -9),
]


@pytest.mark.slow
@pytest.mark.parametrize("send, number, times, status", ENDINGS)
def test_no_signal_leaves_a_traceback_or_a_worker(send, number, times, status):
    argv = ["bench.py", "simulate", "--only", "sarathi,nodes"]
    argv += ["--requests", "100000", "--processes", "6"]
    reset = None
    if number != signal.SIGKILL:  # let it be heard, also if this runs in the background
        reset = partial(signal.signal, number, signal.SIG_DFL)
    run = subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=reset,
    )
    try:
        assert wait_for(lambda: len(processes_of(run.pid)) >= 7)  # four at work for long, two idle
        send(run.pid, number)
        if times == 2 and not wait_for(lambda: run.poll() is not None, 0.7):
            send(run.pid, number)
        out, err = run.communicate(timeout=250)
        assert run.returncode in (status, -number) and not err
        assert number == signal.SIGKILL or times == 2 or " published numbers " in out  # there were
        assert wait_for(lambda: not processes_of(run.pid))
    finally:
        for pid in processes_of(run.pid):
            os.kill(pid, signal.SIGKILL)


def test_fit_prints_the_constants_that_times_were_made_from(tmp_path, capsys):
    device = replace(A100, flops_per_s=200e12, bytes_per_s=1.5e12, op_s=6e-6, tile=64)
    sizes = [*range(1, 64, 9), *range(70, 1000, 62), *range(1100, 4097, 333)]
    lines = [["num_tokens", *COLUMNS]]
    for n in sizes:
        shapes = matrices(GEOMETRIES["llama-13b"], 2)
        lines.append([n, *(1e3 * product_seconds(device, n, *shape) for shape in shapes)])
    file = tmp_path / "times.csv"
    file.write_text("\n".join(",".join(map(str, line)) for line in lines))
    words = [str(file), "--preset", "llama-13b", "--tp"]
    fit_device.main([*words, "2"])
    text = capsys.readouterr().out
    ((head, *rows),) = printed_tables(text)
    assert f"{file}: matrix products of a layer of llama-13b, TP 2, {len(sizes)} sizes" in text
    found = {}
    for name, *cells in rows:
        found[name] = dict(zip(head[1:], (number(cell)[0] for cell in cells), strict=True))
    names = [name + tiles for name in ("fitted", "A100-80GB") for tiles in ("", ", without tiles")]
    assert list(found) == names
    assert [row["tile"] for row in found.values()] == [64, 1, A100.tile, 1]
    constants = {"TFLOP/s": 200, "TB/s": 1.5, "us to start": 6, "tile": 64}
    assert {name: found["fitted"][name] for name in constants} == pytest.approx(constants, rel=0.02)
    for error in ("its P90", "P90"):
        assert found["fitted"][error] < 0.01 < found["fitted, without tiles"][error]
    assert found["A100-80GB"]["TFLOP/s"] == pytest.approx(A100.flops_per_s / 1e12, abs=0.5)
    with pytest.raises(ValueError, match="tp=3: must divide n_head=40"):
        fit_device.main([*words, "3"])
    for option, one in {"preset": "llama", "simulate": "a1"}.items():
        with pytest.raises(ValueError, match=f"{option}='{one}': must be one of "):
            fit_device.main(["times.csv", f"--{option}", one])


WHOLE = "must be a whole number of at least"
SENSELESS = [  # options of serve and capacity, and what the line of error says
    (f"{A100S} --preset gpt2", "--max-len 8192: this model is limited to 1024"),
    (f"{A100S} --cpu-ms -1", "--cpu-ms -1: must be a finite number of at least 0"),
    (f"{A100S} --kv-tokens 8191", "--kv-tokens 8191: must be at least 8192"),
    (f"{A100S} --kv-tokens 400000", "--kv-tokens 400000: must be at least 8192"),
    (f"{A100S} --tp 0", f"--tp 0: {WHOLE} 1"),
    (f"{A100S} --replicas 0", f"--replicas 0: {WHOLE} 1"),
    (f"{A100S} --compile", "--compile: does not go with --simulate"),
    (f"{A100S} --dtype float32", "--dtype: does not go with --simulate"),
    (f"{A100S} --model gpt2", "--model gpt2: a simulated device takes --preset gpt2"),
    ("--replicas 5", "--replicas: goes only with --simulate"),
    ("--cpu-ms 5", "--cpu-ms: goes only with --simulate"),
]
REFUSED = {
    "simulate --requests 0": f"--requests 0: {WHOLE} 8",
    "simulate --processes 0": f"--processes 0: {WHOLE} 1",
    "simulate --processes 1000000": "--processes 1000000: must be a whole number of at least 1 and",
    "simulate --cpu-ms 1e300": "--cpu-ms 1e300: must be a finite number of at least 0 and at most",
    "simulate --cpu-ms nan": "--cpu-ms nan: must be a finite number of at least 0",
    "simulate --only pipelines": "--only pipelines: must be from sarathi, serving,",
    "simulate --only sarathi,": "--only : must be from sarathi",
    "simulate --json /no/dir/f": "--json /no/dir/f: cannot be written: No such file",
    "simulate --plot x.txt": "--plot x.txt: must end in .png, .pdf, .svg",
}
for command in ("serve", "capacity"):
    for words, message in SENSELESS:
        preset = "" if "--preset" in words or "--model" in words else " --preset yi-34b"
        REFUSED[f"{command} {words}{preset}"] = message


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_make_no_sense_end_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as done:
        bench.main(words.split())
    out, err = capsys.readouterr()
    assert done.value.code == 2 and not out and err.count("\n") == 1
    assert ": error: " in err and REFUSED[words] in err
