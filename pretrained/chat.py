"""Chats: the messages that a client may send, and the template that makes a prompt of them.

A checkpoint's template is a program of its author, in Jinja. It runs in a sandbox, and ends with an
error where its text is too long or takes too long. Read next: tokenizers.py, which loads it."""

import operator
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from pretrained.checks import check_type, shorten

MAX_CHARS = 2**24  # of a prompt, and of a text that a template repeats
MAX_ITEMS = 100_000  # of a list that it repeats, as of a range in jinja2's sandbox
MAX_BITS = 2**12  # of a power that it computes
WIDENING = ("center", "indent", "tojson")  # filters that may make a text as wide as they are told
RENDER_S = 10.0  # a template may take
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Message = dict[str, Any]  # {"role": ..., "content": ...}, and more that a template may read
Chat = Callable[[list[Message]], str]  # messages -> the prompt


def check_messages(messages: list[Message], template: str = "") -> list[Message]:
    """The messages as a template reads them: each content is a text, and nothing is null.

    A role must be OpenAI's, or stand in the template. A developer is a system to a template that
    does not know it: it would put its default system message before. Raises ValueError, naming
    the field that is wrong."""
    if not messages:
        raise ValueError("messages: must hold at least 1 message")
    roles = [*ROLES, *re.findall(r"""['"](\w+)['"]""", template)]
    checked = [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    for i, message in enumerate(checked):
        if message["role"] not in roles:
            role = shorten(message["role"])
            raise ValueError(f"messages[{i}].role={role}: must be one of {', '.join(ROLES)}")
        if message["role"] == "developer" and template and "developer" not in roles[len(ROLES) :]:
            message["role"] = "system"
    return checked


def _check_message(name: str, message: Message) -> Message:
    check_type(name, message, dict, "an object")
    message = {field: value for field, value in message.items() if value is not None}
    check_type(f"{name}.role", message.get("role"), str, "a text")
    for field in ("name", "tool_call_id"):
        check_type(f"{name}.{field}", message.get(field, ""), str, "a text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        allowed = "a list of calls, each with a function that has a name and arguments"
        raise ValueError(f"{name}.tool_calls={shorten(calls)}: must be {allowed}")
    content = message.get("content")
    if content is None and (calls or "function_call" in message):
        content = ""
    return {**message, "content": _text(f"{name}.content", content)}


def _is_call(call: object) -> bool:
    """Whether this is a call of a tool, as OpenAI's API has them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    arguments = function.get("arguments", "")
    return isinstance(function.get("name"), str) and isinstance(arguments, str | dict)


def _text(name: str, content: object) -> str:
    """The text of a content: itself, or that of its parts."""
    parts = [{"type": "text", "text": content}]
    if isinstance(content, list) and content:
        parts = content
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            value = shorten(content)
            raise ValueError(f"{name}={value}: must be a text, or a list of parts of type text")
        texts.append(text)
    return "".join(texts)


def lines_of_chat(messages: list[Message]) -> str:
    """The chat of a model without a template: each message is a line."""
    lines = [f"{message['role']}: {message['content']}\n" for message in check_messages(messages)]
    return "".join(lines) + "assistant:"


class ChatTemplate:
    """Makes a prompt of messages, as `apply_chat_template` of transformers does.

    It raises whatever the template raises. What the template repeats, computes or writes is
    limited, and so is its time, as far as Python can: one call of a text's method ends first."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # despite its name it makes an environment anew, with all that templates use
        from transformers.utils.chat_template_utils import _cached_compile_jinja_template

        environment: Any = _cached_compile_jinja_template("").environment
        environment.intercepted_binops = frozenset(["*", "**", "%"])  # or they run while compiling
        environment.binop_table["*"] = _multiply
        environment.binop_table["**"] = _power
        for name in WIDENING:
            environment.filters[name] = _with_small_numbers(environment.filters[name], after=1)
        call = environment.call

        def limited_call(context: object, function: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(getattr(function, "__self__", None), str):  # as 'a'.ljust
                function = _with_small_numbers(function)
            return call(context, function, *args, **kwargs)

        environment.call = limited_call
        self.special_tokens = special_tokens
        with time_limit(RENDER_S):
            self.template = environment.from_string(source)

    def render(self, messages: list[Message]) -> str:
        """The prompt of messages that are checked."""
        pieces = self.template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self.special_tokens,
        )
        with time_limit(RENDER_S):
            return _join(pieces)


def _join(pieces: Iterable[str]) -> str:
    """The text of these pieces. Raises OverflowError as soon as it is too long."""
    texts: list[str] = []
    length = 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        if length > MAX_CHARS:
            raise OverflowError(f"its text has more than {MAX_CHARS:,} characters")
    return "".join(texts)


def _multiply(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            limit = MAX_CHARS if isinstance(value, str) else MAX_ITEMS
            if len(value) * times > limit:
                raise OverflowError(f"{len(value)} * {times}: must be at most {limit:,}")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
        raise OverflowError(f"a power of more than {MAX_BITS:,} bits")
    return operator.pow(left, right)


def _with_small_numbers(function: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
    """The function, but it raises OverflowError for a large number `after` so many arguments: it
    may be a text's width."""

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[after:], *kwargs.values()):
            if isinstance(value, int) and value > MAX_CHARS:
                raise OverflowError(f"{shorten(value)}: must be at most {MAX_CHARS:,}")
        return function(*args, **kwargs)

    return limited


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError at the first call in this thread after so many seconds."""
    end = time.monotonic() + seconds
    caller = sys.getprofile()

    def check(frame: object, event: str, arg: object) -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {seconds:g} s")

    sys.setprofile(check)
    try:
        yield
    finally:
        sys.setprofile(caller)
