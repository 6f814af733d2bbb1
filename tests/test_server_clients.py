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

from errors import ArgumentError
from pretrained.tokenizers import Tokenizer, load_tokenizer
from request import Event
from tests import forked
from tests.helpers import with_slow
from tests.servers import (
    ChatRequest,
    CompletionRequest,
    CompletionResponse,
    checks,
    complete,
    connections,
    encode_prompts,
    generate_text,
    idle,
    letters,
    openai,
    protocol,
    serving,
    slow,
    url_of,
    wait_for,
)
from tests.test_server import PROGRAM
from tests.test_tokenizers import llama3_directory


def connect(served):
    """A connection to the server, which gives up after a minute."""
    host, port = served.http.base_url.netloc.decode().split(":")
    return socket.create_connection((host, port), timeout=60)


def http_post(body, length=None):
    """The bytes of a completion request. `length` is what its header says."""
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % (len(body) if length is None else length),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def read_all(connection):
    """All bytes until the server closes the connection."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def body_of(**fields):
    body = dict(model="tiny", prompt="a", max_tokens=20, temperature=0)
    return json.dumps(body | fields).encode()


# What takes long


def no_encoding(text):
    raise AssertionError("this text must not be encoded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_fit_is_refused_without_encoding_it(stream):
    tokenizer = Tokenizer(no_encoding, letters.decode, longest_token=8)
    with serving(tokenizer=tokenizer) as served:
        for length, fewest in ((2**20 - 200, 131_047), (1017, 128)):
            text = "a" * length
            body = dict(model="tiny", prompt=text, stream=stream)
            done = served.http.post("/v1/completions", json=body)
            error = done.json()["error"]
            assert (done.status_code, error["param"]) == (400, "prompt")
            assert error["message"] == f"prompt of at least {fewest} tokens: must be below 128"
            assert error["code"] == "context_length_exceeded"


def test_a_text_that_may_fit_is_encoded():
    texts = []

    def encode(text):
        texts.append(text)
        return [1, 2]

    tokenizer = Tokenizer(encode, letters.decode, longest_token=8)
    with serving(tokenizer=tokenizer) as served:
        assert complete(served, "a" * 1016)[2].prompt_tokens == 2
    assert texts == ["a" * 1016]


def test_a_chat_that_cannot_fit_is_refused_as_messages():
    tokenizer = Tokenizer(lambda text: [], letters.decode, longest_token=8)
    with serving(tokenizer=tokenizer) as served:
        messages = [{"role": "user", "content": "a" * 2000}]
        body = dict(model="tiny", messages=messages)
        error = served.http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"] == "messages of at least 253 tokens: must be below 128"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_errors_of_a_chat_name_the_fields_that_it_has(tiny, field):
    def refused(**fields):
        body = dict(model="tiny", messages=[{"role": "user", "content": "a"}]) | fields
        done = tiny.http.post("/v1/chat/completions", json=body)
        assert done.status_code == 400
        error = done.json()["error"]
        return error["param"], error["message"]

    too_long = [{"role": "user", "content": "a" * 110}]
    name, message = refused(messages=too_long, **{field: 5})
    assert name == field
    assert message == f"messages of 127 tokens + {field}=5: must not exceed 128"
    name, message = refused(messages=too_long * 2, **{field: 5})
    assert (name, message[:22]) == ("messages", "messages of 244 tokens")
    name, message = refused(messages=too_long * 2)
    assert (name, message[:22]) == ("messages", "messages of 244 tokens")
    name, message = refused(**{field: 10**30})
    assert name == field
    assert message.startswith(f"{field}=1000000")
    assert refused(**{field: 0})[0] == field
    assert refused(max_tokens=1, max_completion_tokens=1) == (
        "max_completion_tokens",
        "max_completion_tokens: must not be there beside max_tokens",
    )


def test_errors_of_the_engine_are_told_in_the_words_of_the_client():
    completion = CompletionRequest(model="x", prompt="a")
    chat = ChatRequest(model="x", messages=[{}])
    limited = ChatRequest(model="x", messages=[{}], max_completion_tokens=5)
    for body, error, message, param in [
        (completion, ("prompt: is empty", "prompt"), "prompt: is empty", "prompt"),
        (chat, ("prompt: is empty", "prompt"), "messages: is empty", "messages"),
        (chat, ("pages=3: no", "pages"), "pages=3: no", None),
        (chat, ("no memory is left",), "no memory is left", None),
        (chat, ("max_new_tokens=0: no", "max_new_tokens"), "max_tokens=0: no", "max_tokens"),
        (
            limited,
            ("max_new_tokens=0: no", "max_new_tokens"),
            "max_completion_tokens=0: no",
            "max_completion_tokens",
        ),
        (chat, ("tbt_slo=-1: no", "tbt_slo"), "tbt_slo=-1: no", "tbt_slo"),
    ]:
        refused = body.refusal(ArgumentError(*error)).detail["error"]
        assert (refused["message"], refused["param"]) == (message, param)


def test_a_prompt_is_too_long_if_the_client_set_no_limit(tiny):
    body = dict(model="tiny", prompt="a" * 120)
    error = tiny.http.post("/v1/completions", json=body).json()["error"]
    assert error["message"] == "prompt of 120 tokens + max_tokens=16: must not exceed 128"
    assert error["param"] == "prompt"


def test_text_is_encoded_and_chats_are_made_in_threads_of_their_own():
    threads = []

    def encode(text):
        threads.append(threading.current_thread())
        return letters.encode(text)

    def chat(messages):
        threads.append(threading.current_thread())
        return "hello"

    with serving(tokenizer=letters._replace(encode=encode)) as served:
        served.api.chat = chat
        loop_thread = served.thread
        complete(served, "hello")
        served.client.chat.completions.create(model="tiny", messages=[{}], max_tokens=1)
        engine_threads = served.api.thread.executor._threads
    assert len(threads) == 3
    assert loop_thread not in threads
    assert not engine_threads & set(threads)


def test_a_prompt_that_is_too_long_never_reaches_the_thread_of_the_engine(tiny, monkeypatch):
    monkeypatch.setattr(tiny.api.thread, "add", no_encoding)
    for prompt in ("a" * 200, [1] * 200):
        with pytest.raises(openai.BadRequestError, match="prompt of 200 tokens"):
            complete(tiny, prompt)


def test_a_text_that_the_tokenizer_cannot_encode_is_an_error_400(tmp_path):
    tokenizer = load_tokenizer(llama3_directory(tmp_path))
    spaces = " " * 1_040_000  # more than the regular expression can step back
    for body in (
        CompletionRequest(model="x", prompt=spaces),
        ChatRequest(model="x", messages=[{}]),
    ):
        with pytest.raises(protocol.ApiError) as refused:
            encode_prompts(body, tokenizer, lambda messages: spaces, max_len=10**6)
        error = refused.value.detail["error"]
        assert refused.value.status_code == 400
        assert error["param"] == body.prompt_name
        assert error["message"].startswith(f"{body.prompt_name}: cannot be encoded: ")
        assert error["message"].isprintable()


def many_keys(count):
    return {str(i): 1 for i in range(count)}


MANY = {  # a field that takes long to look through, and the field that the error names
    "own": (many_keys(101), None),
    "stream_options": (dict(stream_options=many_keys(85_000)), "stream_options"),
    "logit_bias": (dict(logit_bias=many_keys(85_000)), "logit_bias"),
    "tools": (dict(tools=[{}] * 10_001), "tools"),
    "a key in a list": (dict(tools=[[[many_keys(10_000)]]]), "tools"),
    "a list in a key": (dict(tools=[{"a": [1] * 10_000}]), "tools"),
    "lists in a list": (dict(stop=[[[], []]] * 3334), "stop"),
    "messages": (dict(messages=[{"role": "user"}] * 5001), "messages"),
    "a message": (dict(messages=[many_keys(10_000)]), "messages"),
    "unknown": ({"x" * 200: [1] * 10_001}, "x" * 100),
}


@pytest.mark.parametrize("name", MANY)
def test_a_body_with_too_many_keys_is_refused_before_pydantic_reads_it(name, monkeypatch):
    fields, param = MANY[name]
    monkeypatch.setattr(protocol.RequestBody, "model_validate", no_encoding)
    with pytest.raises(protocol.ApiError) as refused:
        ChatRequest.read(json.dumps(dict(model="tiny") | fields).encode())
    error = refused.value.detail["error"]
    assert (refused.value.status_code, error["param"]) == (400, param)
    limit = "body: must have at most 100 fields"
    if param:
        limit = f"{param}: must hold at most 10,000 keys and items"
    assert error["message"] == limit


PARTS = ["[]", "{}", "[" * 190 + "]" * 190, '{"a":[]}', '"", []', r'"\"", []', r'"\\", []']


@pytest.mark.parametrize("part", PARTS)
def test_a_body_of_too_many_lists_is_refused_before_it_is_parsed(part, monkeypatch):
    monkeypatch.setattr(protocol, "from_json", no_encoding)
    parts = ", ".join([part] * 20_000)
    with pytest.raises(protocol.ApiError) as refused:
        CompletionRequest.read(f'{{"model": "tiny", "prompt": [{parts}]}}'.encode())
    error = refused.value.detail["error"]
    assert error["message"] == "body: must hold at most 20,000 lists and objects"


@pytest.mark.parametrize("prompt", ["[" * 20_001, '{"\\' * 20_001, '\\" [' * 20_001, [1] * 20_001])
def test_brackets_in_a_text_are_no_lists(prompt):
    body = CompletionRequest.read(json.dumps(dict(model="tiny", prompt=prompt)).encode())
    assert body.prompt == [prompt]


def test_a_body_of_as_many_lists_as_may_be_is_parsed():
    for lists, message in ((19_998, "prompt: must be a text, a list"), (19_999, "20,000 lists")):
        with pytest.raises(protocol.ApiError) as refused:
            CompletionRequest.read(json.dumps(dict(model="a", prompt=[[]] * lists)).encode())
        assert message in refused.value.detail["error"]["message"]


def test_a_body_with_as_many_keys_as_may_be_is_read():
    messages = [{"role": "user"}] * 5000  # an item and a key each
    body = ChatRequest.read(json.dumps(dict(model="tiny", messages=messages)).encode())
    assert body.messages == messages
    prompt = [1] * 300_000  # token ids are read fast
    body = CompletionRequest.read(json.dumps(dict(model="tiny", prompt=prompt)).encode())
    assert body.prompt == [prompt]
    with pytest.raises(protocol.ApiError) as refused:
        CompletionRequest.read(json.dumps(many_keys(100)).encode())
    assert "prompt: Field required" in str(refused.value.detail)


def test_the_json_of_a_body_is_parsed_once(monkeypatch):
    parsed = []
    from_json = protocol.from_json

    def counted(json_bytes):
        parsed.append(json_bytes)
        return from_json(json_bytes)

    monkeypatch.setattr(protocol, "from_json", counted)
    monkeypatch.setattr(protocol.RequestBody, "model_validate_json", no_encoding)
    json_bytes = b'{"model": "tiny", "prompt": "a"}'
    assert CompletionRequest.read(json_bytes).prompt == ["a"]
    assert parsed == [json_bytes]


# Who is called by another name


ALLOWED = ["127.0.0.1", "127.0.0.1:8000", "10.1.2.3:1", "[::1]:80", "[::1]", "localhost"]
ALLOWED += ["LOCALHOST:1", "my.name", "My.Name:80"]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "my.name.example"]
FOREIGN += ["", "[::1", "localhost@evil.example", "x", "0x7f.1", "localhost:80.evil.example"]
CHECKED = [("GET", "/"), ("GET", "/records/0"), ("GET", "/v1/models"), ("POST", "/v1/completions")]
CHECKED += [("POST", "/v1/chat/completions")]


def test_without_a_key_a_foreign_host_is_refused():
    with serving(hosts=["My.name"]) as served:

        def status(method, path, host):
            headers = {"host": host, "content-type": "application/json"}
            return served.http.request(method, path, headers=headers).status_code

        for method, path in CHECKED:
            expected = 400 if method == "POST" else 200
            assert [status(method, path, host) for host in ALLOWED] == [expected] * len(ALLOWED)
            assert [status(method, path, host) for host in FOREIGN] == [421] * len(FOREIGN)
        for path in ("/health", "/metrics"):
            assert status("GET", path, "evil.example") == 200
        error = served.http.get("/", headers={"host": "a" * 1000}).json()["error"]
        assert error["message"].startswith(f"Host {'a' * 100}: must be an IP address, localhost")
    with serving(key="k") as served:
        for path in ("/", "/records/0"):
            assert status("GET", path, "evil.example") == 200
        headers = {"host": "evil.example", "authorization": "Bearer k"}
        assert served.http.get("/v1/models", headers=headers).status_code == 200


def test_a_record_with_any_number_of_digits_is_answered(tiny):
    for digits, status in (("0" * 100, 200), ("9" * 100, 200), ("9" * 101, 404), ("9" * 4301, 404)):
        done = tiny.http.get(f"/records/{digits}")
        assert done.status_code == status
        if status == 404:
            assert done.json()["error"]["message"] == "/records/N: N must have 1 to 100 digits"
    for wrong in ("-1", "1.0", "%D9%A1", "1%0A"):
        assert tiny.http.get(f"/records/{wrong}").status_code == 404


# Who does not go on


@pytest.mark.parametrize(
    "requests_before, sent",
    [
        (0, b""),
        (0, b"GET / HT"),
        (0, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: y"),
        (1, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: y"),
    ],
)
def test_a_connection_whose_headers_do_not_end_is_closed(requests_before, sent, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    with serving() as served, connect(served) as connection:
        for _ in range(requests_before):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(65_536).endswith(b"ok")
        connection.sendall(sent)
        assert read_all(connection) == b""
        assert complete(served, "hello")[0] == generate_text("hello")


@pytest.mark.parametrize("part", [b"a" * 4000, b"x: y\r\n" * 700])
def test_headers_without_end_are_closed_at_64_kib(part, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 1000)
    with serving() as served, connect(served) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2**20:
                connection.sendall(part)
                sent += len(part)
                time.sleep(0.01)  # so that it arrives in parts
        assert sent >= 60_000


def test_headers_of_many_requests_may_be_longer_than_64_kib():
    with serving() as served, connect(served) as connection:
        for _ in range(20):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 4000)
            time.sleep(0.02)  # so that it arrives before the end
            connection.sendall(b"\r\n\r\n")
            assert connection.recv(65_536).endswith(b"ok")


def test_a_body_may_be_longer_than_headers():
    with serving(max_body=2**21) as served, connect(served) as connection:
        connection.sendall(http_post(body_of().ljust(2**20)))
        assert b"200 OK" in connection.recv(65_536)


def test_headers_that_begin_behind_a_long_body_are_not_too_long():
    with serving() as served, connect(served) as connection:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.01)
        long_body = http_post(body_of().ljust(500_000))
        for _ in range(3):
            connection.sendall(long_body + b"GET /health HT")
            assert b"200 OK" in connection.recv(65_536)
            time.sleep(0.1)  # for the rest of the answer
            connection.sendall(b"TP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"ok"):
                part = connection.recv(65_536)
                assert part, "the connection was closed"
                answer += part


def test_a_response_goes_on_while_the_next_headers_wait(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.1)
    with serving() as served, connect(served) as connection:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.05)
        connection.sendall(http_post(body_of(stream=True)) + b"GET / HT")  # a second, at least
        answer = read_all(connection)
        assert answer.count(b"data: {") == 20
        assert b"[DONE]" in answer


def test_a_body_that_does_not_come_is_an_error_408(monkeypatch):
    monkeypatch.setattr(checks, "BODY_S", 0.2)
    with serving() as served, connect(served) as connection:
        connection.sendall(http_post(b"{", length=100))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body must arrive within 0.2 s" in answer
        assert b"connection: close" in answer.lower()


def reset(connection):
    """Close a connection without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LEAVING = {
    "in the headers": b"POST /v1/completions HTTP/1.1\r\nhost: local",
    "in the body": http_post(b"{", length=100),
    "waiting for a whole answer": http_post(body_of()),
    "in a stream": http_post(body_of(stream=True)),
    "with a wrong body": http_post(b"{"),
    "in the first of two": http_post(body_of(stream=True)) + http_post(body_of()),
    "on the page": b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20,
}


