"""server/: what is refused, what fails, and that nothing else is disturbed by it."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import check_integrity
from tests.servers import complete, generate, idle, letters, serving, wait_for

JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "a"}]
CHAT = "chat/completions"


def error_of(served, address="completions", status=400, **body):
    """(param, message) of the error to a completion, or to another request."""
    done = served.http.post(f"/v1/{address}", json=body)
    assert done.status_code == status
    error = done.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["param"], error["message"]


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
    cases = [(["a"] * 3, 429), ([[1], [61]], 400), (["a", "a" * 128], 400)]
    with serving(max_batch=1, max_waiting=2) as served:
        for prompt, status in cases:
            error_of(served, status=status, prompt=prompt)
            assert idle(served.engine) and not served.api.thread.queues
        assert "prompt_tokens_total 0.0" in served.http.get("/metrics").text
        assert len(complete(served, ["a"] * 2).choices) == 2


TOO_LONG = "prompt of {} tokens + max_tokens={}: must not exceed 128"
PROMPT = "prompt: must be a text, a list of token ids, or several of these for 128 answers at most"
STOP = "stop: must be one to four texts of 1 to 1,000 characters"
NO_BOOLS = ("n", "max_tokens", "temperature", "top_k", "logprobs", "seed")
UNKNOWN = ("whatever", "messages", "audio", "max_completion_tokens")
REFUSED = [  # the fields of a completion, param, how the message begins
    ({"prompt": [1, 61]}, "prompt", "prompt: token ids must be in 0 … 60"),
    ({"prompt": ["a", []]}, "prompt", "prompt: must hold at least 1 token"),
    *(({"prompt": prompt}, "prompt", PROMPT) for prompt in ([1.5], ["a", 1], 5, ["a"] * 129)),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", PROMPT),
    ({"prompt": "a" * 109, "max_tokens": 20}, "max_tokens", TOO_LONG.format(109, 20)),
    ({"prompt": "a" * 128, "max_tokens": 20}, "prompt", TOO_LONG.format(128, 20)),
    ({"prompt": "a" * 120}, "prompt", TOO_LONG.format(120, 16)),  # by default
    ({"n": 0}, "n", "n: Input should be greater than or equal to 1"),
    ({"n": 129}, "n", "n: Input should be less than or equal to 128"),
    ({"logprobs": 5}, "logprobs", "logprobs: "),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: "),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens=1000"),
    *(({name: True}, name, f"{name}: ") for name in NO_BOOLS),
    ({"temperature": -1}, "temperature", "temperature=-1.0: must be"),
    *(({"stop": stop}, "stop", STOP) for stop in (["a"] * 5, "a" * 1001, "", [""])),
    ({"priority": "urgent"}, "priority", "priority: Input should be"),
    ({"user": "a" * 257}, "user", "user: String should have at most 256"),
    ({"stream_options": {"x": True}}, "stream_options", "stream_options.x: Input"),
    *(({name: 1}, name, f"{name}: is not supported here") for name in UNKNOWN),
]


@pytest.mark.parametrize("fields, param, message", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(tiny, fields, param, message):
    field, text = error_of(tiny, **{"prompt": "a"} | fields)
    assert field == param and text.startswith(message)


WRONG_CHATS = [  # the fields of a chat, how the message begins: with the field
    ({"messages": [*HI, "a"]}, "messages[1]: Input should be a valid dictionary"),
    ({"messages": []}, "messages: "),
    ({"prompt": "a", "messages": HI}, "prompt: is not supported here"),
]


@pytest.mark.parametrize("body, message", WRONG_CHATS)
def test_what_chat_cannot_do_is_refused_by_name(tiny, body, message):
    field, text = error_of(tiny, CHAT, **body)
    assert field == next(iter(body)) and text.startswith(message)


NEUTRAL = {  # fields that ask for nothing with this value
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
}


@pytest.mark.parametrize("address, prompt", [("completions", {"prompt": "a"}), (CHAT, HI)])
def test_fields_that_ask_for_nothing_are_accepted_with_that_value_alone(tiny, address, prompt):
    body = prompt if isinstance(prompt, dict) else {"messages": prompt}
    body |= {"max_tokens": 2}
    for fields in (NEUTRAL, dict.fromkeys([*NEUTRAL, "user", "seed"])):
        done = tiny.http.post(f"/v1/{address}", json=body | fields)
        assert done.status_code == 200
    for name, neutral in NEUTRAL.items():
        allowed = json.dumps(neutral).removesuffix(".0")
        number_for_bool = int(neutral) if isinstance(neutral, bool) else bool(neutral)
        for wrong in ("x", number_for_bool):
            assert error_of(tiny, address, **body | {name: wrong}) == (
                name,
                f"{name}: must be {allowed}",
            )


def test_the_model_has_one_name_and_need_not_be_named(tiny):
    assert tiny.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is only tiny"):
        tiny.client.models.retrieve("some/other")
    for fields in ({}, {"model": None}, {"model": "tiny"}):
        done = tiny.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | fields)
        assert done.json()["model"] == "tiny"
    expected = ("model", "model: there is only tiny")
    assert error_of(tiny, status=404, prompt="a", model="") == expected


SPACES = b" " * (2**20 - 2)
WRONG_BODIES = [  # a body, its type, the status
    (b"{}", "Application/JSON ;x", 400),
    (b"{}", "text/plain", 415),
    (b"{" + SPACES + b" }", JSON["content-type"], 413),
    (b"{" + SPACES + b"}", JSON["content-type"], 400),
    *((body, JSON["content-type"], 400) for body in (b"", b"\xff", b"[" * 10**5, b"[]")),
    (iter([b"{", b"}"]), JSON["content-type"], 411),
]


def test_a_wrong_address_or_body_is_an_error_of_the_same_shape(tiny):
    cases = [(tiny.http.get("/v1/completions"), 405)]
    assert cases[0][0].headers["allow"] == "POST"
    cases += [(tiny.http.get(address), 404) for address in ("/v1/nothing", "/records/x")]
    for body, kind, status in WRONG_BODIES:
        headers = {"content-type": kind}
        cases.append((tiny.http.post("/v1/completions", content=body, headers=headers), status))
    for done, status in cases:
        assert done.status_code == status
        assert done.json()["error"].keys() == {"message", "type", "param", "code"}


NAMES = "model prompt messages max_tokens temperature top_p top_k seed stop stream logprobs n user "
NAMES += "stream_options priority ttft_slo tbt_slo ignore_eos suffix logit_bias role content"
names = st.sampled_from(NAMES.split())
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(["tiny", "user", "high", 10**400, 1e308, 5e-324, -(2**63)])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(names | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)
prompted = st.just({"model": "tiny", "prompt": "a", "max_tokens": 2})
bodies = st.builds(dict.__or__, prompted, st.dictionaries(names, values, max_size=5))


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=40) | (values | bodies).map(json.dumps),
    st.sampled_from(["completions", CHAT]),
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

        def status(key):
            headers = {"authorization": key}
            return served.http.get("/v1/models", headers=headers).status_code

        right = "Bearer sésame".encode()
        assert status(right) == 200
        for wrong in (b"", b"Bearer x", b"Bearer s\xe9same", right + b"x"):
            assert status(wrong) == 401
        post = served.http.post("/v1/completions", json={})
        assert post.status_code == 401 and post.json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/health").status_code == 200


def test_without_the_key_no_route_shows_a_text():
    is_open = {"/", "/health", "/metrics"}
    with serving(api={"key": "k"}) as served:
        done = generate(served, "xylophone")
        assert complete(served, "xylophone").text == done.text
        tokens = json.dumps(done.output)[1:-1]
        secrets = ["xylophone", done.text[:8], done.text[-8:], tokens]
        with_key = served.http.get("/records/0", headers={"authorization": "Bearer k"})
        assert done.text in with_key.json()["texts"].values()
        for route in served.api.app().routes:
            address = re.sub("{.*?}", "0", route.path)
            for method in route.methods:
                without_key = served.http.request(method, address)
                if address not in is_open:
                    assert without_key.status_code == 401, address
                assert not any(secret in without_key.text for secret in secrets), address


def test_a_step_that_fails_is_a_500_for_all_requests():
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
        fields = {"model": "tiny", "max_tokens": 50, "stream": True}
        first = served.client.completions.create(prompt="a", **fields)
        with ThreadPoolExecutor() as pool:
            second = pool.submit(complete, served, "hello", max_tokens=50)  # waits meanwhile
            wait_for(lambda: len(served.scheduler.requests) == 2)
            failing.set()
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(first)
            with pytest.raises(openai.APIError, match="the engine failed"):
                second.result()
        for fields in ({"stream": False}, {"stream": True}, {"n": 3}):
            failing.set()
            _, message = error_of(served, status=500, prompt="a", **fields)
            assert message == "the engine failed, see its log"
        assert complete(served, "hello").text == generate(served, "hello").text
        wait_for(lambda: idle(served.engine))


def test_a_tokenizer_that_fails_is_an_error_of_its_request_alone(tiny):
    ids = letters.encode(generate(tiny, "hello").text)

    def decode(tokens):
        return 1 / 0 if ids[3] in tokens else letters.decode(tokens)

    with serving(tokenizer=letters._replace(decode=decode)) as served:
        message = "the tokenizer failed: ZeroDivisionError: division by zero"
        with pytest.raises(openai.InternalServerError, match=message):
            complete(served, "hello")
        pieces = []
        fields = {"model": "tiny", "prompt": "hello", "temperature": 0}
        with pytest.raises(openai.APIError, match=message):
            for piece in served.client.completions.create(**fields, stream=True):
                pieces.append(piece.choices[0].text)
        assert "".join(pieces) == letters.decode(ids[:3])
        wait_for(lambda: idle(served.engine))
        assert complete(served, "hello", max_tokens=3).text == letters.decode(ids[:3])


FAILING = [  # a method of a policy of one's own, and how it may fail
    ("schedule", "raise SystemExit"),
    ("schedule", "return None"),
    ("schedule", "return [4]"),
    ("admit", "self.waiting.popleft(); return None"),
    ("advance", "1 / 0"),
    ("advance", "super().advance(*args); 1 / 0"),  # a request may have ended in there
    ("observe", "1 / 0"),
    ("add", "1 / 0"),
    ("finish", "raise ValueError"),
]
FAILS = """
from scheduler import SarathiServe

class Own(SarathiServe):
    broken = False
    def {method}(self, *args):
        if self.broken:
            {failure}
        return super().{method}(*args)
"""


@pytest.mark.parametrize("method, failure", FAILING)
def test_a_policy_that_fails_leaves_nobody_waiting(tiny, method, failure, tmp_path, caplog):
    file = tmp_path / "own.py"
    file.write_text(FAILS.format(method=method, failure=failure), "utf-8")
    with serving(policy=f"{file}:Own") as served:
        served.scheduler.broken = True
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                complete(served, "a", stream=stream)
        if method == "finish":  # also if it fails as a client goes
            stream = served.client.completions.create(model="tiny", prompt="a", stream=True)
            next(stream)
            stream.close()
        wait_for(lambda: idle(served.engine))
        check_integrity(served.scheduler.pages, [])
        count = len(caplog.records)
        time.sleep(0.1)
        assert len(caplog.records) == count <= 4  # it does not try for ever
        served.scheduler.broken = False
        assert complete(served, "hello").text == generate(tiny, "hello").text
        wait_for(lambda: idle(served.engine))
