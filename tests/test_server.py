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
from server.protocol import AUTO, NEUTRAL, ChatBody, CompletionBody, Message
from tests.servers import LETTERS, complete, generate, idle, letters, serving, wait_for

streamed = pytest.mark.parametrize("stream", [False, True])
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@streamed
def test_each_prompt_has_n_choices_with_seeds_of_their_own(tiny, stream):
    sampling = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    choices, _, usage = complete(tiny, ["hello", "a"], n=2, stream=stream, **sampling)
    params = [SamplingParams(20, temperature=0.9, top_p=0.8, seed=seed) for seed in (5, 6)]
    expected = [generate(tiny, text, each).text for text in ("hello", "a") for each in params]
    assert choices == [(text, "length") for text in expected]
    assert usage.prompt_tokens == 6  # each prompt once
    assert usage.completion_tokens == 80


@streamed
def test_a_chat_has_the_logprobs_of_the_engine(tiny, stream):
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
    assert choices == [(expected, "stop")]
    assert usage.completion_tokens == tokens
    wait_for(lambda: idle(turning.engine))


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_what_is_written_is_certain_and_ends_before_a_stop_string(pieces, stops):
    writer = Writer(SimpleNamespace(push=pieces.__getitem__, flush=str), stops)
    request = SimpleNamespace(stop=frozenset())
    written = ""
    pushed = ""
    reason = None
    for i, piece in enumerate(pieces):
        end = "length" if i == len(pieces) - 1 else None
        text, reason = writer.push(Event(request, i, None, end))
        written += text
        pushed += piece
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
        assert choices == [(expected, "stop")]
        assert usage.completion_tokens == len(expected) + 1
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
        events = served.client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=3,
            stream=True,
            stream_options=options,
        )
        assert [event.usage.completion_tokens for event in events] == [1, 2, 3, 3]


@streamed
def test_a_client_that_leaves_frees_all_pages(stream):
    body = json.dumps({"prompt": "a", "max_tokens": 500, "n": 3, "stream": stream})
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(max_len=512, step_s=0.01) as served:  # 5 s for one
        port = int(served.url.split(":")[-1])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            wait_for(lambda: len(served.engine.scheduler.running) == 3)
        wait_for(lambda: idle(served.engine), seconds=1)


def error_of(served, fields):
    """(status, param) of the error to a completion."""
    done = served.http.post(COMPLETION, json=fields)
    error = done.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return done.status_code, error["param"]


def test_a_full_queue_is_429_and_what_no_waiting_mends_is_400():
    with serving(max_batch=1, max_waiting=1, step_s=0.01) as served, ThreadPoolExecutor() as pool:
        scheduler = served.engine.scheduler
        pool.submit(complete, served, "a", max_tokens=60)
        wait_for(lambda: scheduler.running)
        pool.submit(complete, served, "a", max_tokens=60)
        wait_for(lambda: scheduler.waiting)
        with pytest.raises(openai.RateLimitError) as refused:
            complete(served, "b")
        assert refused.value.response.headers["retry-after"] == "1"
        assert error_of(served, {"prompt": "b", "n": 2}) == (400, "n")
        assert len(scheduler.requests) == 2


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
    values = [*NEUTRAL.items(), *((name, "auto") for name in AUTO)]
    values += [("top_k", -1), ("logit_bias", {"50256": 0})]
    bodies = [{name: value} for name, value in values if name != "include_obfuscation"]
    bodies.append(dict.fromkeys(fields - {"messages"}))
    bodies.append({"stream_options": {"include_usage": True, "include_obfuscation": False}})
    for body in bodies:
        done = tiny.http.post(CHAT, json=body | {"messages": HI, "max_tokens": 1})
        assert done.status_code == 200, body


@pytest.mark.parametrize("content, text", [(None, ""), ([{"type": "text", "text": "a"}] * 2, "aa")])
@pytest.mark.parametrize("arguments, parsed", [('{"a": null}', {"a": None}), ("", {})])
def test_a_message_of_openai_becomes_one_of_transformers(content, text, arguments, parsed):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    expected = {"id": "c", "function": {"name": "f", "arguments": parsed}}
    message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": [call]}
    converted = Message.model_validate(message).model_dump(exclude_none=True)
    assert converted == {"role": "assistant", "content": text, "tool_calls": [expected]}
    message = {"role": "x", "name": "n", "tool_calls": []}
    converted = Message.model_validate(message).model_dump(exclude_none=True)
    assert converted == {"role": "x", "content": "", "name": "n"}