@pytest.mark.parametrize("leave", with_slow([socket.socket.close, reset], fast=[reset]))
@pytest.mark.parametrize("moment", LEAVING)
def test_a_client_that_leaves_leaves_no_traceback(moment, leave, capfd, caplog):
    with serving() as served:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.01)
        for wait_s in (0, 0.05, 0.1):
            connection = connect(served)
            connection.sendall(LEAVING[moment])
            time.sleep(wait_s)
            leave(connection)
        assert complete(served, "hello")[0] == generate_text("hello")
        wait_for(lambda: idle(served.engine))
    assert "Traceback" not in capfd.readouterr().err
    assert caplog.records == []


def test_a_client_that_leaves_ends_all_its_requests():
    with serving(max_len=512) as served:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.1)  # 50 s for one
        with connect(served) as connection:
            connection.sendall(http_post(body_of(max_tokens=500)) + http_post(body_of()))
            wait_for(lambda: served.engine.has_work)
        wait_for(lambda: idle(served.engine))


# How it ends


def asked(served, body):
    """What a raw request is answered, until the connection is closed."""
    with connect(served) as connection:
        connection.sendall(body)
        return read_all(connection)


def test_what_the_end_cuts_off_gets_an_error(capfd):
    with serving(max_batch=2, drain_s=0.3) as served, ThreadPoolExecutor() as pool:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.05)
        long = dict(max_tokens=100)
        stream = pool.submit(asked, served, http_post(body_of(stream=True, **long)))
        whole = pool.submit(asked, served, http_post(body_of(**long)))
        wait_for(lambda: len(served.engine.scheduler.running) == 2)
        waiting = pool.submit(asked, served, http_post(body_of(stream=True, **long)))
        wait_for(lambda: len(served.engine.scheduler.requests) == 3)
        in_body = pool.submit(asked, served, http_post(b"{", length=100))
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
    log = capfd.readouterr().err
    assert "Traceback" not in log


