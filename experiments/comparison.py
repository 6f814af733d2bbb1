"""The same requests through transformers' generate: `bench.py --transformers`. See offline.py."""

import statistics
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine import Engine
from experiments import measure
from experiments.workload import prompts
from model import GPT
from pretrained.checkpoints import ModelFile
from sampling import SamplingParams


def against_transformers(model, arrivals, args):
    """Serve `arrivals`, all of one length, with transformers' generate and with sarathi.

    Same weights, dtype and batch; without --init-from, random weights. Returns both throughputs in
    tokens per second, prompt and output; the fraction of output tokens that are equal; and whether
    the machine was busy.
    """
    c, device, dtype = model.config, model.device, model.dtype
    if args.init_from:
        theirs = AutoModelForCausalLM.from_pretrained(args.init_from, dtype=dtype)
    else:
        fields = {f.alias or name: name for name, f in ModelFile.model_fields.items()}
        own = {alias: getattr(c, name) for alias, name in fields.items() if hasattr(c, name)}
        theirs = LlamaForCausalLM(LlamaConfig(**own)).to(dtype)
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            model = GPT.from_pretrained(directory, device, dtype)
        if args.compile:
            model.compile()
    theirs, B = theirs.to(device).eval(), args.batch
    tokens = prompts(arrivals, c.vocab_size, args.seed)
    config = dict(policy="sarathi", chunk=args.chunk, max_batch=B, max_len=args.seq_len)
    engine = Engine(model, **config, attention=args.attention)
    batches = [tokens[i : i + B] for i in range(0, len(tokens), B)]
    output = args.seq_len - arrivals[0].prompt_len

    @torch.inference_mode()
    def generate(batch, new_tokens):
        ids = torch.tensor(batch, device=device)
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        options |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, ids.shape[1] :].tolist()

    def serve_twice():
        start = time.perf_counter()
        texts = [text for batch in batches for text in generate(batch, output)]
        middle = time.perf_counter()
        ours = [c.tokens for c in engine.generate(tokens, SamplingParams(output), progress=False)]
        return texts, ours, middle - start, time.perf_counter() - middle

    generate(tokens[:1], 2)
    engine.warm_up()
    (*texts, their_s, our_s), drift = measure.steadily(serve_twice, device, tries=1)
    equal = [a == b for pair in zip(*texts) for a, b in zip(*pair)]
    return {
        "transformers_tokens_per_s": len(tokens) * args.seq_len / their_s,
        "sarathi_tokens_per_s": len(tokens) * args.seq_len / our_s,
        "equal_tokens": statistics.fmean(equal),
        "busy": drift > measure.BUSY,
    }


def describe(its, dtype):
    """What `against_transformers` found, in words."""
    theirs, ours = its["transformers_tokens_per_s"], its["sarathi_tokens_per_s"]
    text = f"transformers' generate, same weights and requests: {theirs:,.0f} tokens/s; sarathi: "
    text += f"{ours:,.0f}, {measure.TOO_BUSY if its['busy'] else f'{ours / theirs:.2f}x'}\n"
    text += f"{its['equal_tokens']:.0%} of the tokens are equal"
    if its["equal_tokens"] < 1:
        text += f": {dtype} rounds, which decides between tokens that are nearly as likely,\nand "
        text += "after a difference the text is another"
    return text
