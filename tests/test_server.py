"""server/: what OpenAI's client sees, with real connections; and that nothing is left behind."""

import asyncio
import json
import re
import signal
import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from lab.measure.capacity import judge
from lab.measure.metrics import request_rows
from lab.measure.remote_server import RemoteServer
from lab.measure.workload import Arrival, prompts
from pretrained.tokenizers import byte_tokenizer, load_tokenizer
from request import Event
from sampling import SamplingParams
from server.__main__ import default_sampling, make_engine, parse_args
from tests import forked
from tests.helpers import check_integrity, tiny_model
from tests.servers import (
    LETTERS,
    TEXT,
    Api,
    ChatRequest,
    CompletionResponse,
    EngineThread,
    Writer,
    circle,
    complete,
    encode_prompt,
    engine_thread,
    generate,
    generate_text,
    httpx,
    idle,
    letters,
    load_chat,
    openai,
    serving,
    slow,
    wait_for,
)
from tests.test_tokenizers import sentencepiece_directory, write_json


@pytest.mark.parametrize("prompt", ["hello", "a", "What is it? " * 5])
def test_text_is_that_of_the_engine_streamed_or_whole(tiny, turning, prompt):
    for served in (tiny, turning):
        expected = generate(served, prompt)
        for stream in (False, True):
            text, reason, usage, _ = complete(served, prompt, stream=stream)
            assert (text, reason) == (expected.text, "length")
            counts = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
            assert counts == (len(prompt), 20, len(prompt) + 20)
    ids = letters.encode(prompt)
    assert complete(tiny, ids)[0] == generate(tiny, prompt).text


def test_sampling_is_that_of_the_engine(tiny):
    sampling = dict(temperature=0.9, top_p=0.8, seed=5)
    expected = generate(tiny, "hello", SamplingParams(20, **sampling)).text
    assert complete(tiny, "hello", **sampling)[0] == expected
    sampling = SamplingParams(20, temperature=0.9, top_k=3, seed=5)
    options = dict(temperature=0.9, seed=5, extra_body={"top_k": 3})
    assert complete(tiny, "hello", **options)[0] == generate(tiny, "hello", sampling).text
    texts = {complete(tiny, "hello", temperature=1.5)[0] for _ in range(4)}
    assert len(texts) > 1  # a seed of its own for each


def test_chat(tiny):
    messages = [{"role": "user", "content": "hi"}]
    expected = generate(tiny, "user: hi\nassistant:", SamplingParams(20, logprobs=True))
    chat = tiny.client.chat.completions.create
    asked = dict(model="tiny", temperature=0, logprobs=True)
    choice = chat(messages=messages, max_completion_tokens=20, **asked).choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(expected.logprobs)
    assert "".join(bytes(t.bytes).decode() for t in choice.logprobs.content) == expected.text
    chunks = list(chat(messages=messages, max_tokens=20, stream=True, **asked))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == expected.text
    long = chat(messages=messages, **asked)  # without a limit: as much as fits
    assert long.usage.total_tokens == 128 and long.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop, expected",
    [
        ("né", "abc "),  # from one token to the next
        ("日", "abc né"),  # three bytes, three tokens
        (["zz", "👍_x"], "abc né日"),
        (["yz!", "xyz"], "abc né日👍_"),  # what begins first, not what is complete first
        ("bd", "abc né日👍_xyz!abc"),  # begins, and comes to nothing
        (["a"], ""),
    ],
)
def test_stop_strings(turning, stop, expected, stream):
    text, reason, usage, choices = complete(turning, "!", max_tokens=22, stop=stop, stream=stream)
    assert (text, reason) == (expected, "length" if stop == "bd" else "stop")
    assert usage.completion_tokens == {"a": 1}.get(stop[0], usage.completion_tokens)
    assert usage.completion_tokens <= len(expected.encode()) + 8
    wait_for(lambda: idle(turning.engine))
    if stream and stop == "né":  # what may be its beginning is held back
        assert [c.text for c in choices] == ["a", "b", "c", " ", "", "", ""]


