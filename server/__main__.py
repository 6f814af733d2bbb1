"""An OpenAI-compatible server.

    python -m server --model smollm2 --policy sarathi-serve --chunk 256 --port 8000

Without --model the weights are random and the text is noise. Read first: README.md, options.py,
app.py."""

from __future__ import annotations

import gc
import os
import sys
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

    from cli.loading import find_tokenizer
    from server import app
    from server.engine_thread import EngineThread

    tokenizer, resolved = find_tokenizer(model_options)
    load = partial(load_engine, options, engine_options, resolved)
    if int(os.environ.get("RANK", 0)):
        load()  # carries out the commands of rank 0, and never returns
    config = uvicorn.Config(
        "",  # comes when the model is loaded
        options.host,
        options.port,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_S,
        ws="none",
    )
    with config.bind_socket() as listener:
        name = options.served_model_name or model_options.name
        thread = EngineThread(load, tokenizer, name, default_sampling(resolved.model))
        hosts = [options.host, *options.allowed_host]
        config.app = app.make_app(thread, options.api_key, hosts, options.cors)
        gc.freeze()  # a search for garbage takes a moment: it leaves out what is loaded
        listener.listen()
        port = listener.getsockname()[1]
        print(f"{name} at port {port} of {options.host}: /v1, schedule page at /", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def load_engine(
    options: ServerOptions, engine_options: EngineOptions, model_options: ModelOptions
) -> Engine:
    """The engine of these options, warmed up."""
    from cli.loading import load_model, make_engine
    from runtime.memory import MAX_LEN, small_page_size

    model = load_model(model_options, options.max_len or 1, positions_from="--max-len")
    page_size = small_page_size(options.max_len or MAX_LEN, model.device)
    engine = make_engine(
        engine_options,
        model,
        model_options.attention,
        max_len=options.max_len,
        page_size=options.page_size or page_size,
        pages=options.pages,
        max_waiting=options.max_waiting,
        policy_options={"tbt_slo": options.tbt_slo} if options.tbt_slo else {},
    )
    print(f"# {model.dtype} on {model.device}, warming up", file=sys.stderr, flush=True)
    engine.warm_up()
    return engine


def default_sampling(model: str | None) -> SamplingParams:
    """How a text is sampled if the client says nothing: OpenAI's defaults, or a checkpoint's."""
    from pretrained.tokenizers import generation_config
    from server.engine_thread import OPENAI_SAMPLING

    if model is None:
        return OPENAI_SAMPLING
    config = generation_config(model)
    values = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
    recommended = {name: value for name, value in values.items() if value is not None}
    return replace(OPENAI_SAMPLING, **recommended)


def main() -> None:
    """The command line of this process."""
    app(exit_on_error=False, print_error=False)


if __name__ == "__main__":
    run(main)
