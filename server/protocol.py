"""The bodies of requests in OpenAI's words, and the shapes of the answers.

A field that this server does not know, or a value that it cannot do, is an error that names it. A
field that asks for nothing, such as n=1, is accepted. Read next: app.py."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError, model_validator
from starlette.exceptions import HTTPException

StopString = Annotated[str, Field(min_length=1)]
NEUTRAL_VALUES: dict[str, object] = {  # fields that are accepted with this value and no other
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "top_logprobs": 0,
}


class ApiError(HTTPException):
    """An error of a request: an HTTP status, and OpenAI's error object as its `detail`."""

    detail: Any  # a dict, which starlette declares a str

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(status, {"error": error}, headers)  # pyright: ignore[reportArgumentType]


class WrittenToken(NamedTuple):
    """A token of an answer."""

    text: str
    offset: int  # the place of its text in the answer, in characters
    logprob: float | None


class Piece(NamedTuple):
    """The part of an answer that is certain with one more token, or the whole answer."""

    text: str
    tokens: list[WrittenToken]
    finish_reason: str | None


Place = Literal["whole", "first", "next"]  # of a piece in the answer


class RequestBody(BaseModel, strict=True, extra="forbid"):
    """The fields that completions and chats have in common.

    top_k, ignore_eos (generate all of max_tokens), and the class and targets of
    policies/priority.py are not OpenAI's. `user` is ignored. The limits of numbers that are not
    given here are checked by SamplingParams and the engine."""

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

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]  # of a whole answer
    chunk_object_name: ClassVar[str]  # of an event of a stream

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of the chosen tokens are part of the answer."""
        raise NotImplementedError

    def choice(self, piece: Piece, place: Place) -> dict[str, object]:
        """A piece of the answer as OpenAI's "choice"."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_values(cls, body: object) -> object:
        """The body without fields that ask for nothing."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not _is_neutral(name, value)}

    @classmethod
    def read(cls, json_bytes: bytes) -> Self:
        """The body in these bytes of JSON. Raises ApiError, which names the field that is wrong."""
        try:
            return cls.model_validate_json(json_bytes)
        except ValidationError as validation:
            error = validation.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in error["loc"])[:100] or "body"
        unknown = error["type"] == "extra_forbidden"
        reason = "is not supported here" if unknown else error["msg"]
        raise ApiError(400, f"{path}: {reason}", path.partition(".")[0])


def _is_neutral(name: str, value: object) -> bool:
    if value is None:
        return True
    return name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]


class CompletionRequest(RequestBody):
    """The body of POST /v1/completions. `logprobs` are those of the chosen tokens."""

    prompt: str | Annotated[list[int], Field(fail_fast=True)]
    max_tokens: PositiveInt = 16  # pyright: ignore[reportIncompatibleVariableOverride]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def choice(self, piece: Piece, place: Place) -> dict[str, object]:
        logprobs = None
        if self.wants_logprobs:
            logprobs = {
                "tokens": [token.text for token in piece.tokens],
                "text_offset": [token.offset for token in piece.tokens],
                "token_logprobs": [token.logprob for token in piece.tokens],
                "top_logprobs": None,
            }
        return {
            "index": 0,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


class ChatRequest(RequestBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict], Field(min_length=1, fail_fast=True)]  # for the chat template
    max_tokens: PositiveInt | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def choice(self, piece: Piece, place: Place) -> dict[str, object]:
        message = {"content": piece.text}
        if place != "next":
            message = {"role": "assistant", "content": piece.text}
        return {
            "index": 0,
            "message" if place == "whole" else "delta": message,
            "logprobs": _chat_logprobs(piece.tokens) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
        }


def _chat_logprobs(tokens: Sequence[WrittenToken]) -> dict[str, object]:
    """The log-probabilities of a chat. A token that is only a part of a character has no bytes."""
    content = []
    for token in tokens:
        complete = "\ufffd" not in token.text
        content.append(
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.text.encode()) if complete else None,
                "top_logprobs": [],
            }
        )
    return {"content": content}
