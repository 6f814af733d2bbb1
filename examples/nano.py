"""How an LLM server decides what to compute next, in one file: `python examples/nano.py`.

A request is a list of tokens and one counter, `num_computed`: so many of them have their keys and
values in the cache. A chunk is (request, start, length): "compute tokens[start : start + length]".
A batch is a list of chunks. A whole prompt is a chunk, a decode is a chunk of length 1, and a
scheduler is a function that returns the next batch.

Here are four schedulers that Sarathi-Serve (arXiv:2403.02310) compares, a tiny LLaMA with random
weights, and the loop. Left out: memory that runs out, sampling, stop tokens, speed. The engine one
folder up has them all, and its tests hold it to this file. Read next: request.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

ALPHABET = "_abcdefghijklmnopqrstuvwxyz"  # a token is a letter
MAX_LEN = 80  # of a prompt and its output
N_LAYER = 2
N_HEAD = 4
N_EMBD = 32
HEAD_DIM = N_EMBD // N_HEAD


@dataclass(eq=False)
class Request:
    """A prompt, and the output that is generated after it."""

    id: int  # also its row in the cache
    arrival: int  # in ticks, see below
    max_new_tokens: int
    tokens: list[int]  # the prompt, and the output so far
    num_computed: int = 0
    scheduled: int = 0  # when it was let in
    token_times: list[int] = field(default_factory=list)  # when each output token was known

    @property
    def is_decoding(self) -> bool:
        return len(self.token_times) > 0

    @property
    def gaps(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class Batch(list[tuple[Request, int, int]]):
    """The chunks of one iteration: (request, start, length)."""

    def add(self, request: Request, limit: int = MAX_LEN) -> int:
        """Add the tokens of a request that are not computed, up to a limit. Returns how many."""
        length = min(len(request.tokens) - request.num_computed, limit)
        self.append((request, request.num_computed, length))
        return length


@dataclass
class Server:
    """Who waits and who runs."""

    waiting: list[Request]  # in order of arrival
    max_batch: int  # B, the most requests that run at once
    chunk: int  # C, the token budget of sarathi_serve
    running: list[Request] = field(default_factory=list)
    now: int = 0

    def admit(self) -> Request | None:
        """Let the first request run that waits. None if nobody does, or if there is no room."""
        has_come = self.waiting and self.waiting[0].arrival <= self.now
        if not has_come or len(self.running) == self.max_batch:
            return None
        request = self.waiting.pop(0)
        request.scheduled = self.now
        self.running.append(request)
        return request


def request_level(server: Server) -> Batch:
    """FasterTransformer: a batch of requests runs to its end. All others wait for that."""
    batch = Batch()
    if not server.running:
        while server.admit():
            pass
    for request in server.running:
        batch.add(request)  # the whole prompt the first time, then one token
    return batch


def orca(server: Server) -> Batch:
    """Orca: prompts join the decodes at once, and make the iteration as long as they are."""
    batch = Batch()
    while server.admit():
        pass
    for request in server.running:
        batch.add(request)
    return batch


def vllm(server: Server) -> Batch:
    """vLLM of 2023: prompts first, without the decodes. These wait."""
    batch = Batch()
    while request := server.admit():
        batch.add(request)
    if not batch:
        for request in server.running:
            batch.add(request)
    return batch


def sarathi_serve(server: Server) -> Batch:
    """Sarathi-Serve: all decodes, and of the prompts only what the token budget has left."""
    batch = Batch()
    left = server.chunk
    for request in server.running:
        if request.is_decoding:
            left -= batch.add(request)  # a running decode never waits
    for request in server.running:
        if not request.is_decoding and left > 0:
            left -= batch.add(request, left)  # finish what was started
    while left > 0 and (request := server.admit()):
        left -= batch.add(request, left)  # then let new requests in
    return batch


class LLaMA(nn.Module):
    """Computes a batch: one row for each token, whatever request it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(len(ALPHABET), N_EMBD)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.final_norm = nn.RMSNorm(N_EMBD)
        self.head = nn.Linear(N_EMBD, len(ALPHABET), bias=False)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Write a batch into the cache. Returns the logits after each chunk."""
        tokens = []
        rows = []  # of the cache
        positions = []
        last = []  # token of each chunk
        for request, start, length in batch:
            tokens += request.tokens[start : start + length]
            rows += [request.id] * length
            positions += range(start, start + length)
            last.append(len(tokens) - 1)
        places = torch.tensor([rows, positions])
        x = self.token_embedding(torch.tensor(tokens))  # (num_tokens, N_EMBD)
        for layer, block in enumerate(self.blocks):
            x = block(x, *places, cache[layer])
        return self.head(self.final_norm(x[last]))  # (len(batch), len(ALPHABET))


class Block(nn.Module):
    """One layer. Its linear layers see one matrix: weights are read once for all requests."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(N_EMBD)
        self.preproj = nn.Linear(N_EMBD, 3 * N_EMBD, bias=False)
        self.postproj = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.ffn_norm = nn.RMSNorm(N_EMBD)
        self.ffn_ln1 = nn.Linear(N_EMBD, 8 * N_EMBD, bias=False)
        self.ffn_ln2 = nn.Linear(4 * N_EMBD, N_EMBD, bias=False)

    def forward(self, x: Tensor, rows: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """x (num_tokens, N_EMBD) -> the same. Row and position are a token's place in the cache."""
        keys, values = cache  # (requests, MAX_LEN, N_HEAD, HEAD_DIM)
        qkv = self.preproj(self.attn_norm(x))
        q, k, v = qkv.view(-1, 3, N_HEAD, HEAD_DIM).unbind(1)
        keys[rows, positions] = rotate(k, positions)
        values[rows, positions] = v
        y = attend(rotate(q, positions), keys[rows], values[rows], positions)
        x = x + self.postproj(y.flatten(1))
        gate, up = self.ffn_ln1(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.ffn_ln2(F.silu(gate) * up)


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Each token sees its request's past and itself: a prompt may be cut anywhere."""
    scores = torch.einsum("thd,tphd->thp", q, keys) / HEAD_DIM**0.5  # token, head, position
    is_future = torch.arange(MAX_LEN) > positions[:, None, None]
    weights = scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)
    return torch.einsum("thp,tphd->thd", weights, values)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE: each pair of dimensions, as a complex number, turns by an angle of the position."""
    exponent = torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM
    angle = positions[:, None, None] * 10000**-exponent
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def serve(model: LLaMA, server: Server, schedule: Callable[[Server], Batch]) -> None:
    """Generate all outputs, each time the likeliest token."""
    cache = model.head.weight.new_zeros(N_LAYER, 2, len(server.waiting), MAX_LEN, N_HEAD, HEAD_DIM)
    while server.waiting or server.running:
        batch = schedule(server)
        num_tokens = sum(length for _, _, length in batch)
        server.now += max(1, -(-num_tokens // 8))  # ticks, one at least: all weights are read
        if not batch:
            continue  # nobody has arrived
        next_tokens = model(batch, cache).argmax(dim=-1).tolist()
        for (request, start, length), token in zip(batch, next_tokens, strict=True):
            request.num_computed = start + length
            if request.num_computed == len(request.tokens):  # all that is known: here is the next
                request.tokens.append(token)
                request.token_times.append(server.now)
            if len(request.token_times) == request.max_new_tokens:
                server.running.remove(request)


def timeline(request: Request) -> str:
    """A column for each tick: . waits, # computes the prompt, then the output, letter by letter."""
    line = " " * request.arrival
    line += "." * (request.scheduled - request.arrival)
    line += "#" * (request.token_times[0] - request.scheduled)
    output = request.tokens[-len(request.token_times) :]
    for token, gap in zip(output, [*request.gaps, 1], strict=True):
        line += ALPHABET[token].ljust(gap, ".")
    return line


if __name__ == "__main__":
    torch.manual_seed(1)
    model = LLaMA().double()
    for weight in model.parameters():
        weight.data *= 2  # or all answers would be alike
    answers = []
    for schedule in (request_level, orca, vllm, sarathi_serve):
        requests = []
        for arrival, max_new_tokens, prompt in [
            (0, 24, "why_is_the_sky_blue"),
            (0, 18, "how_do_bicycles_stay_upright"),
            (8, 8, "here_is_a_long_text_of_which_i_want_to_know_the_main_idea"),
            (9, 9, "what_is_a_black_hole"),
        ]:
            tokens = [ALPHABET.index(letter) for letter in prompt]
            requests.append(Request(len(requests), arrival, max_new_tokens, tokens))
        serve(model, Server([*requests], max_batch=4, chunk=8), schedule)
        print(f"{schedule.__name__}: longest gap {max(max(r.gaps) for r in requests)} ticks")
        for request in requests:
            print(" ", timeline(request))
        answers.append([request.tokens for request in requests])
    print("all answers are the same:", answers == 4 * answers[:1])