def test_logprobs_are_those_of_the_engine_and_go_with_their_text(turning):
    expected = generate(turning, "!", SamplingParams(20, logprobs=True))
    for stream in (False, True):
        text, _, _, choices = complete(turning, "!", logprobs=0, stream=stream)
        logprobs = [c.logprobs for c in choices]
        assert sum((i.token_logprobs for i in logprobs), []) == pytest.approx(expected.logprobs)
        assert text == expected.text
        offsets = sum((i.text_offset for i in logprobs), [])
        assert offsets == [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 8, 9, 10, 11, 12, 13]
        text, _, _, choices = complete(turning, "!", logprobs=1, stream=stream, stop="👍")
        logprobs = [c.logprobs for c in choices]
        assert sum((i.text_offset for i in logprobs), []) == offsets[:14]  # the stop string's too


def test_a_stop_token_ends_a_text_and_is_not_in_it():
    prompt = "hello"
    sixth = letters.encode(generate_text("hello"))[5]
    stops = letters._replace(stop_token_ids=frozenset([sixth]))
    with serving(tokenizer=stops) as served:
        expected = generate_text(prompt).partition(LETTERS[sixth])[0]
        for stream in (False, True):
            text, reason, usage, choices = complete(served, prompt, logprobs=0, stream=stream)
            assert (text, reason) == (expected, "stop")
            assert usage.completion_tokens == len(expected) + 1
            assert sum(len(c.logprobs.tokens) for c in choices) == len(expected)
        text, reason, *_ = complete(served, prompt, extra_body={"ignore_eos": True})
        assert (text, reason) == (generate_text(prompt), "length")


@pytest.mark.parametrize("stop", ["<|end|>", ["no", "<|end|>"]])
def test_a_stop_string_that_is_a_special_token_ends_the_text(stop):
    tokens = letters.encode(generate_text("hello"))
    special = tokens[5]
    end = tokens.index(special)

    def decode(ids):
        return letters.decode([i for i in ids if i != special])

    tokenizer = letters._replace(decode=decode, special_tokens={"<|end|>": special})
    with serving(tokenizer=tokenizer) as served:
        for more in ({}, {"ignore_eos": True}):
            text, reason, usage, _ = complete(served, "hello", stop=stop, extra_body=more)
            assert (text, reason) == (letters.decode(tokens[:end]), "stop")
            assert usage.completion_tokens == end + 1
        assert complete(served, "hello", stop="no")[2].completion_tokens == 20
        for inside in ("<|end|>x", "\n<|end|>"):
            with pytest.raises(openai.BadRequestError, match="is a special token") as refused:
                complete(served, "hello", stop=inside)
            assert refused.value.param == "stop"


def test_logprobs_of_a_chat_have_the_bytes_of_half_characters(turning, monkeypatch):
    monkeypatch.setattr(turning.api, "chat", lambda messages: "!")
    asked = dict(model="tiny", messages=[{"role": "user", "content": "!"}], max_tokens=19)
    done = turning.client.chat.completions.create(**asked, logprobs=True, temperature=0)
    tokens = done.choices[0].logprobs.content
    assert all(len(token.bytes) == 1 for token in tokens)
    spelled = bytes(byte for token in tokens for byte in token.bytes)
    assert spelled.decode() == done.choices[0].message.content == TEXT


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_what_is_written_is_certain_and_ends_before_a_stop_string(pieces, stops):
    stream = SimpleNamespace(push=pieces.__getitem__, flush=lambda: "")
    writer = Writer(stream, stops)
    written_text = ""
    reason = None
    for i in range(len(pieces)):
        last = "length" if i == len(pieces) - 1 else None
        text, reason = writer.push(Event(0, i, None, last, None))
        written_text += text
        pushed = "".join(pieces[: i + 1])
        assert not any(stop in written_text for stop in stops) and writer.length == len(pushed)
        if reason:
            break
    ends = [pushed.find(stop) for stop in stops if stop in pushed]
    assert written_text == pushed[: min(ends, default=len(pushed))]
    assert reason == ("stop" if ends else "length")


