"""Three prompts at once, and what each cost: `python -m examples.offline`, in the top folder."""

from argparse import ArgumentParser

from engine import Engine
from model import GPT, GPTConfig
from sampling import SamplingParams

ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
model = GPT(GPTConfig.preset("llama-tiny"))  # random weights; or GPT.from_pretrained("path/or/hub")
engine = Engine(model, policy="sarathi-serve", chunk=64, max_batch=4, max_len=512)

prompts = [[1, 2, 3], [4] * 100, [5, 6] * 150]  # token ids; text needs a tokenizer
for request in engine.generate(prompts, SamplingParams(max_new_tokens=8, temperature=0.0)):
    head = f"request {request.id}, a prompt of {request.prompt_len} tokens"
    print(f"{head}: {request.output}")
    print(f"  first token after {request.ttft:.3f} s, longest gap {max(request.tbt):.3f} s")
