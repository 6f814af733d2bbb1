"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated. Several (`--prompt` more than once, or `--prompt-file` with one prompt in
each line) share batches, and each is printed when it is done. Without `--model` the weights are random and the text
is noise: bytes in, bytes out.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import checkpoint
import cli
from engine import Engine
from model import DTYPES, GPT, PRESETS, GPTConfig
from sampling import SamplingParams
from scheduler import POLICIES
from tokenizer import byte_tokenizer, load_tokenizer


def parse_args(argv=None):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = cli.OptionParser(description=__doc__.split("\n\n")[0])
    parser.add("--model", "a checkpoint: a local directory or a Hugging Face Hub name", shown="random weights")
    parser.add("--preset", "without a checkpoint: a geometry with random weights", shown="llama-160m", choices=PRESETS)
    parser.add("--prompt", "text to continue; may be given several times", [], shown="none", action="append")
    parser.add("--prompt-file", "a file with one prompt in each line, in UTF-8", shown="none")
    parser.add("--max-new-tokens", "the most tokens to generate for each prompt", 100, type=int)
    parser.add("--temperature", "0 takes the likeliest token", 0.8, type=float)
    parser.add("--top-k", "sample from the k likeliest tokens; 0: from all", 0, shown="0", type=int)
    parser.add("--top-p", "sample from the likeliest tokens that make up this probability", 1.0, type=float)
    parser.add("--seed", "of the first prompt's random numbers; the next has the next", 0, shown="0", type=int)
    parser.add("--policy", "who is computed when", "sarathi-serve", choices=POLICIES)
    parser.add("--chunk", "chunk size or token budget, in tokens", 256, type=int)
    parser.add("--max-batch", "the most prompts at once", 16, type=int)
    parser.add("--device", "where to run: cpu, cuda, cuda:1, ...", "cuda" if torch.cuda.is_available() else "cpu")
    parser.add("--dtype", "of weights and cache", choices=DTYPES, shown="bfloat16 on CUDA, else float32")
    args = parser.parse_args(argv)
    if args.model and args.preset:
        parser.error("--model and --preset: give one of them")
    if args.prompt_file:
        try:
            text = Path(args.prompt_file).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--prompt-file {args.prompt_file}: {error}")
        args.prompt += [line for line in text.split("\n") if line.strip()]
    if not args.prompt:
        parser.error("--prompt or --prompt-file: give at least one prompt")
    return args


def load(args):
    """The model and its tokenizer."""
    device = cli.find_device(args.device)
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    if args.model is None:
        preset = args.preset or "llama-160m"
        print(f"# no --model: {preset} with random weights, the text will be noise", file=sys.stderr)
        return GPT(GPTConfig.preset(preset), device, dtype), byte_tokenizer()
    directory = checkpoint.find(args.model)
    tokenizer = load_tokenizer(directory)  # first: it is quick, and may be what is missing
    return GPT.from_pretrained(directory, device, dtype), tokenizer


def main(argv=None):
    """The command line."""
    args = parse_args(argv)
    params = SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    model, tokenizer = load(args)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    max_len = max(len(prompt) for prompt in prompts) + args.max_new_tokens
    engine = Engine(model, args.policy, args.chunk, min(args.max_batch, len(prompts)), max_len, tokenizer=tokenizer)
    ids = [engine.add_request(prompt, replace(params, seed=args.seed + i)) for i, prompt in enumerate(prompts)]
    if len(prompts) == 1:
        stream(engine, args.prompt[0], prompts[0])
        return
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
    cli.run(main)