def test_a_third_of_many_clients_may_leave(tiny):
    prompts = ["".join(LETTERS[(7 * i + j * j) % 61] for j in range(1 + i)) for i in range(64)]
    expected = [generate(tiny, prompt).text for prompt in prompts]
    client = openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", timeout=60)

    async def one(i):
        fields = dict(model="tiny", prompt=prompts[i], max_tokens=20, temperature=0)
        if i % 3 == 1:
            return (await client.completions.create(**fields)).choices[0].text
        text = ""
        async with await client.completions.create(**fields, stream=True) as stream:
            async for part in stream:
                text += part.choices[0].text
                if i % 3 == 2 and len(text) > i % 5:
                    return None
        return text

    async def everybody():
        async with client:
            return await asyncio.gather(*map(one, range(64)))

    texts = asyncio.run(everybody())
    assert [text for text in texts if text] == [e for i, e in enumerate(expected) if i % 3 != 2]
    wait_for(lambda: idle(tiny.engine))
    check_integrity(tiny.engine.scheduler.pages, [])
    assert not tiny.api.thread.queues


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages_even_while_waiting(stream):
    with serving(circle(), byte_tokenizer(), max_batch=1, max_len=512) as served:
        fields = dict(model="tiny", prompt="a", max_tokens=500, stream=stream)
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.02)  # 10 s
        before = socket.create_connection(served.http.base_url.netloc.decode().split(":"))
        behind = socket.create_connection(served.http.base_url.netloc.decode().split(":"))
        for connection, waiting in ((before, 0), (behind, 1)):
            body = json.dumps(fields).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            head += b"content-type: application/json\r\n"
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: len(served.engine.scheduler.requests) == waiting + 1)  # noqa: B023
            wait_for(lambda: len(served.engine.scheduler.running) == 1)
        behind.close()
        wait_for(lambda: len(served.engine.scheduler.requests) == 1, 4)
        before.close()
        wait_for(lambda: idle(served.engine), 4)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_cached_tokens_but_not_those_of_a_preempted_self(stream):

    def cached(usage):
        return usage.prompt_tokens_details.cached_tokens

    with serving(prefix_caching=True) as served:  # in pages of 16
        before = generate_text("a" * 40)
        for cached_tokens in (0, 32):
            text, _, usage, _ = complete(served, "a" * 40, stream=stream)
            assert (text, cached(usage), usage.total_tokens) == (before, cached_tokens, 60)
        for prompt, cached_tokens in ("a" * 33, 32), ("a" * 32, 16), ("b" + "a" * 31, 0):
            assert (
                cached(complete(served, prompt, stream=stream, stop=[before[0]])[2])
                == cached_tokens
            )
        wait_for(lambda: "cached_tokens_total 80.0" in served.http.get("/metrics").text)
    chat_request = ChatRequest(model="tiny", messages=[{}], stream=stream)
    for preemptions, cached_tokens in ((0, 32), (1, 0)):
        request = SimpleNamespace(id=0, cached_tokens=32, preemptions=preemptions)
        usage = CompletionResponse(served.api, chat_request, [1] * 60, request, None).usage()
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached_tokens}


def test_metrics_count():
    with serving() as served:
        complete(served, "hello")
        complete(served, "you", stream=True)
        with pytest.raises(openai.BadRequestError):
            complete(served, "you", n=2)
        rows = (line.split() for line in served.http.get("/metrics").text.splitlines())
        values = {
            row[0].removeprefix("nanosarathi_"): float(row[1]) for row in rows if row[0] != "#"
        }
        assert (values["prompt_tokens_total"], values["output_tokens_total"]) == (8, 40)
        assert (values["ttft_seconds_count"], values["tbt_seconds_count"]) == (2, 38)
        assert (values["waiting_requests"], values["running_requests"]) == (0, 0)
        assert (values["free_pages"], values["preemptions_total"]) == (32, 0)
        assert 0 < values["ttft_seconds_sum"] < 20 and values['tbt_seconds_bucket{le="+Inf"}'] == 38


