"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated. Several (`--prompt` more than once, or `--prompt-file` with
one prompt in each line) share batches, and each is printed when it is done. Without `--model` the
weights are random and the text is noise: bytes in, bytes out.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from engine import Engine
from experiments.options import DTYPES, OptionParser, find_device, run
from model import GPT, GPTConfig
from policies import POLICIES, find_policy
from pretrained import checkpoints
from pretrained.presets import PRESETS
from pretrained.tokenizers import byte_tokenizer, load_tokenizer
from sampling import SamplingParams


def parse_args(argv=None):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = OptionParser(description=__doc__.split("\n\n")[0])
    add, device = parser.add, "cuda" if torch.cuda.is_available() else "cpu"
    policies = ", ".join([*POLICIES, "or my_policy.py:ClassName"])
    add("--model", "a checkpoint: a directory or a Hugging Face Hub name", shown="random weights")
    add("--preset", "instead: a geometry, with random weights", shown="llama-160m", choices=PRESETS)
    add("--prompt", "text to continue; may be repeated", [], shown="none", action="append")
    add("--prompt-file", "a file with one prompt in each line, in UTF-8", shown="none")
    add("--max-new-tokens", "the most tokens to generate for each prompt", 100, type=int)
    add("--temperature", "0 takes the likeliest token", 0.8, type=float)
    add("--top-k", "sample from the k likeliest tokens; 0: from all", 0, type=int)
    add("--top-p", "sample from the likeliest that make up this probability", 1.0, type=float)
    add("--seed", "of the first prompt's random numbers; the next has the next", 0, type=int)
    add("--policy", f"who is computed when: {policies}", "sarathi-serve")
    add("--chunk", "chunk size or token budget, in tokens", 256, type=int)
    add("--max-batch", "the most prompts at once", 16, type=int)
    add("--device", "where to run: cpu, cuda, cuda:1, ...", device)
    add("--dtype", "of weights and cache", choices=DTYPES, shown="bfloat16 on CUDA, else float32")
    args = parser.parse_args(argv)
    if args.model and args.preset:
        parser.error("--model and --preset: give one of them")
    try:
        find_policy(args.policy)
    except ValueError as error:
        parser.error(f"--policy: {error}")
    if args.prompt_file:
        try:
            text = Path(args.prompt_file).read_text("utf-8-sig")  # there may be a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompt-file {args.prompt_file}: {error}")
        args.prompt += [line for line in text.split("\n") if line.strip()]
    if not args.prompt:
        parser.error("--prompt or --prompt-file: give at least one prompt")
    return args


def load(args):
    """The model and its tokenizer."""
    device = find_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if args.model is None:
        name = args.preset or "llama-160m"
        print(f"# no --model: {name} with random weights, the text will be noise", file=sys.stderr)
        return GPT(GPTConfig.preset(name), device, dtype), byte_tokenizer()
    directory = checkpoints.find(args.model)
    tokenizer = load_tokenizer(directory)  # first: it is quick, and may be what is missing
    return GPT.from_pretrained(directory, device, dtype), tokenizer


def main(argv=None):
    """The command line."""
    args = parse_args(argv)
    seed, most = args.seed, args.max_new_tokens
    params = SamplingParams(most, args.temperature, args.top_k, args.top_p, seed)
    model, tokenizer = load(args)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    batch, max_len = min(args.max_batch, len(prompts)), max(map(len, prompts)) + most
    settings = dict(policy=args.policy, chunk=args.chunk, max_batch=batch, max_len=max_len)
    engine = Engine(model, tokenizer=tokenizer, **settings)
    ids = [engine.add_request(p, replace(params, seed=seed + i)) for i, p in enumerate(prompts)]
    if len(prompts) == 1:
        return stream(engine, args.prompt[0], prompts[0])
    texts = dict(zip(ids, args.prompt))
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                print(f"--- {texts[event.request_id]}{event.completion.text}", flush=True)


def stream(engine, text, prompt):
    """Print the prompt and, token by token, the continuation of the engine's only request."""
    print(text, end="", flush=True)
    decoder = engine.tokenizer.stream()
    for token in prompt:
        decoder.push(token)  # it decides on the space before the first new word
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason != "stop":
                print(decoder.push(event.token), end="", flush=True)
    print(decoder.flush())


if __name__ == "__main__":
    run(main)
