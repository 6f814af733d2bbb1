"""The options of sample.py. Read first: options.py, loading.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.loading import EngineOptions, add_model_options, model_options
from cli.options import OptionParser, from_args, nonempty_text, number, option, whole
from sampling import SamplingParams

DTYPE = "float32"  # as of GPT and GPT.from_pretrained


@dataclass(frozen=True, kw_only=True)
class SampleOptions(EngineOptions):
    """All that the command line says."""

    prompts: list[str] = option(
        "text to continue; may be repeated",
        name="--prompt",
        action="append",
        default=[],
        default_text="none, if there is a --chat",
    )
    chats: list[str] = option(
        "what to say to a chat model, in its template; may be repeated",
        name="--chat",
        type=nonempty_text,
        action="append",
        default=[],
        default_text="none",
    )
    max_new_tokens: int = option(
        "the most tokens to generate for each prompt", type=whole(minimum=1), default=100
    )
    temperature: float = option(
        "0 takes the likeliest token",
        type=number(minimum=0),
        default=SamplingParams.temperature,
    )
    top_k: int = option(
        "sample from the k likeliest tokens; 0: from all",
        type=whole(minimum=0),
        default=SamplingParams.top_k,
    )
    top_p: float = option(
        "sample from the likeliest that make up this probability",
        type=number(above=0, maximum=1),
        default=SamplingParams.top_p,
    )


def parse_args(argv: Sequence[str] | None) -> SampleOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = OptionParser(prog="sample.py", description="Text in, text out.")
    parser.add_fields(SampleOptions)
    add_model_options(parser, "llama-160m", default_dtype=DTYPE)
    args = parser.parse_args(argv)
    if not args.prompts and not args.chats:
        parser.error("one of these is required: --prompt, --chat")
    return from_args(SampleOptions, args, model=model_options(args))