def test_a_response_that_is_complete_is_not_cut_off():
    async def messages_of(stream):
        events = asyncio.Queue()
        for finish_reason in (None, "length"):
            events.put_nowait(Event(0, 1, None, finish_reason, None))
        executor = SimpleNamespace(submit=lambda *args: None)
        thread = SimpleNamespace(executor=executor, end=None)
        api = SimpleNamespace(tokenizer=letters, name="tiny", thread=thread)
        request = SimpleNamespace(id=0, tokens=[0], prompt_len=1, cached_tokens=0, preemptions=0)
        body = CompletionRequest(model="tiny", prompt="a", stream=stream)
        response = CompletionResponse(api, body, [request], events)
        messages = []

        async def send(message):
            messages.append(message)

        await response({"type": "http"}, asyncio.Event().wait, send)
        count = len(messages)
        assert messages[-1]["more_body"] is False
        await response.cut_off({"type": "http"}, asyncio.Event().wait, send)
        return messages[count:]

    for stream in (False, True):
        assert asyncio.run(messages_of(stream)) == []


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
    policy.write_text(STUCK)
    processes = []

    def start(drain_s, step_s=10):
        code = f"import server.__main__ as program; program.STEP_S = {step_s}; program.main()"
        options = [*PROGRAM[2:], "--policy", f"{policy}:Stuck", "--drain", str(drain_s)]
        process = forked.Program("-c", code, *options)
        processes.append(process)
        port = int(process.stdout.readline().split(":")[-1].split("/")[0])
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection.sendall(http_post(body_of(model="llama-tiny", prompt="1234567")))
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
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the server ends" in answer
    assert process.wait(20) == 1
    lines = process.stderr.read().splitlines()
    assert lines[-1] == "error: a step of the engine does not end"
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
def test_a_server_says_where_it_is_and_that_it_warms_up():
    with forked.Program(*PROGRAM) as process:
        first = process.stdout.readline()
        port = first.split(":")[-1].split("/")[0]
        assert first == f"llama-tiny at http://127.0.0.1:{port}/v1\n"
        assert process.stdout.readline() == f"schedule page at http://127.0.0.1:{port}/\n"
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read().splitlines()
        assert process.wait(20) == 0
    assert log == ["# llama-tiny with random weights, the text will be noise", "# warming up"]


