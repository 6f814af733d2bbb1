"""The stall, in words: `python -m examples.stall`, in the top folder.

Three answers are being written when a prompt of 1,000 tokens arrives, README.md. Under "vllm" they
freeze until it is computed, under "sarathi-serve" they go on. `--svg stall.svg` draws both."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from cli.columns import Columns
from cli.console import run
from engine import Engine
from examples.terminals import Answer, LatePrompt, Terminal, Word, animate
from model import GPT
from pretrained.streams import TextStream
from pretrained.tokenizers import Tokenizer, load_tokenizer
from request import Request
from sampling import SamplingParams

QUESTIONS = ["Why is the sky blue?", "How do bicycles stay upright?", "What is a black hole?"]
README = Path(__file__).parents[1] / "README.md"
LATE = "(README.md goes on)"
PARAMS = SamplingParams(max_new_tokens=400, temperature=0.0)


def write(engine: Engine, prompts: list[list[int]], tokenizer: Tokenizer) -> list[Request]:
    """Write all answers until they have 56 tokens and the last, whose prompt arrives late, 8."""
    ids = [engine.add_request(prompt, PARAMS) for prompt in prompts[:-1]]
    outputs: list[list[int]] = [[] for _ in prompts]
    with Columns([*QUESTIONS, LATE]) as columns:
        while len(outputs[-1]) < 8 or len(outputs[0]) < 56:
            if len(ids) < len(prompts) and len(outputs[0]) > 12:  # all run
                ids.append(engine.add_request(prompts[-1], PARAMS))
            for event in engine.step():
                outputs[ids.index(event.request.id)].append(event.token)
            columns.draw([tokenizer.decode(output) for output in outputs])
    return [engine.abort(request_id) for request_id in ids]


def terminal(completions: list[Request], tokenizer: Tokenizer) -> Terminal:
    """What is drawn of a policy's answers, the last of which came late."""
    start = completions[0].arrival
    answers = []
    for question, completion in zip(QUESTIONS, completions[:-1], strict=True):
        stream = TextStream(tokenizer)
        times = [time - start for time in completion.token_times]
        texts = [stream.push(token) for token in completion.output]
        answers.append(Answer(question, list(map(Word, times, texts))))
    late = completions[-1]
    name = f"a prompt of {late.prompt_len:,} tokens arrives"
    return Terminal(answers, LatePrompt(name, late.arrival - start, late.token_times[0] - start))


def main(argv: Sequence[str] | None = None) -> None:
    """The same under both policies."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--svg", help="draw both runs, as a moving picture, into this file")
    args = parser.parse_args(argv)
    model = GPT.from_pretrained(args.model)
    tokenizer = load_tokenizer(args.model)
    messages = [{"role": "user", "content": question} for question in QUESTIONS]
    prompts = [tokenizer.encode_chat([message]) for message in messages]
    prompts.append(tokenizer.encode(README.read_text("utf-8"))[:1000])
    terminals = {}
    for policy in ("vllm", "sarathi-serve"):
        engine = Engine(model, policy=policy, chunk=args.chunk, max_batch=4, max_len=2048)
        engine.warm_up()
        completions = write(engine, prompts, tokenizer)
        *answers, late = completions
        freeze = max(gap for answer in answers for gap in answer.tbt)
        print(f"{policy}: longest freeze {freeze:.2f} s, the long prompt waits {late.ttft:.2f} s")
        terminals[policy] = terminal(completions, tokenizer)
    if args.svg:
        animate(terminals, args.svg)


if __name__ == "__main__":
    run(main)
