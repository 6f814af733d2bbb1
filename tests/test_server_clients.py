"""server/: what one client sends, or leaves out, does not hurt the others."""

import asyncio
import json
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from request import Event
from server import checks, connections, protocol
from server.__main__ import parse_args, url_of
from server.protocol import ApiError, ChatRequest, CompletionRequest
from server.responses import CompletionResponse
from tests import forked
from tests.helpers import with_slow
from tests.servers import (
    PROGRAM,
    complete,
    generate,
    http_post,
    idle,
    letters,
    read_all,
    serving,
    wait_for,
)
from tests.test_server_refusals import CHAT as CHATS
from tests.test_server_refusals import error_of


def refusal(function, *arguments):
    """(status, param, message) of the ApiError that a call raises."""
    with pytest.raises(ApiError) as refused:
        function(*arguments)
    error = refused.value.detail["error"]
    return refused.value.status_code, error["param"], error["message"]


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


# What takes long


def no_encoding(*_):
    raise AssertionError("this must not be reached")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_errors_of_a_chat_name_the_fields_that_it_has(tiny, field):
    def refused(text="a", **fields):
        return error_of(tiny, CHATS, **user(text), **fields)

    message = f"messages of 127 tokens + {field}=5: must not exceed 128"
    assert refused("a" * 110, **{field: 5}) == (field, message)
    for more in ({}, {field: 5}):
        name, message = refused("a" * 220, **more)
        assert (name, message[:22]) == ("messages", "messages of 237 tokens")
    name, message = refused(**{field: 10**30})
    assert name == field and f"{field}=1000" in message
    assert refused(**{field: 0})[0] == field
    both = "max_completion_tokens: must not be there beside max_tokens"
    assert refused(max_tokens=1, max_completion_tokens=1) == ("max_completion_tokens", both)


COMPLETION = CompletionRequest(model="x", prompt="a")
CHAT = ChatRequest(model="x", messages=[{}])


def test_text_is_encoded_and_chats_are_made_in_threads_of_their_own():
    threads = []

    def encode(text):
        threads.append(threading.current_thread())
        return letters.encode(text)

    with serving(tokenizer=letters._replace(encode=encode)) as served:
        complete(served, "hello")
        complete(served, user("hello")["messages"], chat=True)
        engine_threads = served.api.thread.executor._threads
    assert len(threads) == 2
    assert served.thread not in threads and not engine_threads & set(threads)


def test_a_prompt_that_is_too_long_never_reaches_the_thread_of_the_engine(tiny, monkeypatch):
    monkeypatch.setattr(tiny.api.thread, "add", no_encoding)
    for prompt in ("a" * 200, [1] * 200):
        assert "prompt of 200 tokens" in error_of(tiny, prompt=prompt)[1]


def read(kind, fields):
    """The body of these fields."""
    return kind.read(json.dumps(fields).encode())


def keys(count):
    return {str(i): 1 for i in range(count)}


MANY = [  # a field that takes long to look through, and the field that the error names
    (keys(101), None),
    ({"stream_options": keys(85_000)}, "stream_options"),
    ({"tools": [[[keys(10_000)]]]}, "tools"),
    ({"messages": [{"role": "user"}] * 5001}, "messages"),
    ({"x" * 200: [1] * 10_001}, "x" * 100),
]


@pytest.mark.parametrize("fields, param", MANY)
def test_a_body_with_too_many_keys_is_refused_before_pydantic_reads_it(fields, param, monkeypatch):
    monkeypatch.setattr(protocol.RequestBody, "model_validate", no_encoding)
    limit = "body: must have at most 100 fields"
    if param:
        limit = f"{param}: must hold at most 10,000 keys and items"
    assert refusal(read, ChatRequest, fields) == (400, param, limit)


PARTS = ["[]", '{"a":[]}', '"", []', r'"\"", []', r'"\\", []']


@pytest.mark.parametrize("part", PARTS)
def test_a_body_of_too_many_lists_is_refused_before_it_is_parsed(part, monkeypatch):
    monkeypatch.setattr(protocol, "from_json", no_encoding)
    parts = ", ".join([part] * 20_000)
    body = f'{{"model": "tiny", "prompt": [{parts}]}}'.encode()
    message = "body: must hold at most 20,000 lists and objects"
    assert refusal(CompletionRequest.read, body) == (400, None, message)


BRACKETS = ["[" * 20_001, '{"\\' * 20_001, '\\" [' * 20_001, [1] * 300_000]