def test_the_url_of_an_address_with_colons_has_brackets():
    for family, name, url in [
        (socket.AF_INET, ("127.0.0.1", 80), "http://127.0.0.1:80"),
        (socket.AF_INET6, ("::1", 8000, 0, 0), "http://[::1]:8000"),
    ]:
        assert url_of(SimpleNamespace(family=family, getsockname=lambda: name)) == url  # noqa: B023


@pytest.mark.slow
def test_what_is_loaded_is_left_out_of_the_search_for_garbage():
    code = "import gc, server.__main__ as program, server.connections as connections\n"
    code += "connections.Server.run = lambda self, sockets: print(gc.get_freeze_count())\n"
    code += "program.main()"
    process = forked.run("-c", code, *PROGRAM[2:])
    assert int(process.stdout.splitlines()[-1]) > 10_000


EMPTY = ["--host", "--api-key", "--model", "--preset", "--allowed-host"]


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("option", EMPTY)
def test_an_option_that_is_empty_is_refused(option, text, capsys):
    from server.__main__ import parse_args

    with pytest.raises(SystemExit):
        parse_args([option, text])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert option in lines[0] and "must not be empty" in lines[0]


def test_names_and_origins_that_may_be_several_are_options(capsys):
    from server.__main__ import parse_args

    assert parse_args([]).allowed_hosts == parse_args([]).cors == []
    options = parse_args(["--allowed-host", "a", "--allowed-host", "b.example"])
    assert options.allowed_hosts == ["a", "b.example"]
    origins = ["*", "http://localhost:3000", "https://a.example"]
    assert parse_args([f"--cors={origin}" for origin in origins]).cors == origins
    for origin in ("a.example", "http://", "http://a.example/", "null", "http://a b"):
        with pytest.raises(SystemExit):
            parse_args(["--cors", origin])
        assert "must be * or like http://localhost:3000" in capsys.readouterr().err
