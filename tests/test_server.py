"""server/: what OpenAI's client sees, with real connections; and that nothing is left behind."""

import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from pretrained.streams import Writer
from request import Event
from sampling import SamplingParams
from server import engine_thread
from server.protocol import NEUTRAL, ChatBody, CompletionBody, Message
from tests.servers import LETTERS, complete, generate, idle, letters, serving, wait_for

streamed = pytest.mark.parametrize("stream", [False, True])
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def error_of(served, fields, address="completions"):
    """(status, param) of the error to a body."""
    done = served.http.post(f"/v1/{address}", json=fields)
    error = done.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return done.status_code, error["param"]


@streamed
def test_each_prompt_has_n_choices_with_seeds_of_their_own(tiny, stream):
    sampling = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    choices, _, usage = complete(tiny, ["hello", "a"], n=2, stream=stream, **sampling)
    params = [SamplingParams(20, temperature=0.9, top_p=0.8, seed=seed) for seed in (5, 6)]
    expected = [generate(tiny, text, each).text for text in ("hello", "a") for each in params]
    assert choices == [(text, "length") for text in expected]
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 80)  # each prompt once


@streamed
def test_a_chat_has_the_logprobs_of_the_engine(tiny, stream):
    choices, parts, usage = complete(tiny, HI, chat=True, logprobs=True, stream=stream)
    expected = generate(tiny, "user: hi\nassistant:")
    assert choices == [(expected.text, "length")]
    tokens = [token for part in parts for token in part.logprobs.content]
    assert [token.logprob for token in tokens] == pytest.approx(expected.logprobs)
    assert "".join(token.token for token in tokens) == expected.text
    assert usage.prompt_tokens == 19
    _, parts, _ = complete(tiny, "hello", logprobs=0, stream=stream)
    logprobs = sum((part.logprobs.token_logprobs for part in parts), [])
    assert logprobs == pytest.approx(generate(tiny, "hello").logprobs)


@streamed
@pytest.mark.parametrize(
    "stop, expected, tokens",
    [
        ("né", "abc ", 7),  # from one token to the next
        (["yz!", "xyz"], "abc né日👍_", 18),  # what begins first, not what is complete first
        (["bd", "!a"], "abc né日👍_xyz", 20),  # the first begins, and comes to nothing
    ],
)
def test_stop_strings(turning, stop, expected, tokens, stream):
    choices, _, usage = complete(turning, "!", max_tokens=22, stop=stop, stream=stream)
    assert choices == [(expected, "stop")] and usage.completion_tokens == tokens
    wait_for(lambda: idle(turning.engine))


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_what_is_written_is_certain_and_ends_before_a_stop_string(pieces, stops):
    writer = Writer(SimpleNamespace(push=pieces.__getitem__, flush=lambda: ""), stops)
    request = SimpleNamespace(stop=frozenset())
    written = ""
    for i in range(len(pieces)):
        text, reason = writer.push(
            Event(request, i, None, "length" if i == len(pieces) - 1 else None)
        )
        written += text
        pushed = "".join(pieces[: i + 1])
        assert not any(stop in written for stop in stops)
        if reason:
            break
    ends = [pushed.find(stop) for stop in stops if stop in pushed]
    assert written == pushed[: min(ends, default=len(pushed))]
    assert reason == ("stop" if ends else "length")


def test_stop_tokens_and_special_tokens_as_stop_strings_end_a_text(tiny):
    whole = generate(tiny, "hello").text
    sixth = letters.encode(whole)[5]
    expected = whole.partition(LETTERS[sixth])[0]
    with serving(tokenizer=letters._replace(stop_token_ids=frozenset([sixth]))) as served:
        choices, parts, usage = complete(served, "hello", logprobs=1)
        assert choices == [(expected, "stop")] and usage.completion_tokens == len(expected) + 1
        assert len(parts[0].logprobs.tokens) == len(expected)
        assert complete(served, "hello", extra_body={"ignore_eos": True})[0] == [(whole, "length")]
    with serving(tokenizer=letters._replace(special_tokens={"<|end|>": sixth})) as served:
        assert complete(served, "hello", stop=["no", "<|end|>"])[0] == [(expected, "stop")]


