"""Another engine, in a process of its own: the program that engines.py starts.

It runs under any Python that has the engine's packages, and imports nothing of this repository.
Lines of JSON come and go. The first is a Job; the answer maps the engine's policies to the types
that they compute with. Each further one is [policy, count]; the answer is the tokens that the
engine generated for the first `count` of the job's prompts.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Tokens = list[list[int]]  # of each prompt, those that were generated
Serve = Callable[[int], Tokens]  # serves so many of the prompts


@dataclass(frozen=True)
class Policy:
    """One way in which the engine serves."""

    serve: Serve
    dtype: str  # that it computes with


@dataclass(frozen=True)
class Job:
    """The engine and the requests. Matrices, keys and values are to have the dtype."""

    engine: str  # a name in ENGINES
    checkpoint: str
    folder: str  # for files of the engine's own
    prompts: list[list[int]]  # all of one length
    output_len: int
    seq_len: int  # prompt and output
    max_batch: int
    chunk: int
    dtype: str
    device: str
    threads: int


def load_transformers(job: Job) -> dict[str, Policy]:
    """`generate` in batches, each until its last token: what request-level does."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=job.dtype)
    model.to(job.device)
    no_end = GenerationConfig(max_new_tokens=job.output_len, pad_token_id=0)
    model.generation_config = no_end
    prompts = torch.tensor(job.prompts, device=job.device)

    def serve(count: int) -> Tokens:
        batches = prompts[:count].split(job.max_batch)
        outputs = [model.generate(ids, attention_mask=torch.ones_like(ids)) for ids in batches]
        return torch.cat(outputs)[:, -job.output_len :].tolist()

    return {"request-level": Policy(serve, str(model.dtype).removeprefix("torch."))}


def load_openvino(job: Job) -> dict[str, Policy]:
    """ContinuousBatchingPipeline, stall-free (dynamic split-fuse) and with prompts first."""
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]
    from optimum.intel import OVModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = OVModelForCausalLM.from_pretrained(
        job.checkpoint, export=True, load_in_8bit=False, compile=False
    )
    model.save_pretrained(job.folder)
    capability = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}[job.dtype]
    is_there = capability in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    dtype = job.dtype if is_there else "float32"  # what openvino computes with where it is not
    precision = dtype.replace("float", "f")  # as in "bf16"
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": job.threads,
    }
    block_size = 32  # tokens
    max_tokens = {"sarathi-serve": job.chunk, "vllm": job.max_batch * job.seq_len}
    policies: dict[str, Policy] = {}
    for policy, max_batched_tokens in max_tokens.items():
        config = genai.SchedulerConfig()
        config.dynamic_split_fuse = policy != "vllm"
        config.max_num_batched_tokens = max_batched_tokens
        config.max_num_seqs = job.max_batch
        config.enable_prefix_caching = False
        config.num_kv_blocks = job.max_batch * (job.seq_len // block_size + 2)
        pipeline = genai.ContinuousBatchingPipeline(job.folder, config, "CPU", hints)
        policies[policy] = Policy(
            serve=partial(serve_with_openvino, pipeline, job),
            dtype=dtype,
        )
    return policies


def serve_with_openvino(pipeline: Any, job: Job, count: int) -> Tokens:
    """The tokens that a ContinuousBatchingPipeline generates for some prompts, greedily."""
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]
    from openvino import Tensor  # pyright: ignore[reportMissingImports]

    greedy = genai.GenerationConfig(max_new_tokens=job.output_len, ignore_eos=True)
    prompts = [Tensor([prompt]) for prompt in job.prompts[:count]]
    handles = [pipeline.add_request(i, prompt, greedy) for i, prompt in enumerate(prompts)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return [list(handle.read_all()[0].generated_ids) for handle in handles]


ENGINES = {"transformers": load_transformers, "openvino": load_openvino}


def main() -> None:
    """Answer the lines of the standard input."""
    argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__).parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    try:
        job = Job(**json.loads(sys.stdin.readline()))
    except (TypeError, ValueError) as error:
        sys.exit(f"error: the first line must be a job in JSON: {error}")
    policies = ENGINES[job.engine](job)
    dtypes = {name: policy.dtype for name, policy in policies.items()}
    print(json.dumps(dtypes), file=answers, flush=True)
    for line in sys.stdin:
        name, count = json.loads(line)
        print(json.dumps(policies[name].serve(count)), file=answers, flush=True)


if __name__ == "__main__":
    # without this folder, whose files have names that packages use, too
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if os.path.abspath(path) != folder]
    main()
