"""`bench.py serve --url`: what another server is sent, what is seen of it, and its errors."""

import io
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from tqdm import tqdm

import bench
from cli.console import explain
from lab.measure import remote_server
from lab.measure.capacity import judge
from lab.measure.remote_server import RemoteServer
from lab.measure.workload import Arrival, prompts
from tests.test_bench import HERE


class Another(BaseHTTPRequestHandler):
    """A server of one model, "x". Prompts of 5 tokens are too many; those of 8 it never ends."""

    def answer(self, status, text, type="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", type)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/v1/models":
            self.answer(200, '{\n "data": [{"id": "x"}]}')
        else:
            self.answer(404, "<html>not here</html>")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((body, self.headers))
        if body["model"] != "x":
            self.answer(404, '{"error":\n "no, as it is"}')
        elif len(body["prompt"]) == 5:
            self.answer(429, '{"error":\n "no, as it is"}')
        else:
            self.answer(200, ": welcome\n\n", "text/event-stream")
            self.stream(len(body["prompt"]), body["max_tokens"])

    def stream(self, prompt_len, max_tokens):
        if prompt_len == 8:
            time.sleep(30)
            return
        # two tokens share an event, or the last event has none
        events = max_tokens - 1 if max_tokens > 4 else max_tokens + 1
        for _ in range(events):
            self.wfile.write(b'data: {"choices": [{"text": "x"}], "usage": null}\r\n\r\n')
            time.sleep(0.01)
        self.wfile.write(usage_of(str(max_tokens)) + b"\ndata: [DONE]\n\n")

    def log_message(self, *args):
        """Nothing."""


@contextmanager
def another():
    """(its address, [(body, headers) that it was sent])."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Another) as server:
        server.requests = []
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", server.requests
        server.shutdown()


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    """No proxy is asked."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_all_tokens_are_counted_and_what_no_client_sees_is_unknown():
    ended = []
    with another() as (url, requests):
        server = RemoteServer(f"{url}/", api_key="sesame")
        high = Arrival(0.1, 3, 8, "high", 0.5, 0.25, user="ann")
        arrivals = [high, Arrival(0.0, 4, 4), Arrival(0.0, 5, 9)]
        run = server.serve(arrivals, prompts(arrivals, 256, 0), lambda: ended.append(1))
    assert [len(c.token_times) for c in run.completions] == [8, 4, 0] and len(ended) == 3
    times = run.completions[0].token_times
    assert times == sorted(times) and times[-1] == times[-2] > times[-3] and times[0] >= 0.1
    assert [c.finish_reason for c in run.completions] == ["length", "length", "abort"]
    assert [c.priority for c in run.completions] == [1, 2, 2] and run.refused == 1
    bodies = {len(body["prompt"]): body for body, _ in requests}
    prompt = bodies[4].pop("prompt")
    assert all(type(token) is int and 0 <= token < 256 for token in prompt)
    assert bodies[4] == {
        "model": "x",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    service = {"priority": "high", "ttft_slo": 0.5, "tbt_slo": 0.25, "user": "ann"}
    assert bodies[3] == bodies[4] | service | {"prompt": bodies[3]["prompt"], "max_tokens": 8}
    assert all(headers["Authorization"] == "Bearer sesame" for _, headers in requests)
    summary = judge(run, 10.0)
    assert summary.scheduling_delay_s.p50 is summary.hybrid is summary.stalls.count is None
    assert summary.tokens_per_s == pytest.approx((3 + 8 + 4 + 4) / run.seconds)


def test_serve_prints_and_writes_what_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    files = [f"--{name}={tmp_path / name}" for name in ("json", "csv")]
    load = "--qps 50 --slo 50 --lengths 3+8,4+4 --requests 4 --shared-prefix 20:2"
    with another() as (url, requests):
        bench.main(["serve", "--url", url, *load.split(), *files])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "json").read_text())
    assert text.startswith(f"{url}\nx, as it was started\nload: 4 requests of 3+8,4+4 tokens, each")
    assert " each after a prefix of 20 (2 in all), Poisson" in text
    assert f"\n{url}: 50.000 requests/s, P50 TTFT " in text and "memory: " not in text
    assert text.count(f"\n| {url} ") == 2 and f"SLO of 50.000 s: met by {url}." in text
    (row,) = report["runs"].values()
    assert row["finished"] == 4 and row["met"] and report["slo_s"] == 50
    assert row["preemptions"] is row["stalls"]["count"] is report["base"] is None
    rows = [line.split(",") for line in (tmp_path / "csv").read_text().splitlines()]
    assert [row[5] for row in rows] == ["output_tokens", "8", "8", "4", "4"]
    assert {row[0] for row in rows[1:]} == {url}
    sent = [body["prompt"] for body, _ in requests]
    assert sorted(map(len, sent)) == [23, 23, 24, 24]
    assert len({tuple(prompt[:20]) for prompt in sent}) == 2
    assert all(headers["Authorization"] == "Bearer sesame" for _, headers in requests)