def test_metrics_show_who_runs_and_who_waits():
    with serving(max_batch=1) as served:
        for tokens in ([1] * 5, [2] * 5, [3] * 5):
            served.engine.add_request(tokens)
        served.engine.step()
        text = served.http.get("/metrics").text
        assert "nanosarathi_running_requests 1.0" in text
        assert "nanosarathi_waiting_requests 2.0" in text
        served.api.metrics.observe(served.engine.abort(2))  # which has no token, so no TTFT
        text = served.http.get("/metrics").text
        assert "nanosarathi_prompt_tokens_total 5.0" in text
        assert "nanosarathi_ttft_seconds_count 0.0" in text


def test_the_last_token_of_a_stop_string_is_counted():
    with serving(circle(), byte_tokenizer(), max_len=512) as served:
        for _ in range(20):  # the engine ends some of them before it is told of the stop string
            complete(served, "!", max_tokens=5, stop="abc ")
        wait_for(lambda: idle(served.engine))
        wait_for(lambda: "prompt_tokens_total 20.0" in served.http.get("/metrics").text)


def test_long_stop_strings_hold_nobody_up():
    held_texts = []
    stream = SimpleNamespace(push=lambda token: "q", flush=lambda: "")

    class Counted(str):
        def startswith(self, held):
            held_texts.append(held)
            return str.startswith(self, held)

    writer = Writer(stream, [Counted("q" * 10_000 + "!")])
    for i in range(5):
        assert writer.push(Event(0, i, None, None, None)) == ("", None)
    assert 5 <= len(held_texts) <= 15  # no longer than the text that is held


def test_a_viewer_sees_the_state_and_then_each_iteration():
    with serving() as served:

        def records_since(place):
            return served.http.get(f"/records/{place}").json()

        assert "/records" in served.http.get("/").text
        first = records_since(10**15)
        assert [record["live"] for record in first["records"]] == [[]]
        text, *_ = complete(served, "hello")
        answer = records_since(first["place"])
        assert answer["texts"] == {"0": text}
        assert answer["records"][0]["request"]["prompt_len"] == 5
        assert answer["records"][1]["chunks"] == [[0, 0, 5]]
        assert answer["records"][2]["decodes"] == [0] and len(answer["records"]) == 21
        assert answer["records"][-1]["ended"] == [[0, "length"]]
        assert records_since(answer["place"]) == answer | {"records": []}
        assert answer["place"] == 21
        for beyond in (22, 10**30):
            assert records_since(beyond)["records"][0].keys() == {"settings", "live"}


def test_the_page_says_who_serves_and_what_is_too_long():
    with serving(policy="dynamic", policy_options=dict(tbt_slo=0.25)) as served:
        text = served.http.get("/").text
        assert (
            '"slo_s": 0.25, "slo_source": "the option --tbt-slo"' in text
            and "dynamic, chunk 16, 4 requests of 128 tokens" in text
        )


@pytest.mark.parametrize("slow_step", [None, 3, 9])
def test_one_slow_decode_does_not_move_the_slo_of_an_idle_engine(monkeypatch, slow_step):
    now = 0.0
    steps = 0
    engine = Engine(tiny_model(), max_batch=2, max_len=64, clock=lambda: now)
    engine.warm_up()
    forward = engine.runner.forward

    def timed_forward(*args):
        nonlocal now, steps
        now += 40.0 if steps == slow_step else 0.25
        steps += 1
        return forward(*args)

    monkeypatch.setattr(engine.runner, "forward", timed_forward)
    thread = EngineThread(lambda: engine, time_decodes=True)
    assert steps == 10  # a prefill and nine decodes
    assert idle(engine)
    api = Api(thread, letters, "tiny", load_chat(None))
    thread.executor.shutdown()
    response = asyncio.run(api.page(SimpleNamespace(headers={"host": "localhost"})))
    text = response.body.decode()
    assert '"slo_s": 1.25,' in text
    assert '"slo_source": "5 times the median decode iteration of an idle engine"' in text
    assert thread.recorder.records == []


