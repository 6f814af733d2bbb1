"""An OpenAI-compatible server.

    python -m server --model path/or/hub-name --policy sarathi-serve --chunk 256 --port 8000

Without --model the weights are random and the text is noise. Read first: README.md, app.py,
connections.py."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cli.console import run  # other modules are imported once it is in charge of signals

STEP_S = 10.0  # after the last request a step has this time to end

if TYPE_CHECKING:
    from engine import Engine
    from model import GPT
    from sampling import SamplingParams
    from server.options import ServerOptions


def parse_args(argv: Sequence[str] | None) -> ServerOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from server import options

    return options.parse_args(argv)


def load(options: ServerOptions) -> GPT:
    """The model of these options. With --tp or --pp this returns on rank 0 only."""
    from cli.loading import load_model

    return load_model(options.model, options.max_len or 1, positions_from="--max-len")


def make_engine(options: ServerOptions) -> Engine:
    """The engine of these options, warmed up."""
    from runtime.memory import MAX_LEN, small_page_size

    model = load(options)
    max_len = options.max_len or min(MAX_LEN, model.config.max_positions)
    engine = options.make_engine(
        model,
        max_len=options.max_len,
        page_size=options.page_size or small_page_size(max_len, model.device),
        pages=options.pages,
        max_waiting=options.max_waiting,
        policy_options={"tbt_slo": options.tbt_slo} if options.tbt_slo else {},
    )
    if options.model.model:
        print(f"# {model.dtype} on {model.device}", file=sys.stderr, flush=True)
    print("# warming up", file=sys.stderr, flush=True)
    engine.warm_up()
    return engine


def default_sampling(model: str | None) -> SamplingParams:
    """How a text is sampled if the client says nothing: OpenAI's defaults, or a checkpoint's.

    Says on stderr what of a checkpoint's recommendation is not computed."""
    from pretrained.tokenizers import generation_config
    from server.app import OPENAI_SAMPLING

    if model is None:
        return OPENAI_SAMPLING
    config = generation_config(model)
    penalty = config.repetition_penalty
    if penalty not in (None, 1):
        message = f"generation_config.json: repetition_penalty={penalty} is not computed here"
        print(f"warning: {message}", file=sys.stderr, flush=True)
    recommended = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    named = {name: value for name, value in recommended.items() if value is not None}
    return replace(OPENAI_SAMPLING, **named)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: load the model, and serve until a signal comes."""
    options = parse_args(argv)
    from cli.loading import find_tokenizer
    from policies.trial import find_violation
    from runtime.torchrun import find_place
    from server.app import Api
    from server.connections import Server
    from server.engine_thread import EngineThread

    name = options.served_model_name or options.model.name
    tokenizer, model_options = find_tokenizer(options.model)
    options = replace(options, model=model_options)
    if find_place().rank:
        load(options)  # this process follows rank 0, and never returns from here
    violation = find_violation(options.policy)
    if violation:
        print(f"warning: {violation.sentence}", file=sys.stderr, flush=True)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        # a signal ends the process at once while the engine's thread, which cannot be
        # interrupted, loads the model; then it lets the server finish
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        thread = EngineThread(partial(make_engine, options), time_decodes=True)
        api = Api(
            thread,
            tokenizer=tokenizer,
            name=name,
            key=options.api_key,
            max_body=options.max_body,
            hosts=[options.host, *options.allowed_hosts],
            sampling=default_sampling(options.model.model),
            cors=options.cors,
        )
        server = Server(api, options.drain)
        server.on_signals()
        url = url_of(listener)
        print(f"{name} at {url}/v1", flush=True)
        print(f"schedule page at {url}/", flush=True)
        gc.collect()
        gc.freeze()  # a search for garbage takes a moment: it leaves out what is loaded
        server.run(sockets=[listener])
    if not thread.answers(within_s=STEP_S):  # or the process would wait for it for ever
        print("error: a step of the engine does not end", file=sys.stderr, flush=True)
        os._exit(1)


def url_of(listener: socket.socket) -> str:
    """The URL of what listens at a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    run(main)
