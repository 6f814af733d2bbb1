"""Engines of others, each in a process of its own: the program that comparison.py starts.

It runs under whichever Python has the packages, and imports nothing of this repository. It reads a
job, a line of JSON, answers with the engine's policies, and then each line, one of these, with the
tokens that come of the prompts, which are all of one length. Matrices, keys and values have the
job's dtype, but for llama.cpp's keys and values, in float16, its default, which is faster.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
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


def llama_cpp(job, short):
    """Batches of its default size, of decodes behind what there is of prompts: prompts first."""
    import llama_cpp as cpp
    import numpy as np

    write_gguf(job, path := f"{job.folder}/model.gguf", short.upper())
    options, B, prompt_len = cpp.llama_context_default_params(), job.batch, len(job.prompts[0])
    options.n_seq_max, options.n_ctx = B, B * (job.seq_len // 256 + 1) * 256
    options.n_threads = options.n_threads_batch = job.threads
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    context, most = cpp.llama_init_from_model(model, options), options.n_batch
    batch, memory = cpp.llama_batch_init(most, 0, 1), cpp.llama_get_memory(context)

    def serve():
        texts = [list(prompt) for prompt in job.prompts]
        rows = [(i, position) for i in range(B) for position in range(prompt_len)]
        while rows:
            now, rows, batch.n_tokens = rows[:most], rows[most:], len(rows[:most])
            for n, (i, position) in enumerate(now):
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = texts[i][position], position, 1
                batch.seq_id[n][0], batch.logits[n] = i % B, position + 1 == len(texts[i])
            if cpp.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for n, (i, position) in ((n, row) for n, row in enumerate(now) if batch.logits[n]):
                logits = cpp.llama_get_logits_ith(context, n)
                logits = np.ctypeslib.as_array(logits, [job.config.vocab_size])
                texts[i].append(int(logits.argmax()))
                if len(texts[i]) < job.seq_len:
                    rows.append((i, position + 1))
                elif cpp.llama_memory_seq_rm(memory, i % B, -1, -1) and i + B < len(texts):
                    rows += [(i + B, position) for position in range(prompt_len)]
        return [text[prompt_len:] for text in texts]

    return {"vllm": serve}


def write_gguf(job, path, matrices):
    """Write a LLaMA as llama.cpp reads it: its names, and rotated pairs side by side."""
    import gguf
    from gguf.quants import dequantize, quantize

    c, file, kinds = vars(job.config), gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType
    sizes = """vocab_size=vocab_size n_layer=block_count n_head=head_count n_kv_head=head_count_kv
        n_embd=embedding_length n_inner=feed_forward_length max_positions=context_length
        head_dim=key_length head_dim=value_length rope_theta=rope_freq_base
        norm_eps=layer_norm_rms_eps"""
    for field, name in (pair.split("=") for pair in sizes.split()):
        getattr(file, f"add_{name}")(c[field])
    file.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c["n_layer"])
    for shard in Path(job.checkpoint).glob("model*.safetensors"):
        for name, tensor in gguf.utility.SafetensorsLocal(shard).tensors.items():
            values = dequantize(tensor.mmap_bytes(), kinds[tensor.dtype]).reshape(tensor.shape)
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # halves of a head -> pairs
                halves = values.reshape(-1, 2, c["head_dim"] // 2, c["n_embd"])
                values = halves.swapaxes(1, 2).reshape(tensor.shape)
            kind, its = kinds["F32" if values.ndim == 1 else matrices], (name, [".weight"])
            file.add_tensor(names.get_name(*its), quantize(values, kind), raw_dtype=kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(file, f"write_{part}_to_file")()
    file.close()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files have names that packages use too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    job = json.loads(sys.stdin.readline(), object_hook=lambda fields: SimpleNamespace(**fields))
    load = {"transformers": transformers, "openvino": openvino, "llama.cpp": llama_cpp}[job.engine]
    serves = load(job, job.dtype.replace("float", "f"))
    print(json.dumps(list(serves)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(serves[line.strip()]()), file=answers, flush=True)
