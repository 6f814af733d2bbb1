"""The bodies of requests, and errors, as OpenAI writes them.

A value that asks for nothing is accepted for every field of OpenAI or vLLM; another value of a
field that is not computed here is an error. Left out: tools, images, beams, constraints, penalties.
Read next: responses.py, app.py."""

import json
import random
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    Json,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

NEUTRAL: dict[str, object] = {  # fields that are not computed -> what asks for nothing
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "service_tier": "default",
    "store": False,
    "metadata": {},
    "verbosity": "medium",
    "priority": 0,  # from here on vLLM's
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "use_beam_search": False,
    "stop_token_ids": [],
    "bad_words": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
    "include_reasoning": True,
    "return_tokens_as_token_ids": False,
    "return_token_ids": False,
    "max_repetition_pattern_size": 0,
    "min_repetition_pattern_size": 0,
    "repetition_min_count": 0,
    "include_obfuscation": False,  # of stream_options
}
AUTO = ("tool_choice", "function_call", "service_tier")  # "auto" asks for nothing, too


def api_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> HTTPException:
    """An error about a field `param`, with a `code` that programs look for."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    detail = {"message": message, "type": kind, "param": param, "code": code}
    return HTTPException(status, detail, {"Retry-After": "1"} if status == 429 else None)


def error_json(error: HTTPException) -> str:
    """The error in OpenAI's shape."""
    return json.dumps({"error": error.detail})


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether the server may ignore a field of this name and value."""
    if name == "logit_bias" and isinstance(value, dict):
        return not any(value.values())
    return value in (None, NEUTRAL.get(name)) or (name in AUTO and value == "auto")


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
    max_tokens: PositiveInt | None = None  # None: all that fit
    max_completion_tokens: PositiveInt | None = None  # the same, goes first
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
    logprobs: Any = None  # of the chosen tokens
    ignore_eos: bool = False
    priority: Literal["realtime", "high", "normal", "low"] = "normal"
    ttft_slo: PositiveFloat | None = None
    tbt_slo: PositiveFloat | None = None
    user: str = ""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities. In a completion 0 asks for them, too."""
        return self.logprobs is not None and self.logprobs is not False


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_list)]
    max_tokens: PositiveInt | None = 16
    logprobs: int | None = Field(None, ge=0, le=1)


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


def _joined(content: str | list[TextPart] | None) -> str:
    """The content of a message as one text."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class Message(BaseModel, strict=True, extra="allow"):
    """A message of a chat, as templates of transformers read it once what is null is left out: its
    content is a text, arguments are objects, no list of calls is empty. There may be more fields.
    """

    role: str
    content: Annotated[str | list[TextPart] | None, AfterValidator(_joined)] = ""
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