NAMES = "model prompt messages max_tokens temperature top_p top_k seed stop stream logprobs n user "
NAMES += "stream_options priority ttft_slo ignore_eos suffix logit_bias role content tool_calls"
names = st.sampled_from(NAMES.split())
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(["tiny", "user", "high", 10**400, 1e308, -(2**63), "\ud800"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(names | st.text(), inner),
    max_leaves=8,
)
fields = st.dictionaries(names, values, max_size=5)
prompts = st.sampled_from([{"prompt": "a"}, {"messages": HI}, {}])
bodies = st.builds(lambda prompt, fields: prompt | {"max_tokens": 2} | fields, prompts, fields)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40) | (values | bodies).map(json.dumps), st.sampled_from([CHAT, COMPLETION])
)
def test_no_body_is_an_error_500(tiny, body, address):
    done = tiny.http.post(address, content=body, headers={"content-type": "application/json"})
    assert done.status_code in (200, 400, 404)


def test_without_the_key_no_route_shows_anything():
    is_open = {"/", "/health", "/metrics"}
    with serving(key="sésame", cors=["http://a"]) as served:
        right = "bearer sésame".encode()  # the scheme is case-insensitive
        for key in (right, b"Bearer x", right + b"x", b"Basic s\xc3\xa9same", b""):
            done = served.http.get("/v1/models", headers={"authorization": key})
            assert done.status_code == (200 if key == right else 401)
        schema = served.http.get("/openapi.json").json()["paths"]
        assert len(schema) == 7
        for path, methods in schema.items():
            for method in methods:
                done = served.http.request(method, re.sub("{.*?}", "0", path))
                assert done.status_code == (200 if path in is_open else 401), path
        preflight = {"origin": "http://a", "access-control-request-method": "POST"}
        done = served.http.options(COMPLETION, headers=preflight)
        assert done.headers["access-control-allow-origin"] == "http://a"


def test_without_a_key_a_foreign_host_is_rejected(tiny):
    hosts = {"localhost:1": 200, "127.0.0.1": 200, "[::1]:80": 200, "evil.example": 400}
    for host, status in hosts.items():
        assert tiny.http.get("/records/0", headers={"host": host}).status_code == status


@streamed
def test_a_step_that_fails_fails_all_requests_and_no_later_one(stream):
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


def test_an_engine_that_cannot_be_reset_ends_the_server_and_its_clients_are_told(monkeypatch):
    signals = []
    monkeypatch.setattr("server.engine_thread.os.kill", lambda pid, number: signals.append(number))
    with serving() as served:
        monkeypatch.setattr(served.engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(served.engine, "reset", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            complete(served, "x")
        wait_for(lambda: signals == [signal.SIGTERM])


def test_metrics_count_what_has_ended_and_show_who_runs_and_who_waits():
    with serving(max_batch=1) as served:
        complete(served, ["hello", "you"])
        for token in (1, 2):
            served.engine.add_request([token] * 5)
        served.engine.step()
        text = served.http.get("/metrics", follow_redirects=True).text
    values = dict(line.split() for line in text.splitlines() if line[0] != "#")
    expected = {
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
    assert {name: float(values[f"nanosarathi_{name}"]) for name in expected} == expected


def test_a_viewer_sees_the_state_and_then_each_iteration(monkeypatch):
    monkeypatch.setattr(engine_thread, "RECORDS", 15)
    with serving() as served:

        def records(place):
            return served.http.get(f"/records/{place}").json()

        assert [record["live"] for record in records(10**15)["records"]] == [[]]
        ((text, _),), _, _ = complete(served, "hello")
        later = records(0)
        (number,) = later["texts"]
        assert later["texts"] == {number: text}
        assert later["place"] == 21
        added, prefill, decode, *_, last = later["records"]
        assert added["request"]["prompt_len"] == 5
        assert prefill["chunks"] == [[int(number), 0, 5]]
        assert decode["decodes"] == [int(number)]
        assert last["ended"] == [[int(number), "length"]]
        complete(served, "hello")
        assert records(0)["records"][0].keys() == {"settings", "live"}
        assert len(records(40)["records"]) == 2
