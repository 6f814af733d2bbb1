"""A long prompt arrives while another request decodes: `python -m examples.online`.

Under "sarathi-serve" request 0 gets a token in each iteration, beside a chunk of request 1's
prompt. Under "vllm" it waits until the whole prompt has been computed.
"""

from argparse import ArgumentParser

from engine import Engine
from model import GPT, GPTConfig
from sampling import SamplingParams

ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
model = GPT(GPTConfig.preset("llama-tiny"))
engine = Engine(model, policy="sarathi-serve", chunk=64, max_batch=4, max_len=512)

engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=10))
engine.step()  # its prompt is computed, and its first token is known
engine.add_request([4] * 300, SamplingParams(max_new_tokens=4))
while engine.has_work:
    for event in engine.step():
        print(
            f"request {event.request.id}: token {event.token}, {event.finish_reason or 'goes on'}"
        )