def test_as_much_as_may_be_is_read_and_brackets_in_a_text_are_no_lists():
    for prompt in BRACKETS:  # token ids are read fast
        assert read(CompletionRequest, {"prompt": prompt}).prompt == [prompt]
    messages = [{"role": "user"}] * 5000  # an item and a key each
    assert read(ChatRequest, {"messages": messages}).messages == messages
    for fields, message in [
        (dict(prompt=[[]] * 19_998), "prompt: must be a text, a list"),
        (dict(prompt=[[]] * 19_999), "20,000 lists"),
        (keys(100), "prompt: Field required"),
    ]:
        assert message in refusal(read, CompletionRequest, fields)[2]


# Who is called by another name

ALLOWED = ["127.0.0.1", "127.0.0.1:8000", "10.1.2.3:1", "[::1]:80", "[::1]", "localhost"]
ALLOWED += ["LOCALHOST:1", "my.name", "My.Name:80"]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "my.name.example"]
FOREIGN += ["", "[::1", "localhost@evil.example", "x", "0x7f.1", "localhost:80.evil.example"]
CHECKED = [("GET", "/records/0"), ("GET", "/v1/models"), ("POST", "/v1/completions")]
CHECKED += [("POST", "/v1/chat/completions")]


def test_without_a_key_a_foreign_host_is_refused():
    def status(method, path, host):
        headers = {"host": host, "content-type": "application/json"}
        return served.http.request(method, path, headers=headers).status_code

    with serving(api={"hosts": ["My.name"]}) as served:
        for method, path in CHECKED:
            expected = 400 if method == "POST" else 200
            assert {status(method, path, host) for host in ALLOWED} == {expected}
            assert {status(method, path, host) for host in FOREIGN} == {421}
        for path in ("/", "/health", "/metrics"):
            assert status("GET", path, "evil.example") == 200
        error = served.http.get("/v1/models", headers={"host": "a" * 1000}).json()["error"]
        assert error["message"].startswith(f"Host {'a' * 100}: must be an IP address, localhost")
    with serving(api={"key": "k"}) as served:
        headers = {"host": "evil.example", "authorization": "Bearer k"}
        assert served.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("origin, allowed", [("http://a:3000", True), ("http://b", False)])
def test_web_pages_from_elsewhere_may_call_it_by_option(origin, allowed):
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization,content-type"
    with serving(api={"key": "k", "cors": ["http://a:3000"]}) as served:
        asked = served.http.options("/v1/completions", headers=preflight)
        refused = served.http.get("/v1/models", headers={"origin": origin})
        assert (asked.status_code, refused.status_code) == (200 if allowed else 400, 401)
        for answer in (asked, refused):
            header = answer.headers.get("access-control-allow-origin")
            assert header == (origin if allowed else None)
    with serving() as served:
        asked = served.http.options("/v1/completions", headers=preflight)
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


def test_a_record_with_any_number_of_digits_is_answered(tiny):
    message = "/records/N: N must have 1 to 100 digits"
    for digits, status in (("0" * 100, 200), ("9" * 100, 200), ("9" * 101, 404), ("9" * 4301, 404)):
        done = tiny.http.get(f"/records/{digits}")
        assert done.status_code == status
        assert status == 200 or done.json()["error"]["message"] == message
    for wrong in ("-1", "1.0", "%D9%A1", "1%0A"):
        assert tiny.http.get(f"/records/{wrong}").status_code == 404