def test_records_that_are_too_old_are_a_snapshot(monkeypatch):
    monkeypatch.setattr(engine_thread, "RECORDS", 5)
    with serving() as served:

        def records_since(place):
            return served.http.get(f"/records/{place}").json()

        complete(served, "hello")
        assert 5 <= len(served.api.thread.recorder.records) <= 10
        all_records = records_since(0)
        later_records = records_since(18)
        assert all_records["records"][0].keys() == {"settings", "live"}
        assert all_records["place"] == 21
        assert later_records["place"] == 21 and len(later_records["records"]) == 3
        assert later_records["records"][-1]["ended"] == [[0, "length"]]


def test_what_takes_too_long_is_cut_off_when_the_server_ends(capfd):
    with serving(drain_s=0.3) as served:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.05)
        fields = dict(model="tiny", prompt="a", max_tokens=120, stream=True)
        running = served.client.completions.create(**fields)
        next(iter(running))
        served.server.should_exit = True
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(running)
    assert "Cancel 1 running task" in (log := capfd.readouterr().err) and "Traceback" not in log


PROGRAM = ["-m", "server", "--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
PROGRAM += ["--port", "0", "--threads", "1"]


@pytest.mark.slow
def test_after_a_signal_it_finishes_what_runs():
    process = forked.Program(*PROGRAM, "--max-len", "600", "--served-model-name", "a/name")
    try:
        url = re.search(r"http://\S+", process.stdout.readline()).group()
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert client.models.retrieve("a/name").id == "a/name"
        fields = dict(model="a/name", prompt="a", max_tokens=500)
        stream = client.completions.create(**fields, stream=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(**fields)
        assert sum(1 for _ in stream) == 499
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_signal_as_soon_as_it_listens_ends_it():
    with forked.Program(*PROGRAM) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()


DROPS_DECODES = """
from scheduler import SarathiServe

class DropsDecodes(SarathiServe):
    def grow_decodes(self):
        return super().grow_decodes()[:1]
"""


@pytest.mark.slow
def test_a_policy_that_breaks_a_rule_is_served_with_a_warning(tmp_path):
    file = tmp_path / "drops.py"
    file.write_text(DROPS_DECODES)
    words = ["--max-len", "64", "--policy", f"{file}:DropsDecodes"]
    with forked.Program(*PROGRAM, *words) as process:
        ready = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
    assert ready.startswith("llama-tiny at http://")
    assert "\nwarning: the rule 'no decode dropped' is broken: " in errors


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--api-key", ""], ["--port", "x"], ["--policy", "x"]])
def test_a_command_line_that_makes_no_sense_is_refused(words):
    process = forked.run(*PROGRAM, *words)
    assert process.returncode and words[0].strip("-") in process.stderr
    assert "Traceback" not in process.stderr and len(process.stderr.splitlines()) <= 2


def test_pages_are_shared_by_option_and_must_be_shorter_than_max_len():
    def make(arguments):
        return make_engine(parse_args([*PROGRAM[2:-2], *arguments.split()])).config

    assert not make("--max-len 64").prefix_caching
    for max_len, page_size in ((128, 64), (64, 32), (31, 16)):
        config = make(f"--max-len {max_len} --prefix-caching")
        assert config.prefix_caching and config.page_size == page_size
    with pytest.raises(ValueError, match="page_size=64: must be below max_len=64"):
        make("--max-len 64 --page-size 64 --prefix-caching")


def test_the_template_of_a_checkpoint(tmp_path):
    import transformers

    sentencepiece_directory(tmp_path)
    chat = load_chat(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(Exception, match="chat_template is not set"):
        chat(messages)
    template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}"
    template += "{{ raise_exception('no x here') }}{% endif %}{{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}hell{% endif %}"
    config = {"chat_template": template, "bos_token": "<s>", "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = load_chat(tmp_path)
    assert chat(messages) == "<s>hello hell"
    with pytest.raises(Exception, match="no x here"):
        chat([{"role": "x", "content": "hello"}])
    inner = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    chat_request = ChatRequest(model="x", messages=messages)
    assert encode_prompt(chat_request, load_tokenizer(tmp_path), chat, max_len=100) == expected


RECOMMENDED = {"temperature": 0, "top_p": 0.5, "top_k": 7, "do_sample": True, "max_length": 9}


def test_sampling_is_as_recommended_unless_the_client_says_so(tmp_path, capsys):
    write_json(tmp_path / "generation_config.json", RECOMMENDED)
    recommended = default_sampling(tmp_path)
    assert default_sampling(None) == default_sampling(tmp_path / "nothing")
    assert capsys.readouterr().err == ""
    write_json(tmp_path / "generation_config.json", RECOMMENDED | {"repetition_penalty": 1.5})
    assert default_sampling(tmp_path) == recommended
    assert "repetition_penalty=1.5 is not computed" in capsys.readouterr().err
    with serving() as served:
        scheduler = served.engine.scheduler
        scheduler.add = Mock(wraps=scheduler.add)

        def sampled(**asked):
            served.http.post("/v1/completions", json=dict(model="tiny", prompt="a") | asked)
            params = scheduler.add.call_args.args[0].params
            return params.temperature, params.top_p, params.top_k

        assert sampled() == (1, 1, 0)  # OpenAI's
        served.api.sampling = recommended
        assert sampled() == (0, 0.5, 7)
        assert sampled(temperature=None, top_p=1) == (0, 1, 7)
        assert sampled(temperature=0.25, top_p=0.75, top_k=0) == (0.25, 0.75, 0)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"top_p": "x"}]
)
def test_a_recommendation_that_makes_no_sense_is_refused(tmp_path, wrong):
    write_json(tmp_path / "generation_config.json", wrong)
    with pytest.raises(ValueError, match=f"generation_config.json: {next(iter(wrong))}="):
        default_sampling(tmp_path)


