"""An OpenAI-compatible server.

    python -m server --model path/or/hub-name --policy sarathi-serve --chunk 256 --port 8000

Without --model the weights are random and the text is noise. Read next: README.md, app.py."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from cli.console import run  # other modules are imported once it is in charge of signals

if TYPE_CHECKING:
    from cli.loading import ModelOptions
    from engine import Engine
    from model import GPT

SignalHandler = Callable[[int, FrameType | None], Any] | signal.Handlers


@dataclass(frozen=True)
class ServerOptions:
    """All that the command line says."""

    host: str
    port: int
    api_key: str | None
    max_body: int  # bytes
    drain: float  # seconds
    policy: str
    chunk: int
    max_batch: int
    prefix_caching: bool
    max_len: int | None
    page_size: int | None
    pages: int | None
    max_waiting: int
    tbt_slo: float | None  # seconds
    model: ModelOptions


def parse_args(argv: Sequence[str] | None) -> ServerOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from cli.loading import add_engine_options, add_model_options, model_options
    from cli.options import OptionParser, number, whole

    parser = OptionParser(prog="python -m server", description="An OpenAI-compatible server.")
    parser.add_option(
        "--host",
        help="the address to listen at; 0.0.0.0 lets in all who reach this machine",
        default="127.0.0.1",
    )
    parser.add_option(
        "--port",
        help="the port to listen at; 0 takes any that is free",
        type=whole(minimum=0, maximum=65535),
        default=8000,
    )
    parser.add_option(
        "--api-key",
        help="the key that clients of /v1 must send",
        default=os.environ.get("NANOSARATHI_API_KEY"),
        default_text="NANOSARATHI_API_KEY, or none",
    )
    parser.add_option(
        "--max-body",
        help="the longest body of a request, in bytes",
        type=whole(minimum=1),
        default=1_048_576,
    )
    parser.add_option(
        "--drain",
        help="seconds that requests have to finish after a signal",
        type=number(minimum=0),
        default=10.0,
    )
    parser.add_option(
        "--max-len",
        help="the longest prompt and output, in tokens",
        type=whole(minimum=1),
        default_text="2048 or less",
    )
    parser.add_option(
        "--page-size",
        help="tokens in a page of the cache",
        type=whole(minimum=1),
        default_text="64, or half of --max-len",
    )
    parser.add_option(
        "--pages",
        help="pages in the cache",
        type=whole(minimum=1),
        default_text="enough for --max-batch of --max-len",
    )
    parser.add_option(
        "--max-waiting",
        help="the most requests that may wait; others are answered 429",
        type=whole(minimum=1),
        default=256,
    )
    parser.add_option(
        "--tbt-slo",
        help="seconds between tokens, for the policies dynamic and priority",
        type=number(above=0),
    )
    add_engine_options(parser)
    add_model_options(parser, "llama-160m")
    args = parser.parse_args(argv)
    if args.api_key == "":
        parser.error("--api-key, NANOSARATHI_API_KEY: must not be empty")
    return ServerOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        max_body=args.max_body,
        drain=args.drain,
        policy=args.policy,
        chunk=args.chunk,
        max_batch=args.max_batch,
        prefix_caching=args.prefix_caching,
        max_len=args.max_len,
        page_size=args.page_size,
        pages=args.pages,
        max_waiting=args.max_waiting,
        tbt_slo=args.tbt_slo,
        model=model_options(args),
    )


def load(options: ServerOptions) -> GPT:
    """The model of these options. With --tp or --pp this returns on rank 0 only."""
    from cli.loading import load_model

    return load_model(options.model, options.max_len or 1, positions_from="--max-len")


def make_engine(options: ServerOptions) -> Engine:
    """The engine of these options, warmed up."""
    from parallel import engine_for

    model = load(options)
    half_of_max_len = -(-(options.max_len or 2048) // 2)
    engine = engine_for(model)(
        model,
        policy=options.policy,
        chunk=options.chunk,
        max_batch=options.max_batch,
        max_len=options.max_len,
        page_size=options.page_size or min(64, half_of_max_len),
        pages=options.pages,
        prefix_caching=options.prefix_caching,
        max_waiting=options.max_waiting,
        attention=options.model.attention,
        policy_options={"tbt_slo": options.tbt_slo} if options.tbt_slo else {},
    )
    engine.warm_up()
    return engine


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: load the model, and serve until a signal comes."""
    options = parse_args(argv)
    import uvicorn

    from cli.loading import find_text_model
    from pretrained.tokenizers import load_chat
    from server.app import Api
    from server.engine_thread import EngineThread
    from torchrun import find_place

    text_model = find_text_model(options.model)
    options = replace(options, model=text_model.options)
    if find_place().rank:
        load(options)  # this process follows rank 0, and never returns from here
    chat = load_chat(options.model.model)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        # a signal ends the process at once while the engine's thread, which cannot be
        # interrupted, loads the model; then it lets the server finish
        on_signals(signal.SIG_DFL)
        thread = EngineThread(partial(make_engine, options))
        api = Api(
            thread,
            tokenizer=text_model.tokenizer,
            name=text_model.name,
            chat=chat,
            key=options.api_key,
            max_body=options.max_body,
        )
        config = uvicorn.Config(
            api.app(),
            access_log=False,
            log_level="error",
            timeout_graceful_shutdown=options.drain,  # pyright: ignore[reportArgumentType]
        )
        server = uvicorn.Server(config)
        on_signals(server.handle_exit)
        host, port = listener.getsockname()[:2]
        print(f"{text_model.name} at http://{host}:{port}/v1", flush=True)
        server.run(sockets=[listener])


def on_signals(handler: SignalHandler) -> None:
    """Handle Ctrl-C and SIGTERM this way."""
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


if __name__ == "__main__":
    run(main)