# Who does not go on

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "requests_before, sent", [(0, b""), (0, b"GET / HT"), (0, HEALTH + b"x: y"), (1, HEALTH)]
)
def test_a_connection_whose_headers_do_not_end_is_closed(requests_before, sent, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    with serving() as served, served.connect() as connection:
        for _ in range(requests_before):
            connection.sendall(HEALTH + b"\r\n")
            assert connection.recv(65_536).endswith(b"ok")
        connection.sendall(sent)
        assert read_all(connection) == b""
        monkeypatch.undo()  # a busy machine sends no headers in 0.3 s
        assert complete(served, "hello").text == generate(served, "hello").text


@pytest.mark.parametrize("part", [b"a" * 4000, b"x: y\r\n" * 700])
def test_headers_without_end_are_closed_at_64_kib(part, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 1000)
    with serving() as served, served.connect() as connection:
        connection.sendall(HEALTH)
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2**20:
                connection.sendall(part)
                sent += len(part)
                time.sleep(0.01)  # so that it arrives in parts
        assert sent >= 60_000


def receive_until(connection, end):
    """What comes until there is this end."""
    answer = b""
    while not answer.endswith(end):
        part = connection.recv(65_536)
        assert part, "the connection was closed"
        answer += part
    return answer


def test_headers_may_be_longer_in_sum_and_begin_behind_a_body():
    _, body = http_post().split(b"\r\n\r\n")
    with serving(step_s=0.01) as served, served.connect() as connection:
        for _ in range(20):
            connection.sendall(HEALTH + b"x: " + b"y" * 4000)
            time.sleep(0.02)  # so that it arrives before the end
            connection.sendall(b"\r\n\r\n")
            receive_until(connection, b"ok")
        for _ in range(3):
            connection.sendall(http_post(body.ljust(500_000)) + HEALTH[:14])
            receive_until(connection, b"\r\n0\r\n\r\n")
            connection.sendall(HEALTH[14:] + b"\r\n")
            receive_until(connection, b"ok")


def test_a_response_goes_on_while_the_next_headers_wait(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.5)
    with serving(step_s=0.05) as served, served.connect() as connection:
        connection.sendall(http_post(stream=True) + b"GET / HT")  # a second, at least
        answer = read_all(connection)
        assert answer.count(b"data: {") == 20 and b"[DONE]" in answer


def test_a_body_that_does_not_come_is_an_error_408(monkeypatch):
    monkeypatch.setattr(checks, "BODY_S", 0.2)
    with serving() as served, served.connect() as connection:
        connection.sendall(http_post(b"{", length=100))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body must arrive within 0.2 s" in answer
        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(protocol):
    offer = b"\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n\r\n"
    with serving() as served, served.connect() as connection:
        connection.sendall(http_post().replace(b"\r\n\r\n", offer))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def reset(connection):
    """Close a connection without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LEAVING = {
    "in the headers": HEALTH,
    "in the body": http_post(b"{", length=100),
    "waiting for a whole answer": http_post(),
    "in a stream": http_post(stream=True),
    "with a wrong body": http_post(b"{"),
    "in the first of two": http_post(stream=True) + http_post(),
    "on the page": b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20,
}


@pytest.mark.parametrize("leave", with_slow([socket.socket.close, reset], fast=[reset]))
@pytest.mark.parametrize("moment", LEAVING)
def test_a_client_that_leaves_leaves_no_traceback(moment, leave, capfd, caplog):
    with serving(step_s=0.01) as served:
        for wait_s in (0, 0.05, 0.1):
            connection = served.connect()
            connection.sendall(LEAVING[moment])
            time.sleep(wait_s)
            leave(connection)
        assert complete(served, "hello").text == generate(served, "hello").text
        wait_for(lambda: idle(served.engine))
    assert "Traceback" not in capfd.readouterr().err
    assert caplog.records == []


def test_a_client_that_leaves_ends_all_its_requests():
    with serving(max_len=512, step_s=0.1) as served:  # 50 s for one
        with served.connect() as connection:
            connection.sendall(http_post(max_tokens=500) + http_post())
            wait_for(lambda: served.engine.has_work)
        wait_for(lambda: idle(served.engine))


# How it ends


def test_what_the_end_cuts_off_gets_an_error(capfd):
    def answer_to(request):
        with served.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    server = serving(max_batch=2, drain_s=0.3, step_s=0.05)
    with server as served, ThreadPoolExecutor() as pool:
        stream = pool.submit(answer_to, http_post(stream=True, max_tokens=100))
        whole = pool.submit(answer_to, http_post(max_tokens=100))
        wait_for(lambda: len(served.scheduler.running) == 2)
        waiting = pool.submit(answer_to, http_post(stream=True, max_tokens=100))
        wait_for(lambda: len(served.scheduler.requests) == 3)
        in_body = pool.submit(answer_to, http_post(b"{", length=100))
        time.sleep(0.2)  # some tokens have come, and the headers
        served.server.should_exit = True
        answer = stream.result(60)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        last_event = answer.split(b"data: ")[-1].split(b"\n\n")[0]
        assert json.loads(last_event)["error"]["message"] == "the server ends"
        assert answer.endswith(b"0\r\n\r\n")  # the end of a response that is complete
        for cut_off in (whole, waiting, in_body):
            answer = cut_off.result(60)
            assert answer.startswith(b"HTTP/1.1 503")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert (error["message"], error["type"]) == ("the server ends", "server_error")
    wait_for(lambda: idle(served.engine))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_complete_is_not_cut_off(stream):
    async def late_messages():
        request = SimpleNamespace(
            id=0, tokens=[0], prompt_len=1, prompt=[0], cached_tokens=0, preemptions=0
        )
        events = asyncio.Queue()
        for finish_reason in (None, "length"):
            events.put_nowait(Event(request, 1, None, finish_reason))
        thread = SimpleNamespace(executor=SimpleNamespace(submit=lambda *_: None), end=None)
        body = CompletionRequest(prompt="a", stream=stream)
        response = CompletionResponse(thread, letters, "tiny", body, [request], events)
        messages = []

        async def send(message):
            messages.append(message)

        await response({"type": "http"}, asyncio.Event().wait, send)
        count = len(messages)
        assert messages[-1]["more_body"] is False
        await response.cut_off({"type": "http"}, asyncio.Event().wait, send)
        return messages[count:]

    assert asyncio.run(late_messages()) == []


STUCK = """
import time
from pathlib import Path
from scheduler import SarathiServe

class Stuck(SarathiServe):
    def schedule(self):
        while any(request.prompt_len == 7 for request in self.waiting):
            Path(__file__).with_suffix(".stuck").touch()
        return super().schedule()
"""


@pytest.fixture
def stuck(tmp_path):
    """Starts servers, each with a step that does not end and a request that waits for it."""
    policy = tmp_path / "own.py"
    policy.write_text(STUCK, "utf-8")
    processes = []

    def start(drain_s, step_s=10):
        code = f"import server.__main__ as program; program.STEP_S = {step_s}; program.main()"
        options = [*PROGRAM[2:], "--policy", f"{policy}:Stuck", "--drain", str(drain_s)]
        process = forked.Program("-c", code, *options)
        processes.append(process)
        port = int(process.stdout.readline().split(":")[-1].split("/")[0])
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection.sendall(http_post(model="llama-tiny", prompt="1234567"))
        wait_for(policy.with_suffix(".stuck").exists)
        return process, connection

    yield start
    for process in processes:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("last, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_server_whose_step_does_not_end(stuck, last, status):
    process, connection = stuck(drain_s=100)
    with connection:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # as `timeout` sends it to the process and its group
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(last)
        assert process.wait(20) == status


@pytest.mark.slow
def test_a_signal_ends_a_server_whose_step_does_not_end_after_the_drain(stuck):
    process, connection = stuck(drain_s=0.2, step_s=0.5)
    with connection:
        process.send_signal(signal.SIGTERM)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503") and b"the server ends" in answer
    assert process.wait(20) == 1
    lines = process.stderr.read().splitlines()
    assert lines[-1] == "error: a step of the engine does not end"
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
def test_a_server_says_where_it_is_and_that_it_warms_up():
    """What is loaded by then is left out of the search for garbage."""
    code = "import gc, server.__main__ as program, server.connections as connections\n"
    code += "connections.Server.run = lambda self, sockets: print(gc.get_freeze_count())\n"
    code += "program.main()"
    process = forked.run("-c", code, *PROGRAM[2:])
    api, page, frozen = process.stdout.splitlines()
    url = api.removeprefix("llama-tiny at ").removesuffix("/v1")
    assert url.startswith("http://127.0.0.1:") and page == f"schedule page at {url}/"
    assert int(frozen) > 10_000
    noise = "# llama-tiny with random weights, the text will be noise"
    assert process.stderr.splitlines() == [noise, "# warming up"]


@pytest.mark.parametrize(
    "family, name, url",
    [
        (socket.AF_INET, ("127.0.0.1", 80), "http://127.0.0.1:80"),
        (socket.AF_INET6, ("::1", 8000, 0, 0), "http://[::1]:8000"),
    ],
)
def test_the_url_of_an_address_with_colons_has_brackets(family, name, url):
    assert url_of(SimpleNamespace(family=family, getsockname=lambda: name)) == url


@pytest.mark.parametrize(
    "option, text, message",
    [
        *(
            ("--cors", text, f"--cors {text}: must be * or like http://localhost:3000")
            for text in ("a.example", "http://", "http://a.example/", "null")
        ),
        ("--api-key", "", "--api-key, NANOSARATHI_API_KEY: must not be empty"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_a_line(option, text, message, capsys):
    with pytest.raises(SystemExit):
        parse_args([option, text])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_names_and_origins_that_may_be_several_are_options():
    assert parse_args([]).allowed_hosts == parse_args([]).cors == []
    options = parse_args(["--allowed-host", "a", "--allowed-host", "b.example"])
    assert options.allowed_hosts == ["a", "b.example"]
    origins = ["*", "http://localhost:3000", "https://a.example"]
    assert parse_args([f"--cors={origin}" for origin in origins]).cors == origins
