"""The bodies of requests, and errors, as OpenAI writes them.

A value that asks for nothing is accepted for every field of OpenAI or vLLM; another value of a
field that is not computed here is an error. Left out: tools, images, beams, constraints, penalties.
Read next: responses.py, app.py."""

import json
import random
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    Json,
    PositiveInt,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

NEUTRAL: dict[str, tuple[object, ...]] = {  # fields that are not computed -> what asks for nothing
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "verbosity": ("medium",),
    "priority": (0,),  # from here on vLLM's
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "repetition_min_count": (0,),
    "include_obfuscation": (False,),  # of stream_options
}
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ApiError(HTTPException):
    """An error with the field that it is about, and a code that programs look for."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def error_json(error: HTTPException) -> str:
    """The error as JSON, in OpenAI's shape."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    param = error.param if isinstance(error, ApiError) else None
    code = error.code if isinstance(error, ApiError) else None
    fields = {"message": error.detail, "type": kind, "param": param, "code": code}
    return json.dumps({"error": fields})


def error_response(error: HTTPException) -> Response:
    """The response to a request that cannot be answered."""
    return Response(error_json(error), error.status_code, error.headers, "application/json")


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether the server may ignore a field of this name and value."""
    if name == "logit_bias" and isinstance(value, dict):
        return not any(value.values())
    return value is None or value in NEUTRAL.get(name, ())


def _as_list(value: object) -> object:
    """A list of prompts, or of stop strings, also of one that stands alone."""
    is_list = isinstance(value, list) and value and isinstance(value[0], str | list)
    return value if is_list else [value]


class Fields(BaseModel, strict=True, extra="forbid"):
    """A JSON object without the fields that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {k: value for k, value in fields.items() if not asks_for_nothing(k, value)}


class StreamOptions(Fields):
    """The events of a stream that count tokens: the last one, or with vLLM's option all."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Fields):
    """The fields that completions and chats have in common.

    top_k, ignore_eos (generate all of max_tokens), and the class and targets of
    policies/priority.py are not OpenAI's. `user` is for policies that are fair between users."""

    model: str | None = None  # None: the one that is served
    max_tokens: PositiveInt | None = None
    temperature: float | None = Field(None, ge=0)  # None: as the server's defaults
    top_p: float | None = Field(None, gt=0, le=1)
    # vLLM's -1 is all tokens, too
    top_k: Annotated[int, Field(ge=-1), AfterValidator(partial(max, 0))] | None = None
    seed: int = Field(default_factory=partial(random.getrandbits, 63))
    n: int = Field(1, ge=1, le=128)  # answers to each prompt
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=4), BeforeValidator(_as_list)
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    priority: Literal["realtime", "high", "normal", "low"] = "normal"
    ttft_slo: Seconds | None = None
    tbt_slo: Seconds | None = None
    user: str = ""

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if the client says so."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of the chosen tokens are part of the answer."""
        raise NotImplementedError


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_list)]
    max_tokens: PositiveInt = 16  # pyright: ignore[reportIncompatibleVariableOverride]
    logprobs: int | None = Field(None, ge=0, le=1)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TextPart(BaseModel, strict=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Function(BaseModel, strict=True, extra="allow"):
    """A function that was called. OpenAI's clients send its arguments as JSON text."""

    name: str
    arguments: Annotated[
        Json[dict[str, Any]] | dict[str, Any], BeforeValidator(lambda value: value or {})
    ]


class ToolCall(BaseModel, strict=True, extra="allow"):
    """A call in an earlier answer."""

    function: Function


class Message(BaseModel, strict=True, extra="allow"):
    """A message of a chat. A template may read more fields of it."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates of transformers read it: its content is a text, arguments are
        objects, and what is null or an empty list of calls is not there."""
        fields = {name: value for name, value in self.model_dump().items() if value is not None}
        if not self.tool_calls:
            fields.pop("tool_calls", None)
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {**fields, "content": text}


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs
