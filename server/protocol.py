"""What a request may say, in OpenAI's words, and the shapes of what is answered. What is not known
or not done here is refused by name; what asks for nothing may be there. Read next: app.py."""

import random
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError, model_validator
from starlette.exceptions import HTTPException

StopString = Annotated[str, Field(min_length=1)]
NOTHING = dict(n=1, best_of=1, echo=False, suffix="", frequency_penalty=0, presence_penalty=0)
NOTHING |= dict(logit_bias={}, tools=[], top_logprobs=0)  # is asked for by these, or by null


class Refused(HTTPException):
    """A request that is refused: an HTTP status, and OpenAI's error object as its `detail`."""

    def __init__(self, status, message, param=None, code=None, headers=None):
        kind = "invalid_request_error" if status < 500 else "server_error"
        its = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(status, {"error": its}, headers)


class Request(BaseModel, strict=True, extra="forbid"):
    """What both kinds have in common. top_k, ignore_eos (generate all of max_tokens) and the class
    and targets of policies/priority.py are not OpenAI's; `user` is for the caller's own books. What
    else numbers must be is said by SamplingParams and the engine."""

    model: str
    max_tokens: PositiveInt | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = Field(default_factory=partial(random.getrandbits, 63))
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    ignore_eos: bool = False
    priority: str = "normal"
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    user: str = ""

    stops = property(lambda self: [self.stop] if isinstance(self.stop, str) else self.stop)
    wants_logprobs = property(lambda self: self.logprobs is not None and self.logprobs is not False)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, its):
        if not isinstance(its, dict):
            return its
        return {k: v for k, v in its.items() if v is not None and (k, v) not in NOTHING.items()}

    @classmethod
    def read(cls, body):
        """From JSON in bytes. Raises Refused, which names the field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, wrong["loc"]))[:100] or "body"
        why = "is not supported here" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        raise Refused(400, f"{where}: {why}", where.partition(".")[0])


class CompletionRequest(Request):
    """The body of POST /v1/completions. `logprobs` are those of the chosen tokens."""

    prompt: str | Annotated[list[int], Field(fail_fast=True)]
    max_tokens: PositiveInt = 16
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    names: ClassVar = ("cmpl", "text_completion", "text_completion")  # of an id, whole, a part

    def choice(self, text, tokens, reason, place):
        """The `text`; of its `tokens`, if logprobs are wanted, a list of (text, where it begins,
        logprob); the finish_reason or None. `place` is "whole", "first" or "next" of the answer."""
        texts, starts, logprobs = map(list, zip(*tokens)) if tokens else ([], [], [])
        its = {"tokens": texts, "text_offset": starts, "token_logprobs": logprobs}
        its = None if self.logprobs is None else its | {"top_logprobs": None}
        return {"index": 0, "text": text, "logprobs": its, "finish_reason": reason}


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict], Field(min_length=1, fail_fast=True)]  # for the chat template
    max_tokens: PositiveInt | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    names: ClassVar = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def choice(self, text, tokens, reason, place):
        """As that of a CompletionRequest."""
        known = [(t, p, None if "\ufffd" in t else list(t.encode())) for t, _, p in tokens]
        known = [{"token": t, "logprob": p, "bytes": b, "top_logprobs": []} for t, p, b in known]
        its, key = {"content": known}, "message" if place == "whole" else "delta"
        said = {"content": text} if place == "next" else {"role": "assistant", "content": text}
        its = its if self.logprobs else None
        return {"index": 0, key: said, "logprobs": its, "finish_reason": reason}
