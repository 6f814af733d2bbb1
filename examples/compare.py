"""Other engines beside this one: `python -m examples.compare`, some minutes on two cores.

Prints the tokens per second (prompt and output) of each engine: the median and the range of its
rounds, and how many of its outputs equal those of our sarathi-serve. All have the same weights and
requests, decode greedily, and have a process of their own. They take turns, so that a slow minute
of the machine is nobody's.

transformers generates batch by batch, as request-level does. openvino-genai is there if it is
installed, with optimum-intel, whose version 2.2 needs a transformers before 5.6: its scheduler is
stall-free or takes prompts first, on the CPU alone, and it computes in float32 where a CPU has no
bfloat16. How fast one person's text appears is
`--batch 1 --requests 1 --prompt 32 --output 128`.

Another engine is one more function, and a line in ENGINES. Read first: offline.py."""

import operator
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from cyclopts import Parameter

from cli.console import make_app, run
from engine import Engine
from model import GPT
from sampling import SamplingParams

app = make_app("python -m examples.compare", str(__doc__).partition("\n\n")[0])
Tokens = list[list[int]]  # of each request


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What all engines do."""

    model: str = ""
    """The directory of a checkpoint; without one the weights are random."""
    dtype: str = "bfloat16"
    """The type of weights and cache."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """As torch names it."""
    chunk: int = 256
    """Token budget of an iteration."""
    batch: int = 6
    """The most requests at once."""
    requests: int = 12
    """How many to serve."""
    prompt: int = 400
    """Tokens of each prompt."""
    output: int = 40
    """Tokens to generate for each."""
    rounds: int = 5
    """Turns of each engine."""

    @property
    def max_len(self) -> int:
        return self.prompt + self.output

    @property
    def prompts(self) -> Tokens:
        draw = random.Random(0)
        return [draw.choices(range(250), k=self.prompt) for _ in range(self.requests)]


Serve = Callable[[], Tokens]  # serves all prompts of a Job, and returns the outputs


def ours(policy: str, job: Job) -> Serve:
    """The engine of this repository."""
    model = GPT.from_pretrained(job.model, job.device, getattr(torch, job.dtype))
    engine = Engine(model, policy=policy, chunk=job.chunk, max_batch=job.batch, max_len=job.max_len)
    params = SamplingParams(max_new_tokens=job.output, temperature=0.0)
    return lambda: [request.output for request in engine.generate(job.prompts, params)]


def transformers(job: Job) -> Serve:
    """`generate` of transformers, in batches."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)
    model.to(job.device)
    model.generation_config = GenerationConfig(max_new_tokens=job.output, pad_token_id=0)
    batches = torch.tensor(job.prompts, device=job.device).split(job.batch)

    def serve() -> Tokens:
        outputs = [model.generate(ids, attention_mask=torch.ones_like(ids)) for ids in batches]
        return torch.cat(outputs)[:, -job.output :].tolist()

    return serve


def openvino(stall_free: bool, job: Job) -> Serve:
    """ContinuousBatchingPipeline of openvino-genai; stall-free is its dynamic split-fuse."""
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]
    from openvino import Tensor  # pyright: ignore[reportMissingImports]
    from optimum.intel import OVModelForCausalLM  # pyright: ignore[reportMissingImports]

    folder = TemporaryDirectory()
    model = OVModelForCausalLM.from_pretrained(job.model, export=True, load_in_8bit=False)
    model.save_pretrained(folder.name)
    config = genai.SchedulerConfig()
    config.dynamic_split_fuse = stall_free
    config.max_num_batched_tokens = job.chunk if stall_free else job.batch * job.max_len
    config.max_num_seqs = job.batch
    config.enable_prefix_caching = False
    config.cache_size = 2  # GB
    precision = job.dtype.replace("float", "f")  # as in "bf16"
    hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = genai.ContinuousBatchingPipeline(folder.name, config, "CPU", hints)
    greedy = genai.GenerationConfig(max_new_tokens=job.output, ignore_eos=True)

    def serve() -> Tokens:
        handles = [
            pipeline.add_request(number, Tensor([prompt]), greedy)
            for number, prompt in enumerate(job.prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return serve


ENGINES: dict[str, Callable[[Job], Serve]] = {
    "sarathi-serve": partial(ours, "sarathi-serve"),
    "vllm": partial(ours, "vllm"),
    "transformers": transformers,
}
if find_spec("openvino_genai"):
    ENGINES["openvino, stall-free"] = partial(openvino, True)
    ENGINES["openvino, prompts first"] = partial(openvino, False)


@cache
def load(name: str, job: Job) -> Serve:
    """The engine of that name, once in each process."""
    return ENGINES[name](job)


class Turn(NamedTuple):
    """What an engine made of the job, once."""

    seconds: float
    outputs: Tokens


def take_turn(name: str, job: Job) -> Turn:
    """Serve the job with the engine of that name, in its process."""
    serve = load(name, job)
    began = time.perf_counter()
    outputs = serve()
    return Turn(time.perf_counter() - began, outputs)


def compare(job: Job) -> dict[str, list[Turn]]:
    """Serve the job with all engines, in turns. The first of each warms it up."""
    turns: dict[str, list[Turn]] = {name: [] for name in ENGINES}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            for name in ENGINES
        }
        for _ in range(1 + job.rounds):
            for name, process in processes.items():
                turns[name].append(process.submit(take_turn, name, job).result())
                time.sleep(0.5)  # until its idle threads do not spin any more
    return turns


def save_random(folder: str) -> None:
    """Save a LLaMA with random weights and the sizes of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@app.default
def print_comparison(job: Job = Job()) -> None:
    """Compare, and print a line for each engine."""
    with TemporaryDirectory() as folder:
        if not job.model:
            save_random(folder)
            job = replace(job, model=folder)
        turns = compare(job)
    reference = turns["sarathi-serve"][0].outputs
    print(f"{'tokens/s':>34}  {'range of rounds':>17}  equal outputs")
    for name, (warm_up, *rounds) in turns.items():
        rates = [job.requests * job.max_len / seconds for seconds, _ in rounds]
        limits = f"{min(rates):,.0f} to {max(rates):,.0f}"
        equal = sum(map(operator.eq, warm_up.outputs, reference))
        print(f"{name:<26}{median(rates):8,.0f}  {limits:>17}  {equal} of {job.requests}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(argv, exit_on_error=False, print_error=False)


if __name__ == "__main__":
    run(main)
