"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated, several (`--prompt` more than once) share batches. Without
`--model` the weights are random and the text is noise. What is not told is as in the Python API:
float32, and the likeliest token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))  # where python -P does not look

from cli.console import run

if TYPE_CHECKING:
    from cli.loading import ModelOptions

DTYPE = "float32"  # as of GPT and GPT.from_pretrained


@dataclass(frozen=True)
class SampleOptions:
    """All that the command line says."""

    prompts: list[str]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    policy: str
    chunk: int
    max_batch: int
    prefix_caching: bool
    model: ModelOptions


def parse_args(argv: Sequence[str] | None) -> SampleOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from cli.loading import add_engine_options, add_model_options, model_options
    from cli.options import OptionParser, number, whole
    from sampling import SamplingParams

    parser = OptionParser(prog="sample.py", description="Text in, text out.")
    parser.add_option(
        "--prompt",
        help="text to continue; may be repeated",
        action="append",
        required=True,
    )
    parser.add_option(
        "--max-new-tokens",
        help="the most tokens to generate for each prompt",
        type=whole(minimum=1),
        default=100,
    )
    parser.add_option(
        "--temperature",
        help="0 takes the likeliest token",
        type=number(minimum=0),
        default=SamplingParams.temperature,
    )
    parser.add_option(
        "--top-k",
        help="sample from the k likeliest tokens; 0: from all",
        type=whole(minimum=0),
        default=SamplingParams.top_k,
    )
    parser.add_option(
        "--top-p",
        help="sample from the likeliest that make up this probability",
        type=number(above=0, maximum=1),
        default=SamplingParams.top_p,
    )
    add_engine_options(parser)
    add_model_options(parser, "llama-160m", default_dtype=DTYPE)
    args = parser.parse_args(argv)
    return SampleOptions(
        prompts=args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        policy=args.policy,
        chunk=args.chunk,
        max_batch=args.max_batch,
        prefix_caching=args.prefix_caching,
        model=model_options(args),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Prompt i, counted from 0, is continued with the seed --seed + i."""
    options = parse_args(argv)
    from cli.loading import find_text_model, load_model
    from errors import refusing
    from parallel import engine_for
    from pretrained.tokenizers import TextStream, Writer
    from sampling import SamplingParams

    where = f"{options.model.dtype} on {options.model.device}"
    how = f"temperature {options.temperature:g}, top-k {options.top_k}, top-p {options.top_p:g}"
    text_model = find_text_model(options.model, f"{where}, {how}")
    tokenizer = text_model.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in options.prompts]
    max_len = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    model = load_model(text_model.options, max_len, positions_from="max-new-tokens-with-prompt")
    engine = engine_for(model)(
        model,
        tokenizer=tokenizer,
        policy=options.policy,
        chunk=options.chunk,
        max_batch=min(options.max_batch, len(prompts)),
        max_len=max_len,
        attention=options.model.attention,
        prefix_caching=options.prefix_caching,
    )
    params = [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.model.seed + i,
        )
        for i in range(len(prompts))
    ]
    if len(prompts) > 1:
        completions = engine.generate(prompts, params)
        for prompt, completion in zip(options.prompts, completions, strict=True):
            print(f"--- {prompt}{completion.error or completion.text}")
        return

    writer = Writer(TextStream(tokenizer, prompts[0]), stops=[])
    print(options.prompts[0], end="", flush=True)
    engine.add_request(prompts[0], params[0])
    while engine.has_work:
        for event in engine.step():
            with refusing("the tokenizer failed"):
                text, _ = writer.push(event)
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    run(main)
