"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"
    python sample.py --model smollm2 --chat "Why is the sky blue?"

One text streams as it is generated. Several (`--prompt` or `--chat` more than once) share batches,
and stream side by side in a terminal. Without `--model` the weights are random and the text is
noise. What is not told is as in the Python API: float32, and the likeliest token."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from cyclopts.validators import Number

sys.path.insert(0, str(Path(__file__).parent))  # where python -P does not look

from cli.console import make_app, run, visible
from cli.model import EngineOptions, ModelOptions

app = make_app("sample.py", "Text in, text out.")
Texts = Annotated[tuple[str, ...], Parameter(show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What to write, and how."""

    prompt: Texts = ()
    """Text to continue; may be repeated."""
    chat: Texts = ()
    """What to say to a chat model, in its template; may be repeated."""
    max_new_tokens: PositiveInt = 100
    """The most tokens to generate for each prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token."""
    top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0
    """Sample from the likeliest that make up this probability."""


@app.default
def sample(
    options: SampleOptions = SampleOptions(),
    engine_options: EngineOptions = EngineOptions(),
    model_options: ModelOptions = ModelOptions(),
) -> None:
    """Text in, text out. Prompt i, counted from 0, is continued with the seed --seed + i."""
    if not options.prompt and not options.chat:
        raise ValueError("one of these is required: --prompt, --chat")
    from cli.columns import Columns
    from cli.loading import find_tokenizer, load_model, make_engine, resolve_model
    from sampling import SamplingParams

    resolved = resolve_model(replace(model_options, dtype=model_options.dtype or "float32"))
    print(f"# {resolved.dtype} on {resolved.device}", file=sys.stderr)
    tokenizer, resolved = find_tokenizer(resolved)
    prompts = [tokenizer.encode(prompt) for prompt in options.prompt]
    for chat in options.chat:
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": chat}]))
    max_len = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    model = load_model(resolved, max_len, positions_from="max-new-tokens-with-prompt")
    engine = make_engine(
        replace(engine_options, max_batch=min(engine_options.max_batch, len(prompts))),
        model,
        resolved.attention,
        tokenizer=tokenizer,
        max_len=max_len,
    )
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    params = [replace(sampling, seed=resolved.seed + i) for i in range(len(prompts))]
    texts = [*options.prompt, *("" for _ in options.chat)]
    events = engine.stream(prompts, params)
    if len(prompts) == 1:
        print(texts[0], end="", flush=True)
        for event in events:
            print(visible(event.text), end="", flush=True)
        print()
        return
    with Columns([*options.prompt, *options.chat]) as columns:
        for event in events:
            texts[event.request.id] += event.text
            columns.draw(texts)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(argv, exit_on_error=False, print_error=False)


if __name__ == "__main__":
    run(main)