def usage_of(count):
    """The last event of an answer that had so many tokens, as it says."""
    return b'data: {"choices": [], "usage": {"completion_tokens": %s}}\n' % count.encode()


WRONG = [  # where, what is asked for, what the line says
    ("/v1", "--model y", '404: \'Not Found\'> {"error": "no, as it is"}'),
    ("", "", "404: 'Not Found'> <html>not here</html>"),
    ("a/v1", "", "InvalidURL"),
]


@pytest.mark.parametrize("path, more, message", WRONG)
def test_what_goes_wrong_is_one_line(path, more, message):
    with another() as (url, _):
        url = url.removesuffix("/v1") + path
        words = f"--url {url} --qps 2 --slo 1 --requests 3 {more}".split()
        with pytest.raises(ConnectionError) as failed:
            bench.main(["serve", *words])
    line = explain(failed.value)
    assert line.startswith(f"error: --url {url}: ") and message in line and "\n" not in line


class Forever:
    """A response that is one line without an end, or the same line again and again."""

    def __init__(self, line):
        self.line = line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def readline(self, limit):
        return self.line or b"x" * limit


TOKEN = b'data: {"choices": [{"text": "x"}]}\n\n'
LIES = [  # how many tokens there were, as JSON
    *("10000000", "1000000000000", "9" * 5000, "5", "0", "-1", "true", '"2"', "1.5", "NaN", "[2]"),
]
GARBAGE = [  # events
    *(b"[]", b"5", b"{", b"\xff\xfe", b"[" * 100_000, b'{"choices": {"a": 1}}', b'{"usage": []}'),
    *(b'{"error": "\x1b[2J"}', b'{"error": "\\u001b[2J' + b"x" * 10**5 + b'"}'),
]
ANSWERS = {
    **{f"says {text:.12} tokens": TOKEN + usage_of(text) for text in LIES},
    **{f"event {event[:20]}": TOKEN + b"data: " + event + b"\n" for event in GARBAGE},
    "tokens without end": Forever(TOKEN),
    "events without end": Forever(b"data: {}\n"),
    "a line without end": Forever(b""),
    "nothing": b"",
}


SAID = [  # what another server answers, and what the line says of it
    (b'{"choices": [{"text": "xx"}], "usage": {"completion_tokens": 2}}', "last event was none"),
    (TOKEN, "no usage: the last event was"),
    (b'data: {"error": "a shard died"}\n\ndata: [DONE]\n\n', "a shard died"),
]


def complaint_about(answer, monkeypatch):
    """What is said of a server that answers this to a request."""
    response = io.BytesIO(answer) if isinstance(answer, bytes) else answer
    monkeypatch.setattr(RemoteServer, "_open", lambda *_: response)
    with pytest.raises(ConnectionError) as failed:
        RemoteServer("http://a", model="x").serve([Arrival(0.0, 3, output_len=4)], [[1, 2, 3]])
    return str(failed.value)


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_takes_memory_or_time_and_each_is_one_line(name, monkeypatch):
    line = complaint_about(ANSWERS[name], monkeypatch)
    assert line.startswith("--url http://a: ") and line.isprintable() and len(line) < 600


@pytest.mark.parametrize("answer, message", SAID)
def test_what_is_wrong_with_an_answer_is_said(answer, message, monkeypatch):
    assert message in complaint_about(answer, monkeypatch)


