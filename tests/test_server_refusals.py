"""server/: what is refused, what fails, and that nothing else is disturbed by it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
    openai,
    serving,
    slow,
    wait_for,
)


def test_a_full_queue_is_answered_429():
    with serving(max_batch=1, max_waiting=1) as served:
        served.engine.runner.fetch = slow(served.engine.runner.fetch, 0.01)
        with ThreadPoolExecutor() as pool:
            asking = []
            for requests in (1, 2):
                asking.append(pool.submit(complete, served, "a", max_tokens=60, stream=True))
                wait_for(lambda: len(served.engine.scheduler.requests) == requests)  # noqa: B023
                wait_for(lambda: len(served.engine.scheduler.running) == 1)
            with pytest.raises(openai.RateLimitError, match="max_waiting=1") as refused:
                complete(served, "b")
            assert refused.value.response.headers["retry-after"] == "1"
            assert refused.value.code == "queue_full"
            assert [len(text) for text, *_ in (done.result() for done in asking)] == [60, 60]


REFUSED = [  # (what is asked, status, param, what the message says)
    (dict(prompt=[1, 61]), 400, "prompt", "prompt: token 61 is out of range"),
    (dict(prompt=[]), 400, "prompt", "prompt: must hold at least 1 token"),
    (dict(prompt=[]), 400, "prompt", "prompt: must hold at least 1 token"),
    (dict(prompt=["a", []]), 400, "prompt", "prompt: must hold at least 1 token"),
    (dict(prompt=["a", 1]), 400, "prompt", "prompt: must be a text, a list"),
    (dict(prompt=["a"] * 129), 400, "prompt", "several of these for 128 answers at most"),
    (dict(prompt=["a"] * 65, n=2), 400, "prompt", "several of these for 128 answers at most"),
    (dict(prompt=[1.5]), 400, "prompt", "prompt: must be a text, a list"),
    (dict(prompt="a" * 120), 400, "max_tokens", "prompt of 120 tokens + max_tokens=20: must not"),
    (dict(prompt="a" * 128), 400, "prompt", "prompt of 128 tokens + max_tokens=20: must not"),
    (dict(model="gpt-4"), 404, "model", "there is only tiny"),
    (dict(model=""), 404, "model", "there is only tiny"),
    (dict(response_format={"type": "json_object"}), 400, "response_format", 'must be {"type": "t'),
    (dict(tool_choice="auto"), 400, "tool_choice", 'must be "none"'),
    (dict(n=0), 400, "n", "n: Input should be greater than or equal to 1"),
    (dict(n=129), 400, "n", "n: Input should be less than or equal to 128"),
    (dict(n=True), 400, "n", "n: Input should be a valid integer"),
    (dict(best_of=2), 400, "best_of", "best_of: must be 1"),
    (dict(echo=True), 400, "echo", "echo: must be false"),
    (dict(echo=0), 400, "echo", "echo: must be false"),
    (dict(suffix="x"), 400, "suffix", 'suffix: must be ""'),
    (dict(logit_bias={"5": 1}), 400, "logit_bias", "logit_bias: must be {}"),
    (dict(presence_penalty=0.5), 400, "presence_penalty", "presence_penalty: must be 0"),
    (dict(frequency_penalty=False), 400, "frequency_penalty", "frequency_penalty: must be 0"),
    (dict(logprobs=5), 400, "logprobs", "logprobs"),
    (dict(max_tokens=0), 400, "max_tokens", "max_tokens"),
    (dict(max_tokens=True), 400, "max_tokens", "max_tokens"),
    (dict(max_tokens=10**30), 400, "max_tokens", "must be a whole number"),
    (dict(max_completion_tokens=2), 400, "max_completion_tokens", "is not supported here"),
    (dict(temperature=True), 400, "temperature", "temperature: "),
    (dict(top_k=True), 400, "top_k", "top_k: "),
    (dict(logprobs=True), 400, "logprobs", "logprobs: "),
    (dict(seed=True), 400, "seed", "seed: "),
    (dict(temperature=-1), 400, "temperature", "temperature=-1.0: must be"),
    (dict(top_p=0), 400, "top_p", "top_p=0.0: must be"),
    (dict(seed=2**70), 400, "seed", "seed=11805"),
    (dict(stop=["a"] * 5), 400, "stop", "stop: must be one to four texts of 1 to 1,000 characters"),
    (dict(stop="a" * 1001), 400, "stop", "stop: must be one to four texts of 1 to 1,000"),
    (dict(stop=""), 400, "stop", "stop: must be one to four"),
    (dict(priority="urgent"), 400, "priority", "priority='urgent': must be one of realtime"),
    (dict(user="a" * 257), 400, "user", "must have at most 256 characters"),
    (dict(ttft_slo=-1), 400, "ttft_slo", "ttft_slo=-1.0: must be"),
    (dict(stream_options={"x": True}), 400, "stream_options", "stream_options.x: Input"),
    (dict(whatever=1), 400, "whatever", "whatever: is not supported here"),
    (dict(messages=[]), 400, "messages", "messages: is not supported here"),
]


@pytest.mark.parametrize("asked, status, param, message", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(tiny, asked, status, param, message):
    neutral = dict(response_format={"type": "text"}, tool_choice="none", store=False)
    neutral |= dict(n=1, best_of=1, echo=False, suffix="", logit_bias=None, presence_penalty=0)
    body = dict(model="tiny", prompt="a", max_tokens=20) | neutral
    assert tiny.http.post("/v1/completions", json=body).status_code == 200
    for stream in (False, True):
        done = tiny.http.post("/v1/completions", json=body | asked | {"stream": stream})
        error = done.json()["error"]
        assert (done.status_code, error["param"]) == (status, param) and message in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}


def test_the_model_has_one_name_and_need_not_be_named(tiny):
    assert tiny.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is only tiny"):
        tiny.client.models.retrieve("some/other")
    for name in ({}, {"model": None}, {"model": "tiny"}):
        done = tiny.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **name})
        assert (done.status_code, done.json()["model"]) == (200, "tiny")


def test_what_chat_cannot_do_is_refused_by_name(tiny):
    said = dict(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=2)
    for wrong, param in [
        (dict(tools=[{"type": "function"}]), "tools"),
        (dict(messages=["a"]), "messages"),
        (dict(messages=[]), "messages"),
        (dict(messages=[{"role": "user"}]), "messages"),
        (dict(top_logprobs=2), "top_logprobs"),
        (dict(prompt="a"), "prompt"),
    ]:
        done = tiny.http.post("/v1/chat/completions", json=said | wrong)
        assert (done.status_code, done.json()["error"]["param"]) == (400, param)
    neutral = dict(tools=[], n=1, user="me", stop=None, stream_options=None)
    assert tiny.http.post("/v1/chat/completions", json=said | neutral).status_code == 200


def test_a_wrong_address_or_body_is_an_error_of_the_same_shape(tiny):
    post = tiny.http.post
    kind = {"content-type": "application/json"}
    cases = [
        (tiny.http.get("/v1/nothing"), 404),
        (tiny.http.get("/v1/completions"), 405),
        (tiny.http.get("/records/x"), 404),
        (
            post("/v1/completions", content=b"{}", headers={"content-type": "Application/JSON ;x"}),
            400,
        ),
        (post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415),
        (post("/v1/completions", content=b"{" + b" " * (2**20 - 1) + b"}", headers=kind), 413),
        (post("/v1/completions", content=b"{" + b" " * (2**20 - 2) + b"}", headers=kind), 400),
        (post("/v1/completions", content=b"", headers=kind), 400),
        (post("/v1/completions", content=b"\xff", headers=kind), 400),
        (post("/v1/completions", content=b"[" * 10**5, headers=kind), 400),
        (post("/v1/completions", content=iter([b"{", b"}"]), headers=kind), 411),
    ]
    for done, status in cases:
        assert done.status_code == status
        assert done.json()["error"].keys() == {"message", "type", "param", "code"}
    assert cases[1][0].headers["allow"] == "POST"


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
    kind = {"content-type": "application/json"}
    done = tiny.http.post(f"/v1/{address}", content=body, headers=kind)
    assert done.status_code in (200, 400, 404)
    if done.headers["content-type"] == "application/json":
        assert ("error" in done.json()) == (done.status_code != 200)


def test_it_serves_on_after_all_that(tiny):
    assert complete(tiny, "hello")[0] == generate(tiny, "hello").text
    wait_for(lambda: idle(tiny.engine))


def test_an_api_key():
    with serving(key="sésame") as served:

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
    with serving(max_batch=1) as served:
        fetch = served.engine.runner.fetch
        runner = served.engine.runner
        failing = threading.Event()

        def broken(*batch):
            time.sleep(0.01)
            if failing.is_set():
                failing.clear()
                raise RuntimeError("out of order")
            return fetch(*batch)

        runner.fetch = broken
        asked = dict(model="tiny", max_tokens=50, stream=True, temperature=0)
        first = served.client.completions.create(prompt="a", **asked)
        with ThreadPoolExecutor() as pool:
            second = pool.submit(complete, served, "hello", max_tokens=50)  # waits meanwhile
            wait_for(lambda: len(served.engine.scheduler.requests) == 2)
            failing.set()
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(first)
            expected = generate(served, "hello", SamplingParams(50)).text
            assert second.result()[0] == expected
        for stream in (False, True):
            failing.set()
            body = dict(model="tiny", prompt="a", stream=stream)
            done = served.http.post("/v1/completions", json=body)
            assert done.status_code == 500
            assert done.json()["error"]["message"] == "the engine failed, see its log"
        assert complete(served, "hello")[0] == expected[:20]
        wait_for(lambda: idle(served.engine))


def test_a_tokenizer_that_fails_is_an_error_of_its_request_alone():
    ids = letters.encode(generate_text("hello"))

    def decode(tokens):
        return 1 / 0 if ids[3] in tokens else letters.decode(tokens)

    broken = letters._replace(decode=decode)
    with serving(tokenizer=broken) as served:
        asked = dict(model="tiny", prompt="hello", temperature=0)
        done = served.http.post("/v1/completions", json=asked)
        assert done.status_code == 500
        message = "the tokenizer failed: ZeroDivisionError: division by zero"
        assert done.json()["error"]["message"] == message
        pieces = []
        with pytest.raises(openai.APIError, match=message):
            for piece in served.client.completions.create(**asked, stream=True):
                pieces.append(piece.choices[0].text)
        assert "".join(pieces) == letters.decode(ids[:3])
        wait_for(lambda: idle(served.engine))
        assert complete(served, "hello", max_tokens=3)[0] == letters.decode(ids[:3])


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
        served.engine.scheduler.broken = True
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                complete(served, "a", stream=stream)
        if name == "finish":  # also if it fails as a client goes
            stream = served.client.completions.create(model="tiny", prompt="a", stream=True)
            next(stream)
            stream.close()
        wait_for(lambda: idle(served.engine))
        check_integrity(served.engine.scheduler.pages, [])
        count = len(caplog.records)
        time.sleep(0.1)
        assert len(caplog.records) == count <= 4  # it does not try for ever
        served.engine.scheduler.broken = False
        assert complete(served, "hello")[0] == generate_text("hello")
        wait_for(lambda: idle(served.engine))
