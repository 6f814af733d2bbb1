"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated. Several (`--prompt` more than once) share batches, and each
is printed when it is done. Without `--model` the weights are random and the text is noise: bytes
in, bytes out.
"""

import sys
from dataclasses import replace

from experiments.console import run


def parse_args(argv):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from experiments.options import DTYPES, OptionParser, number, whole
    from policies import POLICIES, find_policy
    from pretrained.presets import PRESETS

    parser = OptionParser(prog="sample.py", description="Text in, text out.")
    add, policies = parser.add, ", ".join(POLICIES)
    presets = dict(choices=PRESETS, metavar="NAME", shown="llama-160m")
    add("--model", "a checkpoint: a directory or a Hugging Face Hub name", shown="random weights")
    add("--preset", f"instead, with random weights: {', '.join(PRESETS)}", **presets)
    add("--prompt", "text to continue; may be repeated", action="append", required=True)
    add("--max-new-tokens", "the most tokens to generate for each prompt", 100, type=whole(1))
    add("--temperature", "0 takes the likeliest token", 0.8, type=number(least=0))
    add("--top-k", "sample from the k likeliest tokens; 0: from all", 0, type=whole(0))
    likeliest = "sample from the likeliest that make up this probability"
    add("--top-p", likeliest, 1.0, type=number(above=0, most=1))
    add("--seed", "of the first prompt's random numbers; the next has the next", 0, type=whole(0))
    add("--policy", f"who is computed when: {policies}, or FILE.py:Class", "sarathi-serve")
    add("--chunk", "chunk size or token budget, in tokens", 256, type=whole(1))
    add("--max-batch", "the most prompts at once", 16, type=whole(1))
    add("--device", "where to run: cpu, cuda, cuda:1, ...", shown="cuda if there is one")
    add("--dtype", "of weights and cache", choices=DTYPES, shown="bfloat16 on CUDA, else float32")
    args = parser.parse_args(argv)
    if args.model and args.preset:
        parser.error("--model and --preset: give one of them")
    try:
        find_policy(args.policy)
    except ValueError as error:
        parser.error(f"--policy: {error}")
    return args


def load(args):
    """The model and its tokenizer."""
    import torch

    from experiments.options import check_room, find_device
    from model import GPT, GPTConfig
    from pretrained import checkpoints
    from pretrained.tokenizers import byte_tokenizer, load_tokenizer

    device = find_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if args.model is None:
        name = args.preset or "llama-160m"
        print(f"# no --model: {name} with random weights, the text will be noise", file=sys.stderr)
        config = GPTConfig.preset(name)
        check_room(f"--preset {name}", config, dtype, device)
        return GPT(config, device, dtype), byte_tokenizer()
    directory = checkpoints.find(args.model)
    tokenizer = load_tokenizer(directory)  # first: it is quick, and may be what is missing
    check_room(f"--model {args.model}", checkpoints.read_config(directory), dtype, device)
    return GPT.from_pretrained(directory, device, dtype), tokenizer


def main(argv=None):
    """The command line."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    from engine import Engine
    from sampling import SamplingParams

    model, tokenizer = load(args)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    most, longest = args.max_new_tokens, max(map(len, prompts))
    if longest + most > (limit := model.config.max_positions):
        raise ValueError(f"--max-new-tokens {most}: this model is limited to {limit}, with prompts")
    batch, max_len = min(args.max_batch, len(prompts)), longest + most
    settings = dict(policy=args.policy, chunk=args.chunk, max_batch=batch, max_len=max_len)
    engine = Engine(model, tokenizer=tokenizer, **settings)
    params = SamplingParams(most, args.temperature, args.top_k, args.top_p)
    seeded = [replace(params, seed=args.seed + i) for i in range(len(prompts))]
    ids = [engine.add_request(*request) for request in zip(prompts, seeded)]
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
