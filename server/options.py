"""The options of the server. Read first: cli/options.py, cli/loading.py."""

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

from cli.options import (
    SMALL_PAGES,
    EngineOptions,
    OptionParser,
    add_model_options,
    from_args,
    model_options,
    nonempty_text,
    number,
    option,
    whole,
)


def origin(text: str) -> str:
    """The type of an origin of web pages, as a browser sends it."""
    if not re.fullmatch(r"\*|https?://[^\s/]+", text):
        raise ArgumentTypeError(f"{text:.60}: must be * or like http://localhost:3000")
    return text


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    """All that the command line says."""

    host: str = option(
        "the address to listen at; 0.0.0.0 lets in all who reach this machine",
        type=nonempty_text,
        default="127.0.0.1",
    )
    allowed_hosts: list[str] = option(
        "a name that clients without a key may call this server by; may be repeated",
        name="--allowed-host",
        type=nonempty_text,
        action="append",
        default=[],
        default_text="--host, localhost and all IP addresses",
    )
    cors: list[str] = option(
        "an origin whose web pages may call this server, * for all; may be repeated",
        type=origin,
        action="append",
        metavar="ORIGIN",
        default=[],
        default_text="none",
    )
    port: int = option(
        "the port to listen at; 0 takes any that is free",
        type=whole(minimum=0, maximum=65535),
        default=8000,
    )
    served_model_name: str | None = option(
        "the name that clients call the model by", type=nonempty_text, default_text="as --model"
    )
    api_key: str | None = option(
        "the key that clients must send", default_text="NANOSARATHI_API_KEY, or none"
    )
    max_body: int = option(
        "the longest body of a request, in bytes", type=whole(minimum=1), default=1_048_576
    )
    drain: float = option(
        "seconds that requests have to finish after a signal", type=number(minimum=0), default=10.0
    )
    max_len: int | None = option(
        "the longest prompt and output, in tokens",
        type=whole(minimum=2),
        default_text="2048 or less",
    )
    page_size: int | None = option(
        "tokens in a page of the cache", type=whole(minimum=1), default_text=SMALL_PAGES
    )
    pages: int | None = option(
        "pages in the cache",
        type=whole(minimum=1),
        default_text="enough for --max-batch of --max-len",
    )
    max_waiting: int = option(
        "the most requests that may wait; others are answered 429",
        type=whole(minimum=1),
        default=256,
    )
    tbt_slo: float | None = option(
        "seconds between tokens, for the policies dynamic and priority", type=number(above=0)
    )


def parse_args(argv: Sequence[str] | None) -> ServerOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = OptionParser(prog="python -m server", description="An OpenAI-compatible server.")
    parser.add_fields(ServerOptions)
    add_model_options(parser, "llama-160m")
    parser.set_defaults(api_key=os.environ.get("NANOSARATHI_API_KEY"))
    args = parser.parse_args(argv)
    if args.api_key is not None and not args.api_key.strip():
        parser.error("--api-key, NANOSARATHI_API_KEY: must not be empty")
    return from_args(ServerOptions, args, model=model_options(args))
