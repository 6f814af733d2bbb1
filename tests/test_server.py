"""server/, held against OpenAI's own client and types, and the engine: nothing is left behind."""

import json
import signal
import socket

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from sampling import SamplingParams
from server import engine_thread
from server.protocol import AUTO, NEUTRAL, ChatBody, CompletionBody, Message
from tests.servers import LETTERS, complete, generate, idle, letters, serving, wait_for

streamed = pytest.mark.parametrize("stream", [False, True])
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@streamed
def test_each_prompt_has_n_choices_with_seeds_of_their_own(tiny, stream):
    sampling = {"temperature": 0.9, "top_p": 0.8}
    choices, _, usage = complete(
        tiny,
        ["hello", "a"],
        n=2,
        seed=5,
        stream=stream,
        **sampling,
    )
    params = [SamplingParams(20, seed=seed, **sampling) for seed in (5, 6)]
    expected = [generate(tiny, text, each).text for text in ("hello", "a") for each in params]
    assert choices == [(text, "length") for text in expected]
    assert usage.prompt_tokens == 6  # each prompt once
    assert usage.completion_tokens == 80


@streamed
def test_the_logprobs_are_those_of_the_engine(tiny, stream):
    choices, parts, usage = complete(tiny, HI, logprobs=True, stream=stream)
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
def test_stop_strings_end_a_text_and_free_its_pages(tiny, stream):
    text = generate(tiny, "hello").text
    for stop in ([text[5:8]], [text[9:12] + "?", text[10:13]], [text[17:]]):
        expected = min((text.partition(each)[0] for each in stop), key=len)
        choices, _, _ = complete(tiny, "hello", max_tokens=100, stop=stop, stream=stream)
        assert choices == [(expected, "stop")]
        wait_for(lambda: idle(tiny.engine))


def test_stop_tokens_and_special_tokens_as_stop_strings_end_a_text(tiny):
    text = generate(tiny, "hello").text
    token = LETTERS.index(text[5])
    expected = text.partition(text[5])[0]
    tokenizer = letters._replace(
        stop_token_ids=frozenset([token]),
        special_tokens={"<|end|>": token},
    )
    ignoring = {"ignore_eos": True}
    with serving(tokenizer) as served:
        choices, parts, usage = complete(served, "hello", logprobs=1)
        assert choices == [(expected, "stop")]
        assert usage.completion_tokens == len(expected) + 1
        assert len(parts[0].logprobs.tokens) == len(expected)
        assert complete(served, "hello", extra_body=ignoring)[0] == [(text, "length")]
        choices, _, _ = complete(served, "hello", stop=["?", "<|end|>"], extra_body=ignoring)
        assert choices == [(expected, "stop")]


def test_usage_counts_cached_tokens_and_goes_with_each_event_if_asked():
    with serving(prefix_caching=True) as served:  # in pages of 16
        for prompt, cached in {"a" * 40: 0, "a" * 39: 32, "b" + "a" * 31: 0}.items():
            usage = complete(served, prompt)[2]
            assert usage.prompt_tokens_details.cached_tokens == cached
        events = served.client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        assert [event.usage.completion_tokens for event in events] == [1, 2, 3, 3]


def post(served, **fields):
    """A connection over which a completion is asked for, and no answer is read."""
    body = json.dumps({"prompt": "a", "max_tokens": 500} | fields)
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", int(served.url[-5:])))
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


@streamed
def test_a_client_that_leaves_frees_all_pages(stream):
    with serving(max_len=512, step_s=0.01) as served:  # 5 s for one
        with post(served, n=3, stream=stream):
            wait_for(lambda: len(served.engine.scheduler.running) == 3)
        wait_for(lambda: idle(served.engine), seconds=1)