def test_usage_counts_cached_tokens_and_goes_with_each_event_if_asked():
    with serving(prefix_caching=True) as served:  # in pages of 16
        for prompt, cached in {"a" * 40: 0, "a" * 39: 32, "b" + "a" * 31: 0}.items():
            usage = complete(served, prompt)[2]
            assert usage.prompt_tokens_details.cached_tokens == cached
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {"model": "tiny", "max_tokens": 3, "stream": True, "stream_options": options}
        events = served.client.completions.create(prompt="hello", **fields)
        assert [event.usage.completion_tokens for event in events] == [1, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_all_pages(stream):
    body = json.dumps({"prompt": "a", "max_tokens": 500, "n": 3, "stream": stream})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(max_len=512, step_s=0.01) as served:  # 5 s for one
        port = int(served.url.split(":")[-1])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            wait_for(lambda: len(served.engine.scheduler.running) == 3)
        wait_for(lambda: idle(served.engine), seconds=1)


def test_a_full_queue_is_429_and_what_no_waiting_mends_is_400():
    settings = {"max_batch": 1, "max_waiting": 1, "step_s": 0.01}
    with serving(**settings) as served, ThreadPoolExecutor() as pool:
        for count in (1, 2):
            pool.submit(complete, served, "a", max_tokens=60)
            wait_for(lambda: len(served.engine.scheduler.requests) == count)  # noqa: B023
            wait_for(lambda: len(served.engine.scheduler.running) == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            complete(served, "b")
        assert refused.value.response.headers["retry-after"] == "1"
        assert error_of(served, {"prompt": "b", "n": 2}) == (400, "n")
        assert len(served.engine.scheduler.requests) == 2


WRONG = [  # fields of a completion, and the param of the error
    *(({name: True}, name) for name in ("n", "max_tokens", "temperature", "top_k", "logprobs")),
    *(({"stop": stop}, "stop") for stop in (["a"] * 5, "", [""], [True])),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"whatever": 1}, "whatever"),
    *(({"prompt": prompt}, "prompt") for prompt in ([1.5], ["a", 1], 5)),
    *(({"prompt": prompt}, None) for prompt in ("", [], [61], [-1], "a" * 128)),
]


@pytest.mark.parametrize("fields, param", WRONG)
def test_a_wrong_field_is_an_error_that_names_it(tiny, fields, param):
    assert error_of(tiny, {"prompt": "a"} | fields) == (400, param)


def test_a_seed_that_no_client_sent_is_no_error(tiny):
    assert len(complete(tiny, "a", seed=2**63 - 1, n=2)[0]) == 2


VLLM = """
use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids ignore_eos min_tokens
include_stop_str_in_output skip_special_tokens spaces_between_special_tokens bad_words echo priority
add_generation_prompt continue_final_message chat_template_kwargs include_reasoning
return_tokens_as_token_ids return_token_ids max_repetition_pattern_size min_repetition_pattern_size
repetition_min_count
"""  # its fields whose default is not null: entrypoints/openai/chat_completion/protocol.py
ONLY_NULL = """
audio moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention
reasoning_effort safety_identifier web_search_options
"""


def test_every_field_of_openai_and_vllm_has_a_value_that_asks_for_nothing(tiny):
    fields = {*VLLM.split()}
    for params in (completion_params, chat_params):
        fields.update(params.CompletionCreateParamsBase.__annotations__)
    known = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys() | NEUTRAL.keys()
    assert fields - known == {*ONLY_NULL.split()}
    bodies = [{name: value} for name, values in NEUTRAL.items() for value in values]
    bodies.remove({"include_obfuscation": False})
    bodies += [{"top_k": -1}, {"logit_bias": {"50256": 0}}, dict.fromkeys(fields - {"messages"})]
    bodies += [{"stream_options": {"include_usage": True, "include_obfuscation": False}}]
    for body in bodies:
        body |= {"messages": HI, "max_tokens": 1}
        assert tiny.http.post("/v1/chat/completions", json=body).status_code == 200, body


def test_a_message_of_openai_becomes_one_of_transformers():
    arguments = json.dumps({"a": None})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    converted = message.for_template()
    assert converted["content"] == ""
    assert converted["tool_calls"][0]["function"]["arguments"] == {"a": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "x", "content": parts, "tool_calls": [], "name": "n"})
    assert message.for_template() == {"role": "x", "content": "ab", "name": "n"}


NAMES = "model prompt messages max_tokens temperature top_p top_k seed stop stream logprobs n user "
NAMES += "stream_options priority ttft_slo ignore_eos suffix logit_bias role content tool_calls"
names = st.sampled_from(NAMES.split())
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(["tiny", "user", "high", 10**400, 1e308, -(2**63), "\ud800"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(names | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)
prompted = st.just({"prompt": "a", "messages": HI, "max_tokens": 2})
bodies = st.builds(dict.__or__, prompted, st.dictionaries(names, values, max_size=5))


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40) | (values | bodies).map(json.dumps),
    st.sampled_from(["completions", "chat/completions"]),
)
def test_no_body_is_an_error_500(tiny, body, address):
    if address == "completions" and isinstance(body, str):
        body = body.replace(f'"messages": {json.dumps(HI)}, ', "")
    done = tiny.http.post(f"/v1/{address}", content=body, headers=JSON)
    assert done.status_code in (200, 400, 404)


