"""Engines of others, each in a process of its own: the program that compare_engines.py starts.

It runs under whichever Python has the packages, and imports nothing of this repository. It reads a
job, a line of JSON, answers with the engine's policies, and then each line, one of these, with the
tokens that come of the prompts, which are all of one length. Matrices, keys and values have the
job's dtype. Engines that are servers are compared by serve_remote.py.
"""

import json
import os
import sys
from functools import partial
from types import SimpleNamespace


def transformers(job, short):
    """`generate` in batches of B, each until its last token: what request-level does."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=job.dtype).to(job.device)
    model.generation_config = GenerationConfig(max_new_tokens=job.output, pad_token_id=0)  # no end
    generate = lambda ids: model.generate(ids, attention_mask=torch.ones_like(ids))
    batches = torch.tensor(job.prompts, device=job.device).split(job.batch)
    serve = lambda: torch.cat([generate(ids) for ids in batches])[:, -job.output :].tolist()
    return {"request-level": serve}


def openvino(job, short):
    """ContinuousBatchingPipeline: with dynamic split-fuse, its stall-free; and prompts first."""
    import openvino_genai as genai
    from openvino import Tensor
    from optimum.intel import OVModelForCausalLM

    exported = dict(export=True, load_in_8bit=False, compile=False)
    OVModelForCausalLM.from_pretrained(job.checkpoint, **exported).save_pretrained(job.folder)
    hints = {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
    hints["INFERENCE_NUM_THREADS"] = job.threads
    greedy = genai.GenerationConfig(max_new_tokens=job.output, ignore_eos=True)

    def serve(engine):
        prompts = [Tensor([prompt]) for prompt in job.prompts]
        texts = [engine.add_request(i, prompt, greedy) for i, prompt in enumerate(prompts)]
        while engine.has_non_finished_requests():
            engine.step()
        return [list(text.read_all()[0].generated_ids) for text in texts]

    serves = {}
    for policy, most in {"sarathi-serve": job.chunk, "vllm": job.batch * job.seq_len}.items():
        config = genai.SchedulerConfig()
        config.dynamic_split_fuse, config.max_num_batched_tokens = policy != "vllm", most
        config.max_num_seqs, config.enable_prefix_caching = job.batch, False
        config.num_kv_blocks = job.batch * (job.seq_len // 32 + 2)  # blocks of 32 tokens
        engine = genai.ContinuousBatchingPipeline(job.folder, config, "CPU", hints)
        serves[policy] = partial(serve, engine)
    return serves


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files have names that packages use too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    job = json.loads(sys.stdin.readline(), object_hook=lambda fields: SimpleNamespace(**fields))
    load = {"transformers": transformers, "openvino": openvino}[job.engine]
    serves = load(job, job.dtype.replace("float", "f"))
    print(json.dumps(list(serves)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(serves[line.strip()]()), file=answers, flush=True)
