"""What `simulate` prints, writes and refuses, and how it ends."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

import bench
from lab.claims.claim import Finding, claim
from lab.claims.claims import Experiment
from lab.claims.table import Table
from lab.commands import simulate

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


def test_every_claim_is_printed_and_written_alike(tmp_path, capsys):
    file = tmp_path / "all.json"
    argv = "simulate --requests 16 --cpu-ms 3 --processes 1 --only sarathi,bubbles,pools".split()
    bench.main([*argv, "--json", str(file), "--plot", str(tmp_path / "p.png")])
    text = capsys.readouterr().out
    report = json.loads(file.read_text("utf-8"))
    assert (report["options"]["requests"], report["options"]["cpu_ms"]) == (16, 3)
    assert "3 ms of CPU per stage, 16 requests: too short a run" in text
    ids = [row["claim"] for row in report["claims"]]
    assert ids == ["S-F8", "S-F7", "S-F3", "S-F4a", "S-4.2", "S-4.3.1", "SS-F8", "D-F1"]
    tables = iter(printed_tables(text))
    errors = {True: [], False: []}  # of the numbers that were fitted, and of the others
    bounds = []
    for row in report["claims"]:
        assert f"{row['title']}\n" in text
        assert f"\n{row['text']}\n" in text
        if row["numbers"]:
            head, *lines = next(tables)
            assert head == ["number", "paper", "simulated", "error"]
            for (name, _, _, printed_error), number in zip(lines, row["numbers"], strict=True):
                assert name == number["text"]
                error = number["error"]
                if number["met"] is not None:
                    assert printed_error == ("met" if number["met"] else "not met")
                    bounds.append(number["met"])
                    continue
                assert printed_error.endswith(" (fitted)") == number["fitted"]
                if error is None:
                    assert printed_error == "-"
                    continue
                assert error == pytest.approx(number["simulated"] / number["paper"] - 1)
                percent = float(printed_error.split()[0].rstrip("%"))
                assert percent == pytest.approx(100 * error, abs=0.51)
                errors[number["fitted"]].append(abs(error))
        for table in row["tables"]:
            assert next(tables)[0] == [table["x"], *table["lines"]]
    assert next(tables, None) is None
    pictures = [tmp_path / f"p-{claim_id}.png" for claim_id in ids]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert text.endswith("".join(f"wrote {path}\n" for path in [file, *pictures]))
    for is_fitted, start in ((False, "that nothing was fitted to"), (True, "2,047)")):
        sizes = errors[is_fitted]
        within_10, within_25 = (sum(size <= limit for size in sizes) for limit in (0.1, 0.25))
        counts = f"{within_10} of {len(sizes)} within 10%, {within_25} within 25%"
        assert len(sizes) > 10
        assert f"{start}: {counts}\n" in text
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
        """S-F1: a sentence."""
        Path(lab.picture).write_text("a picture", "utf-8")
        return Finding(has_picture=True, tables=[Table("a title")])

    def interrupted(lab):
        """S-F2: a sentence."""
        raise KeyboardInterrupt

    experiments = {
        "pipeline": Experiment([claim("a claim")(draw_and_find)]),
        "bubbles": Experiment([claim("a claim")(interrupted)]),
    }
    monkeypatch.setattr(simulate, "EXPERIMENTS", experiments)
    files = [f"--json={tmp_path}/r.json", f"--plot={tmp_path}/p.png"]
    with pytest.raises(KeyboardInterrupt):
        bench.main(["simulate", "--only=pipeline,bubbles", *files])
    (kept,) = json.loads((tmp_path / "r.json").read_text("utf-8"))["claims"]
    assert kept["claim"] == "S-F1"
    assert kept["tables"][0]["title"] == "a title"
    assert (tmp_path / "p-S-F1.png").read_text("utf-8") == "a picture"


def test_jobs_in_other_processes_keep_their_order_and_their_errors():
    assert [*simulate.results_of(1, "", max, [(1, 2), (5, 4, 3), [6]])] == [2, 5, 6]
    with pytest.raises(IndexError, match="^list index out of range$"):
        list(simulate.results_of(1, "", itemgetter(0), [[1], []]))
    assert wait_for(lambda: not multiprocessing.active_children())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())  # here all signals come through


def times_called(file):
    """How often this was called with the file, in any process."""
    with open(file, "a", encoding="utf-8") as log:
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


YI = f"{A100S} --preset yi-34b"
REFUSED = {
    "simulate --requests 0": "--requests 0: must be a whole number of at least 8",
    "simulate --processes 0": "--processes 0: must be a whole number of at least 1",
    "simulate --processes 1000000": "--processes 1000000: must be a whole number of at least 1 and",
    "simulate --cpu-ms 1e300": "--cpu-ms 1e300: must be a finite number of at least 0 and at most",
    "simulate --only pipelines": "--only pipelines: must be from sarathi, serving,",
    "simulate --only sarathi,": "--only : must be from sarathi",
    "simulate --json /no/dir/f": "--json /no/dir/f: cannot be written: No such file",
    "simulate --plot x.txt": "--plot x.txt: must end in .png, .pdf, .svg",
    f"serve {A100S} --preset gpt2": "--max-len 8192: this model is limited to 1024",
    f"serve {A100S} --model gpt2": "--model gpt2: a simulated device takes --preset gpt2",
    f"serve {YI} --cpu-ms -1": "--cpu-ms -1: must be a finite number of at least 0",
    f"serve {YI} --kv-tokens 8191": "--kv-tokens 8191: must be at least 8192",
    f"capacity {YI} --kv-tokens 400000": "--kv-tokens 400000: must be at least 8192",
    f"capacity {YI} --tp 0": "--tp 0: must be a whole number of at least 1",
    f"serve {YI} --replicas 0": "--replicas 0: must be a whole number of at least 1",
    f"capacity {YI} --compile": "--compile: does not go with --simulate",
    f"serve {YI} --dtype float32": "--dtype: does not go with --simulate",
    "serve --replicas 5": "--replicas: goes only with --simulate",
    "capacity --cpu-ms 5": "--cpu-ms: goes only with --simulate",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_make_no_sense_end_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as done:
        bench.main(words.split())
    out, err = capsys.readouterr()
    assert done.value.code == 2 and not out and err.count("\n") == 1
    assert ": error: " in err and REFUSED[words] in err
