"""server/: what OpenAI's client sees, with real connections; and that nothing is left behind."""

import asyncio
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from policies.trial import find_violation
from pretrained.streams import Writer
from pretrained.tokenizers import ByteTokenizer
from request import Event, Service
from sampling import SamplingParams
from server import engine_thread
from server.__main__ import default_sampling, make_engine, parse_args
from server.app import Api
from server.engine_thread import EngineThread
from server.protocol import ChatRequest
from server.responses import CompletionResponse
from tests import forked
from tests.helpers import tiny_model
from tests.servers import (
    LETTERS,
    PROGRAM,
    TEXT,
    circle,
    complete,
    generate,
    idle,
    letters,
    serving,
    wait_for,
)
from tests.test_tokenizers import write_json

streamed = pytest.mark.parametrize("stream", [False, True])
HI = [{"role": "user", "content": "hi"}]


@streamed
@pytest.mark.parametrize("asked", [["hello", "a"], [letters.encode("hello"), [0]], "hello"])
def test_each_prompt_has_n_choices_with_seeds_of_their_own(tiny, asked, stream):
    answer = complete(tiny, asked, n=2, stream=stream, temperature=0.9, top_p=0.8, seed=5)
    texts = ["hello", "a"] if isinstance(asked, list) else ["hello"]
    params = [SamplingParams(20, temperature=0.9, top_p=0.8, seed=seed) for seed in (5, 6)]
    expected = [generate(tiny, text, each).text for text in texts for each in params]
    assert answer.choices == [(text, "length") for text in expected]
    prompt_tokens = 4 + len(texts)  # each prompt once
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 40 * len(texts)
    assert answer.usage.total_tokens == prompt_tokens + 40 * len(texts)


def test_sampling_is_that_of_the_engine_with_a_seed_for_each_request(tiny):
    params = SamplingParams(20, temperature=0.9, top_k=3, seed=5)
    answer = complete(tiny, "hello", temperature=0.9, seed=5, extra_body={"top_k": 3})
    assert answer.text == generate(tiny, "hello", params).text
    assert len({complete(tiny, "hello", temperature=1.5).text for _ in range(4)}) > 1


@streamed
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_chat_has_n_choices_with_their_role_first(tiny, stream, limit):
    fields = {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": True, "stream": stream}
    answer = complete(tiny, HI, chat=True, **fields, **{limit: 20})
    for index, (text, reason) in enumerate(answer.choices):
        params = SamplingParams(20, temperature=0.9, seed=5 + index, logprobs=True)
        expected = generate(tiny, "user: hi\nassistant:", params)
        assert (text, reason) == (expected.text, "length")
        parts = [part for part in answer.parts if part.index == index]
        roles = [(part.delta if stream else part.message).role for part in parts]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)
        logprobs = [token.logprob for part in parts for token in part.logprobs.content]
        assert logprobs == pytest.approx(expected.logprobs)


def test_a_chat_without_a_limit_is_as_long_as_fits(tiny):
    answer = complete(tiny, HI, chat=True)
    assert answer.usage.total_tokens == 128 and answer.choices[0][1] == "length"


@streamed
@pytest.mark.parametrize(
    "stop, expected, tokens",
    [
        ("né", "abc ", 7),  # from one token to the next
        (["zz", "👍_x"], "abc né日", 16),
        (["yz!", "xyz"], "abc né日👍_", 18),  # what begins first, not what is complete first
        (["c", "bc"], "a", 3),  # both are complete
        ("bd", "abc né日👍_xyz!abc", 22),  # begins, and comes to nothing
        (["a"], "", 1),
    ],
)
def test_stop_strings(turning, stop, expected, tokens, stream):
    answer = complete(turning, "!", max_tokens=22, stop=stop, stream=stream)
    assert answer.choices == [(expected, "length" if stop == "bd" else "stop")]
    assert answer.usage.completion_tokens == tokens
    wait_for(lambda: idle(turning.engine))
    if stream and stop == "né":  # what may be its beginning is held back
        assert [part.text for part in answer.parts] == ["a", "b", "c", " ", "", "", ""]


@streamed
def test_a_choice_that_ends_ends_no_other_and_leaves_the_engine(stream):
    with serving(circle(), ByteTokenizer(), step_s=0.03) as served, ThreadPoolExecutor() as pool:
        fields = {"max_tokens": 12, "stop": "abc", "stream": stream}
        future = pool.submit(complete, served, ["!", "_", "日"], **fields)
        for running in (3, 2, 1):
            wait_for(lambda: len(served.scheduler.requests) == running)  # noqa: B023
        answer = future.result()
        assert answer.choices == [("", "stop"), ("xyz!", "stop"), ("👍_xyz!", "stop")]
        assert answer.usage.completion_tokens == 3 + 7 + 12
        wait_for(lambda: idle(served.engine))


