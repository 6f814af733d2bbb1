"""The options of the server: a field is an option, its docstring the help.

Read first: cli/model.py. Read next: __main__.py."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Who may use the server, and the memory of its requests."""

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 lets in all who reach this machine."""
    port: NonNegativeInt = 8000
    """The port to listen at; 0 takes any that is free."""
    api_key: Annotated[str | None, Parameter(env_var="NANOSARATHI_API_KEY")] = None
    """The key that clients must send. [default: none]"""
    allowed_host: tuple[str, ...] = ()
    """A name that clients may call a server without a key by; may be repeated.
    --host, localhost and 127.0.0.1 always may."""
    cors: tuple[str, ...] = ()
    """An origin whose web pages may call this server, * for all; may be repeated."""
    served_model_name: str | None = None
    """The name that clients call the model by. [default: as --model]"""
    max_len: PositiveInt | None = None
    """The longest prompt and output, in tokens. [default: 2048 or less]"""
    page_size: PositiveInt | None = None
    """Tokens in a page of the cache. [default: 64, or half of --max-len; 256 on CUDA]"""
    pages: PositiveInt | None = None
    """Pages in the cache. [default: enough for --max-batch of --max-len]"""
    max_waiting: PositiveInt = 256
    """The most requests that may wait; others are answered 429."""
    tbt_slo: PositiveFloat | None = None
    """Seconds between tokens, for the policies dynamic and priority."""

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ValueError("--api-key, NANOSARATHI_API_KEY: must not be empty")
