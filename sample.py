"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"
    python sample.py --model smollm2 --chat "Why is the sky blue?"

One text streams as it is generated. Several (`--prompt` or `--chat` more than once) share batches,
and stream side by side in a terminal. Without `--model` the weights are random and the text is
noise. What is not told is as in the Python API: float32, and the likeliest token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))  # where python -P does not look

from cli.console import run

if TYPE_CHECKING:
    from cli.sample_options import SampleOptions


def parse_args(argv: Sequence[str] | None) -> SampleOptions:
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from cli import sample_options

    return sample_options.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Prompt i, counted from 0, is continued with the seed --seed + i."""
    options = parse_args(argv)
    from cli.columns import Columns
    from cli.loading import find_tokenizer, load_model
    from sampling import SamplingParams

    sampling = f"temperature {options.temperature:g}, top-k {options.top_k}, top-p"
    computed = f"{options.model.dtype} on {options.model.device}, {sampling} {options.top_p:g}"
    tokenizer, model_options = find_tokenizer(options.model, computed)
    prompts = [tokenizer.encode(prompt) for prompt in options.prompts]
    for chat in options.chats:
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": chat}]))
    titles = [*options.prompts, *options.chats]
    texts = [*options.prompts, *("" for _ in options.chats)]
    max_len = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    model = load_model(model_options, max_len, positions_from="max-new-tokens-with-prompt")
    max_batch = min(options.max_batch, len(prompts))
    engine = options.make_engine(model, tokenizer=tokenizer, max_len=max_len, max_batch=max_batch)
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
    are_several = len(prompts) > 1
    columns = Columns(titles)
    if not are_several:
        print(texts[0], end="", flush=True)
    for event in engine.stream(prompts, params):
        if are_several:
            texts[event.request.id] += event.text
            columns.draw(texts)
        else:
            print(event.text, end="", flush=True)
    if not are_several:
        print()
    elif not columns.are_shown:
        heads = [*("" for _ in options.prompts), *(f"{chat}\n" for chat in options.chats)]
        for head, text in zip(heads, texts, strict=True):
            print(f"--- {head}{text}")


if __name__ == "__main__":
    run(main)