@streamed
def test_logprobs_are_those_of_the_engine_and_go_with_their_text(turning, stream):
    expected = generate(turning, "!")
    offsets = [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 8, 9, 10, 11, 12, 13]
    for stop, count in ((None, 20), ("👍", 14)):  # the stop string's too
        answer = complete(turning, "!", logprobs=1, stream=stream, stop=stop)
        logprobs = [part.logprobs for part in answer.parts]
        values = sum((each.token_logprobs for each in logprobs), [])
        assert values == pytest.approx(expected.logprobs[:count])
        assert sum((each.text_offset for each in logprobs), []) == offsets[:count]


def test_logprobs_of_a_chat_have_the_bytes_of_whole_characters(turning, monkeypatch):
    monkeypatch.setattr(turning.api.tokenizer, "encode_chat", lambda messages: [ord("!")])
    answer = complete(turning, HI, chat=True, max_tokens=19, logprobs=True)
    spelled = [token.bytes for token in answer.parts[0].logprobs.content]
    assert bytes(sum(spelled, [])).decode() == answer.text == TEXT


@streamed
def test_a_stop_token_ends_a_text_and_is_not_in_it(tiny, stream):
    whole = generate(tiny, "hello").text
    sixth = letters.encode(whole)[5]
    expected = whole.partition(LETTERS[sixth])[0]
    with serving(tokenizer=letters._replace(stop_token_ids=frozenset([sixth]))) as served:
        answer = complete(served, "hello", logprobs=0, stream=stream)
        assert answer.choices == [(expected, "stop")]
        assert answer.usage.completion_tokens == len(expected) + 1
        assert sum(len(part.logprobs.tokens) for part in answer.parts) == len(expected)
        answer = complete(served, "hello", extra_body={"ignore_eos": True})
        assert answer.choices == [(whole, "length")]


def test_a_stop_string_that_is_a_special_token_ends_the_text(tiny):
    tokens = letters.encode(generate(tiny, "hello").text)
    special = tokens[5]
    text = letters.decode(tokens[: tokens.index(special)])

    def decode(ids):
        return letters.decode([i for i in ids if i != special])

    tokenizer = letters._replace(decode=decode, special_tokens={"<|end|>": special})
    with serving(tokenizer=tokenizer) as served:
        for ignore_eos in (False, True):
            fields = {"stop": ["no", "<|end|>"], "extra_body": {"ignore_eos": ignore_eos}}
            answer = complete(served, "hello", **fields)
            assert answer.choices == [(text, "stop")]
            assert answer.usage.completion_tokens == len(text) + 1
        assert complete(served, "hello", stop="no").usage.completion_tokens == 20
        with pytest.raises(openai.BadRequestError, match="is a special token") as refused:
            complete(served, "hello", stop="\n<|end|>")
        assert refused.value.param == "stop"


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_what_is_written_is_certain_and_ends_before_a_stop_string(pieces, stops):
    stream = SimpleNamespace(push=pieces.__getitem__, flush=lambda: "")
    writer = Writer(stream, stops)
    written = ""
    for i in range(len(pieces)):
        last = "length" if i == len(pieces) - 1 else None
        text, reason = writer.push(Event(None, i, None, last))
        written += text
        pushed = "".join(pieces[: i + 1])
        assert not any(stop in written for stop in stops) and writer.length == len(pushed)
        if reason:
            break
    ends = [pushed.find(stop) for stop in stops if stop in pushed]
    assert written == pushed[: min(ends, default=len(pushed))]
    assert reason == ("stop" if ends else "length")


def test_long_stop_strings_hold_nobody_up():
    held_texts = []

    class Counted(str):
        def startswith(self, held):
            held_texts.append(held)
            return str.startswith(self, held)

    stream = SimpleNamespace(push=lambda token: "q", flush=lambda: "")
    writer = Writer(stream, [Counted("q" * 10_000 + "!")])
    for i in range(5):
        assert writer.push(Event(None, i)) == ("", None)
    assert 5 <= len(held_texts) <= 15  # no longer than the text that is held


@streamed
def test_usage_counts_cached_tokens_but_not_those_of_a_preempted_self(stream):
    cached_tokens = {"a" * 40: 0, "a" * 39: 32, "a" * 33: 32, "a" * 32: 16, "b" + "a" * 31: 0}
    with serving(prefix_caching=True) as served:  # in pages of 16
        for prompt, cached in cached_tokens.items():
            usage = complete(served, prompt, max_tokens=1, stream=stream).usage
            assert usage.prompt_tokens_details.cached_tokens == cached
        wait_for(lambda: metrics_of(served)["cached_tokens_total"] == 80)
    chat_request = ChatRequest(messages=[{}], stream=stream)
    for preemptions, cached in ((0, 32), (1, 0)):
        request = SimpleNamespace(prompt_len=60, cached_tokens=32, preemptions=preemptions)
        usage = CompletionResponse(None, None, "tiny", chat_request, [request], None).usage()
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def metrics_of(served):
    """{name: value} as /metrics has them."""
    rows = (line.split() for line in served.http.get("/metrics").text.splitlines())
    return {row[0].removeprefix("nanosarathi_"): float(row[1]) for row in rows if row[0] != "#"}