def test_a_full_queue_is_429_and_what_no_waiting_mends_is_400():
    with serving(max_len=512, max_batch=1, max_waiting=1, step_s=0.01) as served:
        scheduler = served.engine.scheduler
        with post(served):
            wait_for(lambda: scheduler.running)
            with post(served):
                wait_for(lambda: scheduler.waiting)
                with pytest.raises(openai.RateLimitError) as refused:
                    complete(served, "b")
                assert refused.value.response.headers["retry-after"] == "1"
                done = served.http.post(COMPLETION, json={"prompt": "b", "n": 2})
                assert done.status_code == 400
                assert len(scheduler.requests) == 2


WRONG = [  # a field of a completion, wrong values, and the param of the error
    ("n", [True, 0, 129], "n"),
    ("max_tokens", [True, "3", 0], "max_tokens"),
    ("temperature", [True, -1], "temperature"),
    ("logprobs", [True, 2], "logprobs"),
    ("stop", [["a"] * 5, "", [""], [True]], "stop"),
    ("tools", [[{"type": "function"}]], "tools"),
    ("whatever", [1], "whatever"),
    ("prompt", [[1.5], ["a", 1], 5], "prompt"),
    ("prompt", ["", [], [61], [-1], "a" * 128], None),
    ("model", ["b"], "model"),
]


@pytest.mark.parametrize("field, values, param", WRONG)
def test_a_wrong_field_is_an_error_that_names_it(tiny, field, values, param):
    for value in values:
        done = tiny.http.post(COMPLETION, json={"prompt": "a", field: value})
        assert done.status_code == (404 if field == "model" else 400)
        error = done.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param


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
KNOWN = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()


def test_every_field_of_openai_and_vllm_has_a_value_that_asks_for_nothing(tiny):
    fields = {*VLLM.split()}
    for params in (completion_params, chat_params):
        fields.update(params.CompletionCreateParamsBase.__annotations__)
    assert fields - KNOWN - NEUTRAL.keys() == {*ONLY_NULL.split()}
    bodies = [{name: value} for name, value in NEUTRAL.items()]
    bodies.remove({"include_obfuscation": False})
    bodies.append({"stream_options": {"include_usage": True, "include_obfuscation": False}})
    bodies += [{"top_k": -1}, {"logit_bias": {"50256": 0}}, {"seed": 2**63 - 1, "n": 2}]
    bodies += [dict.fromkeys(AUTO, "auto"), dict.fromkeys(fields - {"messages"})]
    for body in bodies:
        done = tiny.http.post(CHAT, json=body | {"messages": HI, "max_tokens": 1})
        assert done.status_code == 200, body


CALL = {"id": "c", "function": {"name": "f", "arguments": '{"a": null}'}}
BARE = {"id": "d", "function": {"name": "f", "arguments": ""}}


def test_a_message_of_openai_becomes_one_of_transformers():
    fields = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL, BARE]}
    message = Message.model_validate(fields).model_dump(exclude_none=True)
    assert message.keys() == {"role", "content", "tool_calls"}
    assert message["content"] == ""
    arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert arguments == [{"a": None}, {}]
    parts = [{"type": "text", "text": "a"}] * 2
    fields = {"role": "x", "content": parts, "tool_calls": [], "name": "n"}
    message = Message.model_validate(fields).model_dump(exclude_none=True)
    assert message == {"role": "x", "content": "aa", "name": "n"}


