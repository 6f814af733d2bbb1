"""Text in, text out.

    python sample.py --model path/or/hub-name --prompt "Once upon a time"

One prompt streams as it is generated, several (`--prompt` more than once) share batches. Without
`--model` the weights are random and the text is noise."""

from cli.console import run


def parse_args(argv):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    from cli.options import OptionParser

    parser = OptionParser(prog="sample.py", description="Text in, text out.")
    parser.add_table("sample", "engine")
    parser.add_model_options("llama-160m", names="engine_names")
    return parser.parse_args(argv)


def main(argv=None):
    """The command line. Prompt i, counted from 0, is continued with the seed --seed + i."""
    args = parse_args(argv)
    from cli.options import engine_for, find_texts, load_model
    from pretrained.tokenizers import TextStream, Writer
    from sampling import SamplingParams

    _, tokenizer = find_texts(args)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    max_len = args.max_new_tokens_with_prompt = max(map(len, prompts)) + args.max_new_tokens
    model = load_model(args, "max_new_tokens_with_prompt")
    sizes = dict(chunk=args.chunk, max_batch=min(args.max_batch, len(prompts)), max_len=max_len)
    more = dict(policy=args.policy, attention=args.attention, prefix_caching=args.prefix_caching)
    engine = engine_for(model)(model, tokenizer=tokenizer, **sizes, **more)
    given = args.max_new_tokens, args.temperature, args.top_k, args.top_p
    params = [SamplingParams(*given, seed=args.seed + i) for i in range(len(prompts))]
    if len(prompts) > 1:
        for text, completion in zip(args.prompt, engine.generate(prompts, params)):
            print(f"--- {text}{completion.text}")
        return
    writer = Writer(TextStream(tokenizer, prompts[0]), stops=[])
    print(args.prompt[0], end="", flush=True)
    engine.add_request(prompts[0], params[0])
    while engine.has_work:
        for event in engine.step():
            print(writer.push(event)[0], end="", flush=True)
    print()


if __name__ == "__main__":
    run(main)