MODELS = [
    "[]",
    "{",
    '{"data": []}',
    '{"data": {}}',
    '{"data": [{"id": 5}]}',
    '{"data": [{}]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", MODELS)
def test_a_list_of_models_that_is_none_is_one_line(text, monkeypatch):
    monkeypatch.setattr(RemoteServer, "_open", lambda *_: io.BytesIO(text.encode()))
    with pytest.raises(ConnectionError, match="^--url http://a: ") as failed:
        RemoteServer("http://a")
    assert str(failed.value).isprintable() and len(str(failed.value)) < 600


def test_the_list_of_models_is_read_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(remote_server, "LONGEST_ANSWER", 30)
    text = '{"data": [{"id": "x"}]}' + " " * 100 + "x"  # what comes later is not read
    monkeypatch.setattr(RemoteServer, "_open", lambda *_: io.BytesIO(text.encode()))
    assert RemoteServer("http://a").model == "x"


def test_control_characters_in_a_models_name_are_shown(monkeypatch, capsys):
    sent = []

    def answer(server, path, body=None):
        sent.append(body)
        models = {"data": [{"id": "x\x1b[31m\nbad" + "y" * 10**6}]}
        return io.BytesIO(json.dumps(models).encode() if body is None else TOKEN + usage_of("1"))

    monkeypatch.setattr(RemoteServer, "_open", answer)
    bench.main("serve --url http://a --qps 9 --slo 1 --requests 1 --lengths 3+1".split())
    text = capsys.readouterr().out
    assert "\x1b" not in text and "x\\x1b[31m bad" in text and len(text) < 10_000
    assert sent[1]["model"].startswith("x\x1b[31m\nbad")


def test_an_interrupt_keeps_the_requests_that_have_ended(tmp_path, monkeypatch):
    def answer(server, path, body):
        assert len(body["prompt"]) == 3 or time.sleep(9)
        return io.BytesIO(TOKEN + usage_of("1"))

    monkeypatch.setattr(tqdm, "update", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(RemoteServer, "_open", answer)
    words = "--url http://a --model x --qps 99 --slo 1 --requests 2 --lengths 3+1,8+1"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["serve", *words.split(), f"--json={tmp_path / 'r.json'}"])
    (row,) = json.loads((tmp_path / "r.json").read_text())["runs"].values()
    assert (row["finished"], row["refused"], row["cut_short"]) == (1, 0, "interrupted")


def test_an_absent_server_is_a_connection_error():
    with another() as (url, _):
        server = RemoteServer(url, model="x")
    arrivals = [Arrival(0.0, 3, 8), Arrival(30.0, 3, 8)]
    with pytest.raises(ConnectionError, match="refused"):
        server.serve(arrivals, prompts(arrivals, 256, 0))  # at once, not after 30 s


def test_an_interrupt_ends_it_at_once():
    with another() as (url, requests):
        words = f"--url {url} --qps 2 --slo 1 --requests 3 --lengths 8+2".split()
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE)
        run = subprocess.Popen([sys.executable, "bench.py", "serve", *words], **how)
        while not requests and run.poll() is None:
            time.sleep(0.05)
        run.terminate()
        _, error = run.communicate(timeout=60)
    assert run.returncode == 143 and "Traceback" not in error


SENSELESS = {
    "--slo 1": "required: --qps, or --trace",
    "--qps 2": "required: --slo",
    "--qps 2 --slo strict": "--slo strict: must be a finite number above 0",
    "--qps 2 --slo 1 --trace x.csv --lengths 3+4": "--trace: has its own lengths",
}
NOT_OPTIONS = (
    "--simulate=this --policies=vllm --chunk=9 --page-size=8 --max-waiting=3 --device=cuda "
)
NOT_OPTIONS += "--dtype=float32 --html=x --plot=x.png --tp=2 --preset=x --turns=2 --compile"
for option in NOT_OPTIONS.split():
    SENSELESS[f"--qps 2 --slo 1 {option}"] = f"unrecognized arguments: {option}"


@pytest.mark.parametrize("words", SENSELESS)
def test_options_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(["serve", "--url", "http://127.0.0.1:8000/v1", *words.split()])
    assert SENSELESS[words] in capsys.readouterr().err


def test_a_trace_keeps_its_own_rate(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    columns = "arrived_at,num_prefill_tokens,num_decode_tokens"
    file.write_text(f"{columns}\n5,3,4\n5.2,4,4\n")
    with another() as (url, _):
        bench.main(["serve", "--url", url, "--slo", "0.2", "--trace", str(file)])
    text = capsys.readouterr().out
    assert "(0 left out) at its own rate; median prompt 3.5, output 4 tokens" in text
    assert f"\n{url}: P50 TTFT " in text
