"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated. Several (`--prompt` more than once, or `--prompt-file` with one prompt in
each line) share batches, and each is printed when it is done. Without `--model` the weights are random and the text
is noise: bytes in, bytes out.
"""

import argparse
import sys

import torch

import checkpoint
from bench import DTYPES
from engine import Engine
from model import GPT, PRESETS, GPTConfig
from sampling import SamplingParams
from scheduler import POLICIES
from tokenizer import byte_tokenizer, load_tokenizer


def parse_args(argv=None):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default=None, help="a checkpoint: a local directory or a Hugging Face Hub name")
    add("--preset", default="llama-160m", choices=PRESETS, help="without --model: a geometry with random weights")
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    add("--prompt-file", default=None, help="a file with one prompt in each line")
    add("--max-new-tokens", type=int, default=100, help="the most tokens to generate for each prompt")
    add("--temperature", type=float, default=0.8, help="0 for the likeliest token")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 for all")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens that make up this probability")
    add("--seed", type=int, default=0, help="of the random numbers")
    add("--policy", default="sarathi-serve", choices=POLICIES, help="who is computed when")
    add("--chunk", type=int, default=256, help="chunk size or token budget")
    add("--max-batch", type=int, default=16, help="the most prompts at once")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    add("--dtype", default=None, choices=DTYPES, help="none: bfloat16 on CUDA, else float32")
    args = parser.parse_args(argv)
    if args.prompt_file:
        try:
            with open(args.prompt_file, encoding="utf-8") as file:
                args.prompt += [line for line in file.read().splitlines() if line]
        except OSError as error:
            parser.error(f"--prompt-file {args.prompt_file}: {error.strerror}")
    if not args.prompt:
        parser.error("--prompt or --prompt-file: give at least one prompt")
    return args


def load(args):
    """The model and its tokenizer."""
    dtype = DTYPES[args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")]
    if args.model is None:
        print(f"# no --model: {args.preset} with random weights, the text will be noise", file=sys.stderr)
        return GPT(GPTConfig.preset(args.preset), args.device, dtype), byte_tokenizer()
    directory = checkpoint.find(args.model)
    tokenizer = load_tokenizer(directory)  # first: it is quick, and may be what is missing
    return GPT.from_pretrained(directory, args.device, dtype), tokenizer


def main(argv=None):
    """The command line."""
    args = parse_args(argv)
    try:
        params = SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
        model, tokenizer = load(args)
        prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
        max_len = max(len(prompt) for prompt in prompts) + args.max_new_tokens
        engine = Engine(model, args.policy, args.chunk, min(args.max_batch, len(prompts)), max_len, tokenizer=tokenizer)
        if len(prompts) == 1:
            stream(engine, args.prompt[0], prompts[0], params)
        else:
            for text, completion in zip(args.prompt, engine.generate(prompts, params)):
                print(f"--- {text}\n{text}{completion.text}")
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error


def stream(engine, text, prompt, params):
    """Print a prompt and its continuation, token by token."""
    print(text, end="", flush=True)
    decoder = engine.tokenizer.stream()
    engine.add_request(prompt, params)
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason != "stop":
                print(decoder.push(event.token), end="", flush=True)
    print(decoder.flush())


if __name__ == "__main__":
    main()
