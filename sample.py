"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"
    python sample.py --model smollm2 --chat "Why is the sky blue?"

One text streams as it is generated. Several (`--prompt` or `--chat` more than once) share batches,
and stream side by side in a terminal. Without `--model` the weights are random and the text is
noise. What is not told is as in the Python API: float32, and the likeliest token."""

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from cyclopts.validators import Number

from cli.console import make_app, run, visible
from cli.model import EngineOptions, ModelOptions

app = make_app("sample.py", "Text in, text out.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What to write, and how."""

    prompt: tuple[str, ...] = ()
    """Text to continue; may be repeated."""
    chat: tuple[str, ...] = ()
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

    model_options = resolve_model(replace(model_options, dtype=model_options.dtype or "float32"))
    print(f"# {model_options.dtype} on {model_options.device}", file=sys.stderr)
    tokenizer, model_options = find_tokenizer(model_options)
    prompts = [tokenizer.encode(prompt) for prompt in options.prompt]
    for chat in options.chat:
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": chat}]))
    max_len = max(map(len, prompts)) + options.max_new_tokens
    engine = make_engine(
        engine_options,
        load_model(model_options, max_len, positions_from="max-new-tokens-with-prompt"),
        model_options.attention,
        tokenizer=tokenizer,
        max_len=max_len,
        max_batch=min(engine_options.max_batch, len(prompts)),
    )
    params = [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=model_options.seed + number,
        )
        for number in range(len(prompts))
    ]
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


if __name__ == "__main__":
    run(app)