def test_without_the_key_no_route_shows_anything():
    is_open = {"/", "/health", "/metrics"}
    with serving(key="sésame", cors=["http://a"]) as served:
        right = "bearer sésame".encode()  # the scheme is case-insensitive
        for key in (right, b"Bearer x", right + b"x", b"Basic s\xc3\xa9same", b""):
            done = served.http.get("/v1/models", headers={"authorization": key})
            assert done.status_code == (200 if key == right else 401)
        assert len(served.app.routes) > 8
        for route in served.app.routes:
            address = re.sub("{.*?}", "0", route.path)
            for method in getattr(route, "methods", ["GET"]):
                done = served.http.request(method, address, follow_redirects=True)
                assert done.status_code == (200 if address in is_open else 401), address
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        done = served.http.options("/v1/completions", headers=preflight)
        assert done.headers["access-control-allow-origin"] == "http://a"


def test_without_a_key_a_foreign_host_is_rejected(tiny):
    hosts = {"localhost:1": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 400}
    for host, status in hosts.items():
        assert tiny.http.get("/records/0", headers={"host": host}).status_code == status


@streamed
def test_a_step_that_fails_fails_all_requests_and_no_later_one(stream, caplog):
    with serving() as served:
        fetch = served.engine.runner.fetch
        for steps, expected in ((1, openai.InternalServerError), (5, openai.APIError)):
            results = [fetch] * (steps - 1) if stream else []
            served.engine.runner.fetch = lambda *args: results.pop()(*args)  # noqa: B023
            with pytest.raises(expected):
                complete(served, "a", stream=stream)
            assert idle(served.engine)
        served.engine.runner.fetch = fetch
        assert complete(served, "hello")[0] == [(generate(served, "hello").text, "length")]


def metrics_of(served):
    """{name: value} as /metrics has them."""
    text = served.http.get("/metrics", follow_redirects=True).text
    rows = (line.split() for line in text.splitlines())
    return {row[0].removeprefix("nanosarathi_"): float(row[1]) for row in rows if row[0] != "#"}


def test_metrics_count_what_has_ended_and_show_who_runs_and_who_waits():
    with serving(max_batch=1) as served:
        complete(served, ["hello", "you"])
        for tokens in ([1] * 5, [2] * 5):
            served.engine.add_request(tokens)
        served.engine.step()
        values = metrics_of(served)
    expected = {"prompt_tokens_total": 8, "output_tokens_total": 40, "ttft_seconds_count": 2}
    expected |= {"tbt_seconds_count": 38, "running_requests": 1, "waiting_requests": 1}
    expected |= {"free_pages": 8 - 1}
    assert {name: values[name] for name in expected} == expected


def test_a_viewer_sees_the_state_and_then_each_iteration(monkeypatch):
    monkeypatch.setattr(engine_thread, "RECORDS", 15)
    with serving() as served:
        first = served.http.get(f"/records/{10**15}").json()
        assert [record["live"] for record in first["records"]] == [[]]
        ((text, _),), _, _ = complete(served, "hello")
        later = served.http.get("/records/0").json()
        (number,) = later["texts"]
        assert later["texts"] == {number: text} and later["place"] == 21
        added, prefill, decode, *_, last = later["records"]
        assert added["request"]["prompt_len"] == 5
        assert prefill["chunks"] == [[int(number), 0, 5]] and decode["decodes"] == [int(number)]
        assert last["ended"] == [[int(number), "length"]]
        complete(served, "hello")
        assert served.http.get("/records/0").json()["records"][0].keys() == {"settings", "live"}
        assert len(served.http.get("/records/40").json()["records"]) == 2


def test_an_engine_that_cannot_be_reset_ends_the_server_and_its_clients_are_told(monkeypatch):
    signals = []
    monkeypatch.setattr("server.engine_thread.os.kill", lambda pid, number: signals.append(number))
    with serving() as served:
        monkeypatch.setattr(served.engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(served.engine, "reset", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            complete(served, "x")
        wait_for(lambda: signals == [signal.SIGTERM])


def test_a_call_without_arguments_has_none_for_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    message = Message(role="assistant", content=None, tool_calls=[call])
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == {}
