"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated, several (`--prompt` more than once) share batches. Without
`--model` the weights are random and the text is noise.
"""

import sys

from experiments.console import run


def parse_args(argv):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from experiments.options import DTYPES, OptionParser, number, whole
    from policies import POLICIES
    from pretrained.presets import PRESETS

    parser = OptionParser(prog="sample.py", description="Text in, text out.")
    add, policies = parser.add, ", ".join(POLICIES)
    checkpoint = dict(dest="init_from", metavar="MODEL", shown="random weights")
    presets = dict(dest="model", choices=PRESETS, metavar="NAME", shown="llama-160m")
    add("--model", "a checkpoint: a directory or a Hugging Face Hub name", **checkpoint)
    add("--preset", f"instead, with random weights: {', '.join(PRESETS)}", **presets)
    add("--prompt", "text to continue; may be repeated", action="append", required=True)
    add("--max-new-tokens", "the most tokens to generate for each prompt", 100, type=whole(1))
    add("--temperature", "0 takes the likeliest token", 0.8, type=number(least=0))
    add("--top-k", "sample from the k likeliest tokens; 0: from all", 0, type=whole(0))
    top_p = number(above=0, most=1)
    add("--top-p", "sample from the likeliest that make up this probability", 1.0, type=top_p)
    add("--seed", "of weights and the first prompt; the next has the next", 0, type=whole(0))
    add("--policy", f"who is computed when: {policies}, or FILE.py:Class", "sarathi-serve")
    add("--chunk", "chunk size or token budget, in tokens", 256, type=whole(1))
    add("--max-batch", "the most prompts at once", 16, type=whole(1))
    add("--device", "where to run: cpu, cuda, cuda:1, ...", shown="cuda if there is one")
    add("--dtype", "of weights and cache", choices=DTYPES, shown="bfloat16 on CUDA, else float32")
    parser.set_defaults(attention="auto", compile=False, threads=None)
    args = parser.parse_args(argv)
    if args.init_from and args.model:
        parser.error("--model and --preset: give one of them")
    return args


def main(argv=None):
    """The command line."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    import torch

    from engine import Engine
    from experiments.options import load_model
    from policies import find_policy
    from pretrained import checkpoints
    from pretrained.tokenizers import byte_tokenizer, load_tokenizer
    from sampling import SamplingParams

    find_policy(args.policy)  # what is quick goes first: it may be what is wrong
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.init_from:
        args.init_from = checkpoints.find(args.init_from)
        tokenizer = load_tokenizer(args.init_from)
    else:
        tokenizer, name = byte_tokenizer(), args.model or "llama-160m"
        print(f"# no --model: {name} with random weights, the text will be noise", file=sys.stderr)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    max_len = args.max_new_tokens_with_prompt = max(map(len, prompts)) + args.max_new_tokens
    model = load_model(args, "max_new_tokens_with_prompt", gpu_model="llama-160m")
    sizes = dict(chunk=args.chunk, max_batch=min(args.max_batch, len(prompts)), max_len=max_len)
    engine = Engine(model, tokenizer=tokenizer, policy=args.policy, **sizes)
    given = args.max_new_tokens, args.temperature, args.top_k, args.top_p
    params = [SamplingParams(*given, seed=args.seed + i) for i in range(len(prompts))]
    if len(prompts) > 1:
        for text, completion in zip(args.prompt, engine.generate(prompts, params)):
            print(f"--- {text}{completion.text}")
        return
    decoder = tokenizer.stream()
    for token in prompts[0]:
        decoder.push(token)  # it decides on the space before the first new word
    print(args.prompt[0], end="", flush=True)
    engine.add_request(prompts[0], params[0])
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason != "stop":
                print(decoder.push(event.token), end="", flush=True)
    print(decoder.flush())


if __name__ == "__main__":
    run(main)