names = st.sampled_from(["role", "content", "tool_calls", *KNOWN])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(["tiny", "high", 10**400, -(2**63), "\ud800"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(names | st.text(), inner),
    max_leaves=8,
)
prompts = st.sampled_from([{"prompt": "a"}, {"messages": HI}])
fields = st.dictionaries(names, values, max_size=5)
bodies = st.builds(dict.__or__, prompts, fields).map(lambda body: {"max_tokens": 2} | body)
texts = st.binary(max_size=40) | (values | bodies).map(json.dumps)


@settings(max_examples=200, deadline=None)
@given(texts, st.sampled_from([CHAT, COMPLETION]))
def test_no_body_is_an_error_500(tiny, body, address):
    done = tiny.http.post(address, content=body, headers={"content-type": "application/json"})
    assert done.status_code in (200, 400, 404)


def test_without_the_key_no_route_shows_anything():
    is_open = {"/", "/health"}
    right = "bearer sésame".encode()  # the scheme is case-insensitive
    with serving(key="sésame", cors=["http://a"]) as served:
        for key in (right, b"Bearer x", right + b"x", b"Basic s\xc3\xa9same", b""):
            done = served.http.get("/records/0", headers={"authorization": key})
            assert done.status_code == (200 if key == right else 401)
        paths = served.http.get("/openapi.json").json()["paths"]
        assert len(paths) == 7
        for path, methods in paths.items():
            done = served.http.request(*methods, path.replace("{place}", "0"))
            assert done.status_code == (200 if path in is_open else 401), path
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        done = served.http.options(COMPLETION, headers=preflight)
        assert done.headers["access-control-allow-origin"] == "http://a"


def test_without_a_key_a_foreign_host_is_rejected(tiny):
    hosts = {"localhost:1": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 400}
    for host, status in hosts.items():
        assert tiny.http.get("/records/0", headers={"host": host}).status_code == status


@streamed
@pytest.mark.parametrize("steps", [0, 4])
def test_a_step_that_fails_fails_all_requests_and_no_later_one(stream, steps):
    with serving() as served:
        fetch = served.engine.runner.fetch
        results = [fetch] * steps
        served.engine.runner.fetch = lambda *args: results.pop()(*args)
        begun = stream and steps
        with pytest.raises(openai.APIError if begun else openai.InternalServerError):
            complete(served, "a", stream=stream)
        wait_for(lambda: idle(served.engine))  # its clients are told first
        results += [fetch] * 20
        assert len(complete(served, "a")[0]) == 1


def test_an_engine_that_cannot_be_reset_ends_the_server_and_its_clients_are_told(monkeypatch):
    signals = []
    monkeypatch.setattr("server.engine_thread.os.kill", lambda pid, number: signals.append(number))
    with serving() as served:
        monkeypatch.setattr(served.engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(served.engine, "reset", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            complete(served, "x")
        wait_for(lambda: signals == [signal.SIGTERM])


METRICS = {
    "prompt_tokens_total": 8,
    "output_tokens_total": 40,
    "cached_tokens_total": 0,
    "preemptions_total": 0,
    "ttft_seconds_count": 2,
    "tbt_seconds_count": 38,
    "running_requests": 1,
    "waiting_requests": 1,
    "free_pages": 8 - 1,
}


def test_metrics_count_what_has_ended_and_show_who_runs_and_who_waits():
    with serving(max_batch=1) as served:
        complete(served, ["hello", "you"])
        for token in (1, 2):
            served.engine.add_request([token] * 5)
        served.engine.step()
        lines = served.http.get("/metrics/").text.splitlines()
    values = dict(line.split() for line in lines if line[0] != "#")
    assert {name: float(values[f"nanosarathi_{name}"]) for name in METRICS} == METRICS


def test_a_viewer_sees_the_state_and_then_each_iteration(monkeypatch):
    monkeypatch.setattr(engine_thread, "RECORDS", 15)
    with serving() as served:
        assert served.http.get(f"/records/{10**15}").json()["records"][0]["live"] == []
        ((text, _),), _, _ = complete(served, "hello")
        reply = served.http.get("/records/0").json()
        added, prefill, decode, *_, last = reply["records"]
        request_id = added["request"]["id"]
        assert reply["texts"] == {str(request_id): text}
        assert prefill["chunks"] == [[request_id, 0, 5]]
        assert decode["decodes"] == [request_id]
        assert last["ended"] == [[request_id, "length"]]
        complete(served, "hello")
        assert "live" in served.http.get("/records/0").json()["records"][0]
        assert len(served.http.get("/records/40").json()["records"]) == 2
