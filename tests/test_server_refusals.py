"""server/: what is refused, what fails, and that nothing else is disturbed by it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import SamplingParams
from tests.helpers import check_integrity
from tests.servers import (
    complete,
    generate,
    generate_text,
    idle,
    letters,
    serving,
    wait_for,
)

JSON = {"content-type": "application/json"}


def test_a_full_queue_is_answered_429():
    with serving(max_batch=1, max_waiting=1, step_s=0.01) as served, ThreadPoolExecutor() as pool:
        answers = []
        for requests in (1, 2):
            answers.append(pool.submit(complete, served, "a", max_tokens=60, stream=True))
            wait_for(lambda: len(served.scheduler.requests) == requests)  # noqa: B023
            wait_for(lambda: len(served.scheduler.running) == 1)
        with pytest.raises(openai.RateLimitError, match="max_waiting=1") as refused:
            complete(served, "b")
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "queue_full"
        assert [len(answer.result().text) for answer in answers] == [60, 60]


def test_of_several_prompts_all_are_taken_or_none():
    with serving(max_batch=1, max_waiting=2) as served:
        for prompt, error in [
            (["a"] * 3, openai.RateLimitError),
            ([[1], [61]], openai.BadRequestError),
            (["a", "a" * 128], openai.BadRequestError),
        ]:
            with pytest.raises(error):
                complete(served, prompt)
            assert idle(served.engine) and not served.api.thread.queues
        assert "prompt_tokens_total 0.0" in served.http.get("/metrics").text
        assert len(complete(served, ["a"] * 2).choices) == 2


TOO_LONG = "prompt of {} tokens + max_tokens=20: must not exceed 128"
PROMPT = "prompt: must be a text, a list of token ids, or several of these for 128 answers at most"
STOP = "stop: must be one to four texts of 1 to 1,000 characters"
UNKNOWN = "{}: is not supported here"
NO_BOOLS = ("n", "max_tokens", "temperature", "top_k", "logprobs", "seed")
REFUSED = [  # the fields of a completion, param, how the message begins
    (dict(prompt=[1, 61]), "prompt", "prompt: token 61 is out of range"),
    (dict(prompt=[]), "prompt", "prompt: must hold at least 1 token"),
    (dict(prompt=["a", []]), "prompt", "prompt: must hold at least 1 token"),
    *((dict(prompt=prompt), "prompt", PROMPT) for prompt in ([1.5], ["a", 1], 5, ["a"] * 129)),
    (dict(prompt=["a"] * 65, n=2), "prompt", PROMPT),
    (dict(prompt="a" * 120), "max_tokens", TOO_LONG.format(120)),
    (dict(prompt="a" * 109), "max_tokens", TOO_LONG.format(109)),
    (dict(prompt="a" * 128), "prompt", TOO_LONG.format(128)),
    (dict(n=0), "n", "n: Input should be greater than or equal to 1"),
    (dict(n=129), "n", "n: Input should be less than or equal to 128"),
    (dict(logprobs=5), "logprobs", "logprobs: "),
    (dict(max_tokens=0), "max_tokens", "max_tokens: "),
    (dict(max_tokens=10**30), "max_tokens", "max_tokens=1000000"),
    *(({name: True}, name, f"{name}: ") for name in NO_BOOLS),
    (dict(temperature=-1), "temperature", "temperature=-1.0: must be"),
    (dict(top_p=0), "top_p", "top_p=0.0: must be"),
    (dict(seed=2**70), "seed", "seed=11805"),
    *((dict(stop=stop), "stop", STOP) for stop in (["a"] * 5, "a" * 1001, "", [""])),
    (dict(priority="urgent"), "priority", "priority='urgent': must be one of realtime"),
    (dict(user="a" * 257), "user", f"user='{'a' * 59}: must have at most 256 characters"),
    (dict(ttft_slo=-1), "ttft_slo", "ttft_slo=-1.0: must be"),
    (dict(stream_options={"x": True}), "stream_options", "stream_options.x: Input"),
    *(({name: 1}, name, UNKNOWN.format(name)) for name in ("whatever", "messages", "audio")),
    (dict(max_completion_tokens=2), "max_completion_tokens", "max_completion_tokens: is not"),
]
NEUTRAL = [  # fields that ask for nothing, and values that would ask for something
    ("best_of", 1, [2]),
    ("echo", False, [True, 0]),
    ("suffix", "", ["x"]),
    ("logit_bias", {}, [{"5": 1}]),
    ("presence_penalty", 0, [0.5, False]),
    ("frequency_penalty", 0.0, [1]),
    ("response_format", {"type": "text"}, [{"type": "json_object"}]),
    ("tools", [], [[{"type": "function"}]]),
    ("tool_choice", "none", ["auto"]),
    ("top_logprobs", 0, [2]),
    ("parallel_tool_calls", True, [False, 1]),
    ("modalities", ["text"], [["audio"]]),
    ("service_tier", "auto", ["flex"]),
    ("store", False, [True]),
    ("min_p", 0, [0.1]),
    ("min_tokens", 0, [1]),
    ("repetition_penalty", 1.0, [1.5]),
    ("skip_special_tokens", True, [False]),
    ("user", "me", []),
]
HI = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields, param, message", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(tiny, fields, param, message, stream):
    body = dict(prompt="a", max_tokens=20, stream=stream) | fields
    done = tiny.http.post("/v1/completions", json=body)
    error = done.json()["error"]
    assert (done.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)
    assert error.keys() == {"message", "type", "param", "code"}


def test_fields_that_ask_for_nothing_are_accepted_with_that_value_alone(tiny):
    for address, prompt in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": HI}),
    ):
        body = dict(max_tokens=2, **prompt)

        def post(more, body=body, address=address):
            return tiny.http.post(f"/v1/{address}", json=body | more)

        assert post({name: value for name, value, _ in NEUTRAL}).status_code == 200
        assert post({name: None for name, *_ in NEUTRAL}).status_code == 200
        for name, neutral, wrong in NEUTRAL:
            for value in wrong:
                done = post({name: value})
                error = done.json()["error"]
                assert (done.status_code, error["param"]) == (400, name)
                allowed = json.dumps(neutral).removesuffix(".0")
                assert error["message"] == f"{name}: must be {allowed}"


def test_the_model_has_one_name_and_need_not_be_named(tiny):
    assert tiny.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is only tiny"):
        tiny.client.models.retrieve("some/other")
    for fields, status in [
        ({}, 200),
        ({"model": None}, 200),
        ({"model": "tiny"}, 200),
        ({"model": "gpt-4"}, 404),
        ({"model": ""}, 404),
    ]:
        done = tiny.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | fields)
        assert done.status_code == status
        if status == 200:
            assert done.json()["model"] == "tiny"
        else:
            assert done.json()["error"]["message"] == "model: there is only tiny"


WRONG_CHATS = [
    (dict(messages=["a"]), "messages"),
    (dict(messages=[]), "messages"),
    (dict(messages=[{"role": "user"}]), "messages"),
    (dict(prompt="a"), "prompt"),
]


@pytest.mark.parametrize("wrong, param", WRONG_CHATS)
def test_what_chat_cannot_do_is_refused_by_name(tiny, wrong, param):
    done = tiny.http.post("/v1/chat/completions", json=dict(messages=HI) | wrong)
    assert (done.status_code, done.json()["error"]["param"]) == (400, param)


SPACES = b" " * (2**20 - 2)
WRONG_BODIES = [  # a body, its type, the status
    (b"{}", "Application/JSON ;x", 400),
    (b"{}", "text/plain", 415),
    (b"{" + SPACES + b" }", JSON["content-type"], 413),
    (b"{" + SPACES + b"}", JSON["content-type"], 400),
    *((body, JSON["content-type"], 400) for body in (b"", b"\xff", b"[" * 10**5, b"[]")),
    ([b"{", b"}"], JSON["content-type"], 411),
]


def test_a_wrong_address_or_body_is_an_error_of_the_same_shape(tiny):
    cases = [(tiny.http.get("/v1/completions"), 405)]
    assert cases[0][0].headers["allow"] == "POST"
    cases += [(tiny.http.get(address), 404) for address in ("/v1/nothing", "/records/x")]
    for body, kind, status in WRONG_BODIES:
        content = body if isinstance(body, bytes) else iter(body)
        headers = {"content-type": kind}
        done = tiny.http.post("/v1/completions", content=content, headers=headers)
        cases.append((done, status))
    for done, status in cases:
        assert done.status_code == status
        assert done.json()["error"].keys() == {"message", "type", "param", "code"}


NAMES = "model prompt messages max_tokens temperature top_p top_k seed stop stream logprobs n user "
NAMES += "stream_options priority ttft_slo tbt_slo ignore_eos suffix logit_bias role content"
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(["tiny", "user", "high", 10**400, 1e308, 5e-324, -(2**63)])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES.split()) | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(NAMES.split()), values, max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=40)
    | values.map(json.dumps)
    | objects.map(
        lambda body: json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2} | body)
    ),
    st.sampled_from(["completions", "chat/completions"]),
)
def test_no_body_breaks_it(tiny, body, address):
    done = tiny.http.post(f"/v1/{address}", content=body, headers=JSON)
    assert done.status_code in (200, 400, 404)
    if done.headers["content-type"] == "application/json":
        assert ("error" in done.json()) == (done.status_code != 200)


def test_it_serves_on_after_all_that(tiny):
    assert complete(tiny, "hello").text == generate(tiny, "hello").text
    wait_for(lambda: idle(tiny.engine))


def test_an_api_key():
    with serving(api={"key": "sésame"}) as served:

        def ask(key):
            return served.http.get("/v1/models", headers={"authorization": key})

        right = "Bearer sésame".encode()
        assert ask(right).status_code == 200
        for wrong in (b"", b"Bearer", b"Bearer x", b"Bearer s\xe9same", right + b"x"):
            assert ask(wrong).status_code == 401
        post = served.http.post("/v1/completions", json={})
        assert post.status_code == 401 and post.json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/health").status_code == 200


def test_a_step_that_fails_is_a_500_for_its_requests_and_no_others():
    with serving(max_batch=1, step_s=0.01) as served:
        runner = served.engine.runner
        fetch = runner.fetch
        failing = threading.Event()

        def broken(*batch):
            if failing.is_set():
                failing.clear()
                raise RuntimeError("out of order")
            return fetch(*batch)

        runner.fetch = broken
        fields = dict(model="tiny", max_tokens=50, stream=True, temperature=0)
        first = served.client.completions.create(prompt="a", **fields)
        with ThreadPoolExecutor() as pool:
            second = pool.submit(complete, served, "hello", max_tokens=50)  # waits meanwhile
            wait_for(lambda: len(served.scheduler.requests) == 2)
            failing.set()
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(first)
            expected = generate(served, "hello", SamplingParams(50)).text
            assert second.result().text == expected
        for body in (dict(stream=False), dict(stream=True), dict(n=3)):
            failing.set()
            done = served.http.post("/v1/completions", json=dict(prompt="a") | body)
            assert done.status_code == 500
            assert done.json()["error"]["message"] == "the engine failed, see its log"
        assert complete(served, "hello").text == expected[:20]
        wait_for(lambda: idle(served.engine))


def test_a_tokenizer_that_fails_is_an_error_of_its_request_alone():
    ids = letters.encode(generate_text("hello"))

    def decode(tokens):
        return 1 / 0 if ids[3] in tokens else letters.decode(tokens)

    with serving(tokenizer=letters._replace(decode=decode)) as served:
        message = "the tokenizer failed: ZeroDivisionError: division by zero"
        with pytest.raises(openai.InternalServerError, match=message):
            complete(served, "hello")
        pieces = []
        fields = dict(model="tiny", prompt="hello", temperature=0, stream=True)
        with pytest.raises(openai.APIError, match=message):
            for piece in served.client.completions.create(**fields):
                pieces.append(piece.choices[0].text)
        assert "".join(pieces) == letters.decode(ids[:3])
        wait_for(lambda: idle(served.engine))
        assert complete(served, "hello", max_tokens=3).text == letters.decode(ids[:3])


FAILING = {  # where a policy of one's own may fail, and how
    "schedule": "raise SystemExit",
    "schedule ": "return None",
    "schedule  ": "return [4]",
    "admit": "self.waiting.popleft(); return None",
    "token_budget": "return self.chunk / 3",
    "advance": "1 / 0",
    "observe": "1 / 0",
    "add": "1 / 0",
    "finish": "1 / 0",
    "finish ": "raise ValueError",
}


@pytest.mark.parametrize("method", FAILING)
def test_a_policy_that_fails_leaves_nobody_waiting(method, tmp_path, caplog):
    own = tmp_path / "own.py"
    name = method.strip()
    own.write_text(
        "from scheduler import SarathiServe\n\nclass Own(SarathiServe):\n    broken = False\n"
        f"    def {name}(self, *args):\n        if self.broken:\n            {FAILING[method]}\n"
        f"        return super().{name}(*args)\n"
    )
    with serving(policy=f"{own}:Own") as served:
        served.scheduler.broken = True
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                complete(served, "a", stream=stream)
        if name == "finish":  # also if it fails as a client goes
            stream = served.client.completions.create(model="tiny", prompt="a", stream=True)
            next(stream)
            stream.close()
        wait_for(lambda: idle(served.engine))
        check_integrity(served.scheduler.pages, [])
        count = len(caplog.records)
        time.sleep(0.1)
        assert len(caplog.records) == count <= 4  # it does not try for ever
        served.scheduler.broken = False
        assert complete(served, "hello").text == generate_text("hello")
        wait_for(lambda: idle(served.engine))
