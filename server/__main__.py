"""An OpenAI-compatible server.

    python -m server --model path/or/hub-name --policy sarathi-serve --chunk 256 --port 8000

Without --model the weights are random and the text is noise. Read next: README.md, app.py."""

import os
import signal
import socket
from functools import partial

from cli.console import run


def parse_args(argv):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from cli.loading import add_engine_options, add_model_options
    from cli.options import OptionParser

    parser = OptionParser(prog="python -m server", description="An OpenAI-compatible server.")
    parser.add_table("server")
    add_engine_options(parser)
    parser.set_defaults(api_key=os.environ.get("NANOSARATHI_API_KEY"))
    add_model_options(parser, "llama-160m", geometry="--preset", checkpoint="--model")
    return parser.parse_args(argv)


def make_engine(args):
    """The engine.Engine of these options."""
    from cli.options import engine_for, load_model

    names = "policy chunk max_batch prefix_caching max_len pages max_waiting attention"
    settings = {name: its for name in names.split() if (its := getattr(args, name)) is not None}
    settings["page_size"] = args.page_size or min(64, -(-(args.max_len or 2048) // 2))
    if args.tbt_slo is not None:
        settings["policy_options"] = {"tbt_slo": args.tbt_slo}
    model = load_model(args, "max_len")
    engine = engine_for(model)(model, **settings)
    engine.warm_up()
    return engine


def main(argv=None):
    """The command line."""
    args = parse_args(argv)
    import uvicorn

    from cli.options import find_texts, load_model
    from pretrained.tokenizers import load_chat
    from server.app import Api
    from server.engine_thread import EngineThread

    name, tokenizer = find_texts(args)
    if int(os.environ.get("RANK", 0)):
        load_model(args, "max_len")  # and do as rank 0 says
    if args.api_key == "":
        raise ValueError("--api-key, NANOSARATHI_API_KEY: must not be empty")
    chat = load_chat(args.init_from)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    on_signals = lambda do: [signal.signal(its, do) for its in (signal.SIGINT, signal.SIGTERM)]
    with socket.create_server((args.host, args.port), family=family) as listener:
        on_signals(signal.SIG_DFL)  # the end: the engine's thread cannot be interrupted
        thread = EngineThread(partial(make_engine, args))
        api = Api(thread, tokenizer, name, chat, args.api_key, args.max_body)
        how = dict(access_log=False, log_level="error", timeout_graceful_shutdown=args.drain)
        server = uvicorn.Server(uvicorn.Config(api.app(), **how))
        on_signals(server.handle_exit)
        print("{} at http://{}:{}/v1".format(name, *listener.getsockname()), flush=True)
        server.run(sockets=[listener])


if __name__ == "__main__":
    run(main)
