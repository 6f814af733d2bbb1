"""The bodies of requests in OpenAI's words, and the shapes of the answers.

A field that this server does not know, or a value that it cannot do, is an error that names it. A
field that asks for nothing, such as n=1, is accepted. Read next: app.py."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from config import QueueFull

MAX_FIELDS = 100  # of a body, also those that are not known
MAX_ITEMS = 10_000  # keys and items in a field: each costs time, in which all streams wait
MAX_PARTS = 20_000  # lists and objects in a body
MAX_STOP = 1000  # characters of a stop string
MAX_CHOICES = 128  # of a request
MAX_USER = 256  # characters: a policy may remember who has asked
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Prompt = str | Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
NEUTRAL_VALUES: dict[str, object] = {  # fields that are accepted with this value and no other
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "service_tier": "auto",
    "store": False,
    "min_p": 0,  # from here on vLLM's
    "min_tokens": 0,
    "repetition_penalty": 1,
    "skip_special_tokens": True,
}
FIELDS_OF_TWO_TYPES = {  # and what they must be
    "prompt": f"a text, a list of token ids, or several of these for {MAX_CHOICES} answers at most",
    "stop": f"one to four texts of 1 to {MAX_STOP:,} characters",
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

    spelled: bytes  # which may be a part of a character
    offset: int  # the place of its text in the answer, in characters
    logprob: float | None

    @property
    def text(self) -> str:
        """Its text, in which a part of a character is a replacement character."""
        return self.spelled.decode(errors="replace")


class Piece(NamedTuple):
    """The part of an answer that is certain with one more token, or the whole answer."""

    text: str
    tokens: list[WrittenToken]
    finish_reason: str | None

    @classmethod
    def joined(cls, pieces: Sequence["Piece"]) -> "Piece":
        """The whole of these pieces."""
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        return cls(text, tokens, pieces[-1].finish_reason)


Place = Literal["whole", "first", "next"]  # of a piece in the answer


class RequestBody(BaseModel, strict=True, extra="forbid"):
    """The fields that completions and chats have in common.

    top_k, ignore_eos (generate all of max_tokens), and the class and targets of
    policies/priority.py are not OpenAI's. `user` is for policies that are fair between users, as
    `vtc`. The limits of numbers that are not given here are checked by SamplingParams and the
    engine."""

    model: str | None = None  # None: the one that is served
    max_tokens: PositiveInt | None = None
    temperature: float | None = None  # None: as the server's defaults
    top_p: float | None = None
    top_k: int | None = None
    seed: int = Field(default_factory=partial(random.getrandbits, 63))
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1  # answers to each prompt
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    ignore_eos: bool = False
    priority: Literal["realtime", "high", "normal", "low"] = "normal"
    ttft_slo: Seconds | None = None
    tbt_slo: Seconds | None = None
    user: str = Field("", max_length=MAX_USER)

    prompt_name: ClassVar[str]  # the field that the prompt is made of
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]  # of a whole answer
    chunk_object_name: ClassVar[str]  # of an event of a stream

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, if they need not be made of messages."""
        return []

    @property
    def limit_name(self) -> str:
        """The field that limits the output."""
        return "max_tokens"

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if the client said so."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of the chosen tokens are part of the answer."""
        raise NotImplementedError

    def choice(self, index: int, piece: Piece, place: Place) -> dict[str, object]:
        """A piece of the answer of this number as OpenAI's "choice"."""
        raise NotImplementedError

    @classmethod
    def read(cls, json_bytes: bytes) -> Self:
        """The body in these bytes of JSON. Raises ApiError, which names the field that is wrong."""
        # before they are parsed, and looked into only if there are many brackets
        many = _count_brackets(json_bytes) > MAX_PARTS
        if many and _count_brackets(_without_strings(json_bytes)) > MAX_PARTS:
            raise ApiError(400, f"body: must hold at most {MAX_PARTS:,} lists and objects")
        try:
            fields = from_json(json_bytes)
        except ValueError as error:
            raise ApiError(400, f"body: must be JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "body: must be a JSON object")
        _check_size(fields)
        try:
            return cls.model_validate(_without_neutral_values(fields))
        except ValidationError as validation:
            error = validation.errors(include_url=False, include_input=False)[0]
        path = [part for part in error["loc"] if part != "[key]"]
        field = str(path[0])[:100]
        if error["type"] == "extra_forbidden":
            reason = "is not supported here"
        elif error["type"] != "missing" and field in FIELDS_OF_TWO_TYPES:
            path = [field]
            reason = f"must be {FIELDS_OF_TWO_TYPES[field]}"
        else:
            reason = error["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{_place(path)}: {reason}", field)

    def refusal(self, error: ValueError) -> ApiError:
        """An error of the engine in the words of the client, with the field that it is about."""
        if isinstance(error, QueueFull):
            return ApiError(429, str(error), None, "queue_full", {"Retry-After": "1"})
        names = {"max_new_tokens": self.limit_name, "prompt": self.prompt_name}
        message = str(error).replace("max_new_tokens", self.limit_name)
        if message.startswith("prompt"):
            message = self.prompt_name + message.removeprefix("prompt")
        argument = re.split(r"\W", str(error), maxsplit=1)[0]
        field = names.get(argument, argument)
        return ApiError(400, message, field if field in type(self).model_fields else None)


def _place(path: Sequence[str | int]) -> str:
    """The name of a place in a body, as OpenAI writes it: messages[0].content."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path]
    return "".join(parts).removeprefix(".")


def _count_brackets(json_bytes: bytes) -> int:
    """How many lists and objects begin here; brackets in strings count, too."""
    return json_bytes.count(b"[") + json_bytes.count(b"{")


def _without_strings(json_bytes: bytes) -> bytes:
    """These bytes of JSON without the strings in them."""
    without_escapes = json_bytes.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(without_escapes.split(b'"')[::2])


def _check_size(fields: dict[str, object]) -> None:
    """Raise ApiError if reading the fields takes too long. Token ids are read fast."""
    if len(fields) > MAX_FIELDS:
        raise ApiError(400, f"body: must have at most {MAX_FIELDS} fields")
    for name, value in fields.items():
        if name != "prompt" and not _holds_at_most(value, MAX_ITEMS):
            message = f"must hold at most {MAX_ITEMS:,} keys and items"
            raise ApiError(400, f"{name[:100]}: {message}", name[:100])


def _holds_at_most(value: object, limit: int) -> bool:
    """Whether a JSON value has at most `limit` keys and items, those of its parts included."""
    count = 0
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            count += len(part)
            if count > limit:
                return False
            parts += part.values() if isinstance(part, dict) else part
    return True


def _without_neutral_values(fields: dict[str, object]) -> dict[str, object]:
    """The fields that ask for something. Raises ApiError for those that can only be neutral."""
    asking: dict[str, object] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in NEUTRAL_VALUES:
            asking[name] = value
            continue
        neutral = NEUTRAL_VALUES[name]
        same_kind = isinstance(value, bool) == isinstance(neutral, bool)  # True == 1
        if not same_kind or value != neutral:
            raise ApiError(400, f"{name}: must be {json.dumps(neutral)}", name)
    return asking


def _as_list(prompt: object) -> object:
    """A list of prompts, also of the one that a body has alone."""
    are_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if are_several else [prompt]


class CompletionRequest(RequestBody):
    """The body of POST /v1/completions. `logprobs` are those of the chosen tokens."""

    prompt: Annotated[list[Prompt], Field(fail_fast=True), BeforeValidator(_as_list)]
    max_tokens: PositiveInt = 16  # pyright: ignore[reportIncompatibleVariableOverride]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    prompt_name = "prompt"
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    @field_validator("prompt")
    @classmethod
    def _not_too_many(cls, prompts: list[Prompt], info: ValidationInfo) -> list[Prompt]:
        if len(prompts) * info.data.get("n", 1) > MAX_CHOICES:
            raise ValueError("too many answers")
        return prompts

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def choice(self, index: int, piece: Piece, place: Place) -> dict[str, object]:
        logprobs = None
        if self.wants_logprobs:
            logprobs = {
                "tokens": [token.text for token in piece.tokens],
                "text_offset": [token.offset for token in piece.tokens],
                "token_logprobs": [token.logprob for token in piece.tokens],
                "top_logprobs": None,
            }
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


class ChatRequest(RequestBody):
    """The body of POST /v1/chat/completions."""

    # what is in a message is checked by app.plain_message
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False

    prompt_name = "messages"
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @field_validator("max_completion_tokens")
    @classmethod
    def _only_one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("max_tokens") is not None:
            raise ValueError("must not be there beside max_tokens")
        return value

    def choice(self, index: int, piece: Piece, place: Place) -> dict[str, object]:
        message = {"content": piece.text}
        if place != "next":
            message = {"role": "assistant", "content": piece.text}
        return {
            "index": index,
            "message" if place == "whole" else "delta": message,
            "logprobs": _chat_logprobs(piece.tokens) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
        }


def _chat_logprobs(tokens: Sequence[WrittenToken]) -> dict[str, object]:
    """The log-probabilities of a chat. The bytes of all tokens make up the text."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.spelled),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content}