def test_a_remote_server_is_measured_as_this_machine_is():
    lengths = [(0.0, 5, 20), (0.02, 9, 1), (0.04, 60, 30)]
    arrivals = [Arrival(*row, priority="high", user="ann") for row in lengths]
    with serving(circle(), byte_tokenizer()) as served:
        scheduler = served.engine.scheduler
        scheduler.add = Mock(wraps=scheduler.add)
        remote = RemoteServer(f"{served.url}/v1")
        ended = []
        run_result = remote.serve(arrivals, prompts(arrivals, 256, 0), lambda: ended.append(1))
        assert remote.model == "tiny" and len(ended) == 3
        assert [call.args[0].service.user for call in scheduler.add.call_args_list] == ["ann"] * 3
    with serving(circle(), byte_tokenizer(), max_waiting=1) as served:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.2)
        arrivals = [Arrival(0.0, 5, 2)] * 8
        crowd = RemoteServer(f"{served.url}/v1").serve(arrivals, prompts(arrivals, 256, 0))
    assert [(len(c.prompt), len(c.token_times)) for c in run_result.completions] == [
        row[1:] for row in lengths
    ]
    for c, (arrival, *_) in zip(run_result.completions, lengths, strict=True):
        assert (c.arrival, c.priority, c.finish_reason) == (arrival, 1, "length")
        assert c.token_times == sorted(c.token_times) and 0 < c.ttft < 10
    judged = judge(run_result, 10.0)
    summary = judged.summary
    assert judged.met and summary.ttft_s.max == max(c.ttft for c in run_result.completions)
    assert summary.scheduling_delay_s.p50 is None and summary.hybrid is None
    assert summary.tokens_per_s == pytest.approx(125 / run_result.seconds)
    assert [
        r["output_tokens"] for r in request_rows(run_result.completions, run_result.iterations)
    ] == [
        20,
        1,
        30,
    ]
    assert crowd.refused == sum(not c.token_times for c in crowd.completions) > 0