def test_metrics_count_what_has_ended_and_show_who_runs_and_who_waits():
    with serving(max_batch=1) as served:
        complete(served, ["hello", "you"])
        with pytest.raises(openai.BadRequestError):
            complete(served, "you", n=0)
        assert metrics_of(served)["waiting_requests"] == 0
        for tokens in ([1] * 5, [2] * 5, [3] * 5):
            served.engine.add_request(tokens)
        served.engine.step()
        served.api.thread.metrics.observe(served.engine.abort(3))  # it has no token, so no TTFT
        values = metrics_of(served)
    expected = {
        "prompt_tokens_total": 8 + 5,
        "output_tokens_total": 40,
        "ttft_seconds_count": 2,
        "tbt_seconds_count": 38,
        'tbt_seconds_bucket{le="+Inf"}': 38,
        "running_requests": 1,
        "waiting_requests": 1,
        "free_pages": 8 - 1,
        "preemptions_total": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert 0 < values["ttft_seconds_sum"] < 20


def test_the_last_token_of_a_stop_string_is_counted():
    with serving(circle(), ByteTokenizer(), max_len=512) as served:
        for _ in range(20):  # the engine ends some of them before it is told of the stop string
            complete(served, "!", max_tokens=5, stop="abc ")
        wait_for(lambda: metrics_of(served)["prompt_tokens_total"] == 20)


def records_since(served, place):
    return served.http.get(f"/records/{place}").json()


def test_a_viewer_sees_the_state_and_then_each_iteration():
    with serving() as served:
        assert "/records" in served.http.get("/").text
        first = records_since(served, 10**15)
        assert [record["live"] for record in first["records"]] == [[]]
        text = complete(served, "hello").text
        answer = records_since(served, first["place"])
        assert answer["texts"] == {"0": text}
        added, prefill, decode, *_, last = answer["records"]
        assert added["request"]["prompt_len"] == 5
        assert prefill["chunks"] == [[0, 0, 5]] and decode["decodes"] == [0]
        assert last["ended"] == [[0, "length"]]
        assert len(answer["records"]) == answer["place"] == 21
        assert records_since(served, 21) == answer | {"records": []}
        assert records_since(served, 22)["records"][0].keys() == {"settings", "live"}


def test_records_that_are_too_old_are_a_snapshot(monkeypatch):
    monkeypatch.setattr(engine_thread, "RECORDS", 5)
    with serving() as served:
        complete(served, "hello")
        assert 5 <= len(served.api.thread.recorder.records) <= 10
        old = records_since(served, 0)
        assert old["records"][0].keys() == {"settings", "live"} and old["place"] == 21
        late = records_since(served, 18)
        assert len(late["records"]) == 3 and late["records"][-1]["ended"] == [[0, "length"]]


def test_the_page_says_who_serves_and_what_is_too_long():
    with serving(policy="dynamic", policy_options={"tbt_slo": 0.25}) as served:
        text = served.http.get("/").text
        assert '"slo_s": 0.25, "slo_source": "the option --tbt-slo"' in text
        assert "dynamic, chunk 16, 4 requests of 128 tokens" in text


def test_one_slow_decode_does_not_move_the_slo_of_an_idle_engine(monkeypatch):
    seconds = iter([0.25, 0.25, 0.25, 40.0, *[0.25] * 6])  # a prefill and nine decodes
    now = 0.0
    caching = {"prefix_caching": True, "page_size": 2}
    engine = Engine(tiny_model(), max_batch=2, max_len=64, clock=lambda: now, **caching)
    engine.warm_up()
    forward = engine.runner.forward

    def timed_forward(*args):
        nonlocal now
        now += next(seconds)
        return forward(*args)

    monkeypatch.setattr(engine.runner, "forward", timed_forward)
    thread = EngineThread(lambda: engine, time_decodes=True)
    assert list(seconds) == []
    assert idle(engine) and not any(map(engine.scheduler.pages.is_cached, range(64)))
    api = Api(thread, letters, "tiny")
    thread.executor.shutdown()
    response = asyncio.run(api.page(SimpleNamespace(headers={"host": "localhost"})))
    source = '"slo_source": "5 times the median decode iteration of an idle engine"'
    assert f'"slo_s": 1.25, {source}' in response.body.decode()
    assert thread.recorder.records == []


@pytest.mark.parametrize("max_len, has_decodes", [(2, False), (4, True)])
def test_a_short_engine_decodes_as_often_as_it_can(max_len, has_decodes):
    engine = Engine(tiny_model(), max_batch=2, max_len=max_len)
    assert (engine_thread.idle_decode_seconds(engine) is not None) == has_decodes


@pytest.mark.slow
def test_after_a_signal_it_finishes_what_runs():
    with forked.Program(*PROGRAM, "--max-len", "600", "--served-model-name", "a/name") as process:
        url = re.search(r"http://\S+", process.stdout.readline()).group()
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert client.models.retrieve("a/name").id == "a/name"
        fields = {"model": "a/name", "prompt": "a", "max_tokens": 500}
        stream = client.completions.create(**fields, stream=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(**fields)
        assert sum(1 for _ in stream) == 499
        assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()


DROPS_DECODES = """
from scheduler import SarathiServe

class DropsDecodes(SarathiServe):
    def grow_decodes(self):
        return super().grow_decodes()[:1]
"""


@pytest.mark.slow
def test_a_policy_that_breaks_a_rule_is_served_with_a_warning(tmp_path):
    """And a signal as soon as it listens ends it."""
    file = tmp_path / "drops.py"
    file.write_text(DROPS_DECODES, "utf-8")
    words = ["--max-len", "64", "--policy", f"{file}:DropsDecodes"]
    with forked.Program(*PROGRAM, *words) as process:
        ready = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
        assert process.wait(20) == 0
    assert ready.startswith("llama-tiny at http://") and "Traceback" not in errors
    assert "\nwarning: the rule 'no decode dropped' is broken: " in errors


COMPUTES_AGAIN = """admit(self):
        request = super().admit()
        if request and request.num_computed:
            request.num_computed -= 1
        return request"""
TRIED = [  # a method of a policy, and the rule that it breaks: with little memory, much, shared
    ("preempt(self, r): super().preempt(r); self.waiting.remove(r)", "nothing lost"),
    ("schedule(self): self.max_batch += 1; return super().schedule()", "at most max_batch"),
    (COMPUTES_AGAIN, "chunks"),
]


@pytest.mark.parametrize("method, rule", TRIED)
def test_a_policy_from_a_file_is_tried_in_all_memories(method, rule, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        f"from scheduler import *\nclass Own(SarathiServe):\n    def {method}\n", "utf-8"
    )
    assert find_violation(f"{file}:Own").rule == rule


def test_a_policy_that_keeps_all_rules_is_served_without_a_warning():
    assert find_violation("policies/template.py:ShortestFirst") is None
    assert find_violation("request-level") is None


def test_pages_are_shared_by_option():
    def config(options):
        return make_engine(parse_args([*PROGRAM[2:-2], *options.split()])).config

    assert not config("--max-len 64").prefix_caching
    for max_len, page_size in ((128, 64), (31, 16)):
        caching = config(f"--max-len {max_len} --prefix-caching")
        assert caching.prefix_caching and caching.page_size == page_size


def test_sampling_is_as_recommended_unless_the_client_says_so(tmp_path, capsys):
    recommendation = {"temperature": 0, "top_p": 0.5, "top_k": 7, "do_sample": True}
    write_json(tmp_path / "generation_config.json", recommendation)
    recommended = default_sampling(tmp_path)
    assert default_sampling(None) == default_sampling(tmp_path / "nothing")
    assert capsys.readouterr().err == ""
    write_json(tmp_path / "generation_config.json", recommendation | {"repetition_penalty": 1.5})
    assert default_sampling(tmp_path) == recommended
    assert "repetition_penalty=1.5 is not computed" in capsys.readouterr().err
    with serving() as served:
        served.scheduler.add = Mock(wraps=served.scheduler.add)

        def sampled(**fields):
            served.http.post("/v1/completions", json={"prompt": "a"} | fields)
            params = served.scheduler.add.call_args.args[0].params
            return params.temperature, params.top_p, params.top_k

        assert sampled() == (1, 1, 0)  # OpenAI's
        served.api.sampling = recommended
        assert sampled(temperature=None, top_p=1) == (0, 1, 7)
        assert sampled(temperature=0.25, top_k=0) == (0.25, 0.5, 0)


def test_what_a_request_may_expect_reaches_the_scheduler():
    fields = {"priority": "high", "ttft_slo": 1.0, "tbt_slo": 0.5, "user": "ann"}
    with serving() as served:
        served.scheduler.add = Mock(wraps=served.scheduler.add)
        complete(served, "a", extra_body=fields)
        assert served.scheduler.add.call_args.args[0].service == Service(1, 1.0, 0.5, "ann")
