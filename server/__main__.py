"""An OpenAI-compatible server.

    python -m server --model smollm2 --policy sarathi-serve --chunk 256 --port 8000

Without --model the weights are random and the text is noise. Read first: README.md, options.py,
app.py."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cli.console import make_app, run
from cli.model import EngineOptions, ModelOptions
from server.options import ServerOptions

if TYPE_CHECKING:
    from engine import Engine
    from sampling import SamplingParams

SHUTDOWN_S = 10  # that requests have to finish after a signal
app = make_app("python -m server", "An OpenAI-compatible server.")


@app.default
def serve(
    options: ServerOptions = ServerOptions(),
    engine_options: EngineOptions = EngineOptions(),
    model_options: ModelOptions = ModelOptions(),
) -> None:
    """Load the model, and serve until a signal comes."""
    import uvicorn

    from cli.loading import find_tokenizer, load_model
    from server.app import Api, app_of
    from server.engine_thread import EngineThread

    name = options.served_model_name or model_options.name
    tokenizer, resolved = find_tokenizer(model_options)
    if int(os.environ.get("RANK", 0)):
        load_model(resolved, options.max_len or 1, positions_from="--max-len")
        return  # the commands of rank 0 have ended
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        thread = EngineThread(partial(make_engine, options, engine_options, resolved))
        api = Api(thread, tokenizer, name, default_sampling(resolved.model))
        routes = app_of(api, options.api_key, [options.host, *options.allowed_host], options.cors)
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        print(f"{name} at {url}/v1, schedule page at {url}/", flush=True)
        gc.freeze()  # a search for garbage takes a moment: it leaves out what is loaded
        config = uvicorn.Config(
            routes, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S, ws="none"
        )
        uvicorn.Server(config).run(sockets=[listener])


def make_engine(
    options: ServerOptions, engine_options: EngineOptions, model_options: ModelOptions
) -> Engine:
    """The engine of these options, warmed up."""
    from cli.loading import load_model
    from cli.loading import make_engine as engine_of
    from runtime.memory import MAX_LEN, small_page_size

    model = load_model(model_options, options.max_len or 1, positions_from="--max-len")
    max_len = options.max_len or min(MAX_LEN, model.config.max_positions)
    engine = engine_of(
        engine_options,
        model,
        model_options.attention,
        max_len=max_len,
        page_size=options.page_size or small_page_size(max_len, model.device),
        pages=options.pages,
        max_waiting=options.max_waiting,
        policy_options={"tbt_slo": options.tbt_slo} if options.tbt_slo else {},
    )
    print(f"# {model.dtype} on {model.device}, warming up", file=sys.stderr, flush=True)
    engine.warm_up()
    return engine


def default_sampling(model: str | None) -> SamplingParams:
    """How a text is sampled if the client says nothing: OpenAI's defaults, or a checkpoint's.

    Says on stderr what of a checkpoint's recommendation is not computed."""
    from server.app import OPENAI_SAMPLING

    if model is None:
        return OPENAI_SAMPLING
    from pretrained.tokenizers import generation_config

    config = generation_config(model)
    if config.repetition_penalty not in (None, 1):
        message = f"repetition_penalty={config.repetition_penalty} is not computed here"
        print(f"warning: generation_config.json: {message}", file=sys.stderr, flush=True)
    values = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
    recommended = {name: value for name, value in values.items() if value is not None}
    if recommended.get("top_k") == -1:  # as vLLM says all tokens
        recommended["top_k"] = 0
    return replace(OPENAI_SAMPLING, **recommended)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(argv, exit_on_error=False, print_error=False)


if __name__ == "__main__":
    run(main)
