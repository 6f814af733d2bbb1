"""Engines of others and the same requests: `python -m tests.compare_engines --against openvino`.

Prints the tokens per second of each, in turns with ours. The random weights of llama-160m or of
--model are saved, for all to load. Read next: other_engines.py.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from cli import options
from cli.console import run
from engine import Engine
from lab.commands import offline
from lab.measure import timing as measure
from lab.measure.workload import Arrival, prompts
from model import GPTConfig
from pretrained import checkpoints
from pretrained.presets import PRESETS
from sampling import SamplingParams
from views.tables import markdown

ENGINES = {"transformers": "transformers", "openvino": "openvino_genai"}  # name: what it needs
FIND = "import sys, importlib.util as its; sys.exit(not its.find_spec(sys.argv[1]))"
OURS = ("sarathi-serve", "vllm")
HELP = f"engines that serve the requests too, comma-separated, of {', '.join(ENGINES)} (packages "
HELP += "openvino-genai, optimum-intel), required; openvino=/its/bin/python where another has them"


def opponents(text):
    """The type of --against: {engine: the Python that has its packages}."""
    found = {}
    for name, _, python in (word.strip().partition("=") for word in text.split(",")):
        if name not in ENGINES:
            raise ArgumentTypeError(f"{name!r}: must be one of {', '.join(ENGINES)}")
        found[name] = python or sys.executable
        find = [shutil.which(found[name]), "-c", FIND, ENGINES[name]]
        if not find[0] or subprocess.run(find).returncode:
            raise ArgumentTypeError(f"{name}: {found[name]} is no Python with {ENGINES[name]}")
    return found


def parse_args(words):
    """The options. Exits with a message if these make no sense, or if the random weights of such a
    model cannot be saved for the engines of --against."""
    what = "Serve the same requests, in whole batches, with our engine and others, in turns."
    parser = options.OptionParser(prog="python -m tests.compare_engines", description=what)
    parser.add_argument("--against", help=HELP, required=True, metavar="ENGINES", type=opponents)
    offline.add_load_options(parser)
    options.add_json_option(parser)
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")
    args = parser.parse_args(words)
    args.load = offline.resolve_load(parser, args)
    args.requests = args.load.requests
    args.pd_ratio = args.load.pd_ratio
    c = GPTConfig.preset(args.model if args.model in PRESETS else "llama-160m")
    if c.family != "llama" or c.qkv_bias or c.qk_norm or c.rope_scaling:
        parser.error(f"--against: random weights like those of {args.model} cannot be saved")
    return args


def against(model, prompt_len, args):
    """Serve prompts with sarathi-serve, with vllm and with the engines of args.against, in turns:
    the same weights (random ones are made anew), B, dtype and threads; whole batches of requests of
    prompt_len + output = seq_len tokens, greedy; openvino on the CPU. {"engine, policy": row}: all
    tokens per second; how many times that ours give; the share of equal output; whether busy."""
    output, B, serves, texts = args.seq_len - prompt_len, args.batch, {}, {}
    arrivals = [Arrival(0.0, prompt_len, output)] * max(B, args.requests // B * B)
    tokens = prompts(arrivals, model.config.vocab_size, args.seed)
    limits = dict(max_batch=B, max_len=args.seq_len, chunk=args.chunk, attention=args.attention)
    with ExitStack() as stack:
        new_folder = lambda: stack.enter_context(TemporaryDirectory())
        if not args.init_from:
            args = Namespace(**vars(args) | {"init_from": new_folder(), "model": None})
            save_random(model.config, args)
            model = options.load_model(args, "seq_len")
        for policy in OURS:
            engine = Engine(model, policy=policy, **limits)
            serve = partial(engine.generate, tokens, SamplingParams(output), progress=False)
            serves[f"ours, {policy}"] = lambda serve=serve: [done.tokens for done in serve()]
        stall_free, first = serves
        job = vars(args) | dict(prompts=tokens, output=output, threads=torch.get_num_threads())
        job["checkpoint"] = str(checkpoints.find(args.init_from))
        for name, python in args.against.items():
            policies, ask = start(stack, python, job | dict(engine=name, folder=new_folder()))
            serves |= {f"{name}, {policy}": partial(ask, policy) for policy in policies}
        runs = {key: lambda key=key: texts.update({key: serves[key]()}) for key in serves}
        time_all = partial(measure.interleaved, runs, model.device, repeats=3, title="engines")
        timings, drift = measure.steadily(time_all, model.device, tries=1)
    rows = {}
    for key, timing in timings.items():
        pairs = [pair for both in zip(texts[key], texts[stall_free]) for pair in zip(*both)]
        rows[key] = {
            "tokens_per_s": len(tokens) * args.seq_len / timing.ms * 1e3,
            "sarathi_serve_gain": timing.ms / timings[stall_free].ms,
            "vllm_gain": timing.ms / timings[first].ms,
            "equal_tokens": fmean(a == b for a, b in pairs),
            "busy": max(drift, timing.spread) > measure.BUSY,
        }
    return rows


def start(stack, python, job):
    """Start other_engines.py until the ExitStack closes: its first answer, and what asks it more.
    Raises ChildProcessError with its last words if it has ended."""
    log, program = Path(job["folder"], "log"), Path(__file__).with_name("other_engines.py")
    errors, pipe = stack.enter_context(log.open("w")), subprocess.PIPE
    process = subprocess.Popen([python, program], -1, None, pipe, pipe, errors, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)

    def ask(line):
        try:
            process.send_signal(signal.SIGCONT)
            print(line, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGSTOP)  # its idle threads spin, while others are timed
            return answer
        except (OSError, ValueError) as error:
            last = log.read_text().strip().split("\n")[-1]
            raise ChildProcessError(f"--against {job['engine']}: {last}") from error

    return ask(json.dumps(job)), ask


def save_random(config, args):
    """Save a LLaMA of this geometry with random weights in the folder args.init_from."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    fields = {f.alias or name: name for name, f in checkpoints.ModelFile.model_fields.items()}
    own = {alias: getattr(config, name) for alias, name in fields.items() if hasattr(config, name)}
    torch.manual_seed(args.seed)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**own))
    theirs.to(getattr(torch, args.dtype)).save_pretrained(args.init_from)


def print_against(rows, prompt_len, args):
    """The table of what `against` returned."""
    print(
        f"Engines of others: same weights, {args.dtype}, batches of {args.batch} requests of "
        f"{prompt_len} + {args.seq_len - prompt_len} tokens,\nchunk {args.chunk}; medians of 3\n"
    )
    columns = {"engine, policy": "", "tokens/s": ",.0f", "ours, sarathi-serve": ".2fx"}
    columns |= {"ours, vllm": ".2fx", "equal tokens": ".0%"}
    print(markdown(columns, [[measure.mark(n, r["busy"]), *r.values()] for n, r in rows.items()]))
    print("\nours: over the tokens/s of that engine; equal to sarathi-serve's, but for rounding")


def main(argv=None):
    """The command line, whose words are `argv`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    began, model = time.perf_counter(), options.load_model(args, "seq_len")
    machine = measure.describe_machine(model, args, args.chunk)
    print(options.machine_lines(machine))
    prompt_len = args.load.prompt_len
    rows = against(model, prompt_len, args)
    print_against(rows, prompt_len, args)
    seconds = time.perf_counter() - began
    print(f"\ntook {seconds:.0f} s")
    del args.load
    options.write_json(args, {"machine": machine, "against": rows, "seconds": seconds})
    options.wrote(args.json)


if __name__ == "__main__":
    run(main)
