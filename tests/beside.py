"""Holds a policy beside the scheduler of the engine that it follows, batch by batch.

    python -m tests.beside hf
    python -m tests.beside vllm-v1                          where vllm 0.33.0 is installed
    python -m tests.beside nano-vllm --path ../nano-vllm    with a copy of its repository

The engine's own classes decide, with their own cache, and no model. Two loads are equal if all
batches are: the same requests with the same number of tokens. Read next: policies/today.py."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from policies import make_scheduler
from policies.pages import make_pages
from scheduler import Request

VOCABULARY = 2  # of prompts that share beginnings
MAX_ITERATIONS = 20_000


class Sizes(NamedTuple):
    """The sizes of a server."""

    chunk: int
    max_batch: int
    max_len: int
    page_size: int
    pages: int
    prefix_caching: bool


class Arrival(NamedTuple):
    """A request of a load, and the iteration before which it comes."""

    iteration: int
    tokens: list[int]
    max_new_tokens: int


@dataclass
class Load:
    """A server and its requests, in order of arrival."""

    sizes: Sizes
    arrivals: list[Arrival]
    options: dict[str, Any] = field(default_factory=dict)  # of the policy


class Difference(NamedTuple):
    """The first iteration in which the two decide differently."""

    seed: int
    iteration: int
    ours: dict[int, int]  # {request: tokens} of a batch
    theirs: dict[int, int]


def sampled_token(number, length):
    """The token that request `number` generates after so many tokens."""
    return (number + length) % VOCABULARY


class Kind(NamedTuple):
    """A kind of random loads."""

    label: str
    tight: bool = False  # memory for few of the requests
    shared: bool = False  # prompts that begin alike, and prefix caching
    caching: bool = False  # prefix caching, whatever the prompts
    least_page: int = 1  # tokens
    max_batch_binds: bool = True
    options: Callable[[Random], dict[str, Any]] | None = None  # of the policy


def random_load(seed, kind):
    """The random load of that number and kind."""
    draw = Random(seed)
    max_len = draw.choice([8, 24, 60, 120])
    page_sizes = [size for size in (1, 2, 4, 16) if kind.least_page <= size < max_len]
    page_size = draw.choice(page_sizes)
    least_pages = -(-max_len // page_size)
    count = draw.randint(2, 12)
    pages = 4 * least_pages * count
    if kind.tight:
        pages = draw.randint(least_pages, least_pages * (1 + max(1, count // draw.choice([1, 3]))))
    sizes = Sizes(
        chunk=draw.choice([1, 2, 5, 8, 16, 32, 64]),
        max_batch=draw.choice([1, 2, 4, 8, 16]) if kind.max_batch_binds else 64,
        max_len=max_len,
        page_size=page_size,
        pages=pages,
        prefix_caching=kind.shared or kind.caching,
    )
    latest = draw.choice([0, 10, 60])
    arrivals = []
    for number, iteration in enumerate(sorted(draw.randint(0, latest) for _ in range(count))):
        prompt_len = draw.choice([draw.randint(1, max_len - 1), max_len // 4, max_len // 2])
        tokens = [1000 + number] * prompt_len
        if kind.shared:
            beginning = [draw.randrange(VOCABULARY)] * draw.randint(0, prompt_len)
            rest = range(prompt_len - len(beginning))
            tokens = beginning + [draw.randrange(VOCABULARY) for _ in rest]
        arrivals.append(Arrival(iteration, tokens, draw.randint(1, max_len - prompt_len)))
    return Load(sizes, arrivals, kind.options(draw) if kind.options else {})


class Ours:
    """A policy of this repository. Requests join, and a step decides a batch and computes it."""

    def __init__(self, policy, load):
        sizes = load.sizes
        self.scheduler = make_scheduler(
            policy,
            make_pages(sizes.pages, sizes.page_size, sizes.prefix_caching),
            chunk=sizes.chunk,
            max_batch=sizes.max_batch,
            max_len=sizes.max_len,
            **load.options,
        )

    def add(self, number, tokens, max_new_tokens):
        arrival = float(number)
        self.scheduler.add(Request(number, list(tokens), len(tokens), max_new_tokens, arrival))

    def step(self):
        batch = self.scheduler.next_batch()
        step = {chunk.request.id: chunk.length for chunk in batch}
        tokens = [
            sampled_token(chunk.request.id, chunk.end) if chunk.yields_token else None
            for chunk in batch
        ]
        self.scheduler.advance(batch, tokens, 0.0)
        return step


class Settings(SimpleNamespace):
    """An engine's configuration, of which only the fields that matter are set."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class VLLMEngine:
    """vLLM's Scheduler and KVCacheManager."""

    def __init__(self, load):
        import torch
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        sizes = load.sizes
        spec = FullAttentionSpec(
            block_size=sizes.page_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        blocks = sizes.pages + 1  # one of them is never used
        config = Settings(
            scheduler_config=Settings(
                max_num_seqs=sizes.max_batch,
                max_num_batched_tokens=sizes.chunk,
                long_prefill_token_threshold=load.options.get("long_prefill_token_threshold", 0),
                long_prefill_token_threshold_adaptive=load.options.get(
                    "long_prefill_token_threshold_adaptive", False
                ),
                prefill_schedule_interval=load.options.get("prefill_schedule_interval", 1),
                scheduler_reserve_full_isl=True,
                enable_chunked_prefill=True,
                policy="fcfs",
                watermark=0.0,
            ),
            cache_config=Settings(
                num_gpu_blocks=blocks, enable_prefix_caching=sizes.prefix_caching
            ),
            model_config=Settings(max_model_len=2 * sizes.max_len),
            parallel_config=Settings(
                data_parallel_size=1,
                data_parallel_index=0,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            observability_config=Settings(),
            ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
            aux_output_config=Settings(enabled=False),
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
            num_prefill_lookahead_tokens=0,
            num_hash_lookahead_tokens=0,
            max_concurrent_batches=1,
            max_in_flight_tokens=2 * sizes.max_len,
        )
        init_none_hash(_hash)
        self.hasher = get_request_block_hasher(sizes.page_size, _hash)
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            Settings(accept_tokens=lambda *_: True),
            block_size=sizes.page_size,
        )
        self.outputs = {}

    def add(self, number, tokens, max_new_tokens):
        from vllm.v1.request import Request as TheirRequest

        params = Settings(max_tokens=max_new_tokens, ignore_eos=True, min_tokens=0)
        request = TheirRequest(
            str(number), list(tokens), params, None, block_hasher=self.hasher, arrival_time=number
        )
        self.scheduler.add_request(request)

    def step(self):
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        sampled = []
        for name in scheduled:
            request = self.scheduler.requests[name]
            is_complete = request.num_computed_tokens == request.num_tokens
            sampled.append([sampled_token(int(name), request.num_tokens)] if is_complete else [])
        runner_output = Settings(
            sampled_token_ids=sampled,
            req_id_to_index={name: i for i, name in enumerate(scheduled)},
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
        )
        self.scheduler.update_from_output(output, runner_output)
        return {int(name): tokens for name, tokens in scheduled.items()}


def _hash(value):
    """A hash of what vLLM identifies a block by."""
    from hashlib import sha256

    return sha256(repr(value).encode()).digest()


class TransformersEngine:
    """transformers' FIFOScheduler, PagedAttentionCache and OffloadingManager."""

    def __init__(self, load):
        import logging

        import torch
        from transformers import LlamaConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.offloading_manager import (
            OffloadingManager,
        )
        from transformers.generation.continuous_batching.scheduler import FIFOScheduler

        sizes = load.sizes
        config = LlamaConfig(
            hidden_size=32,  # 256 bytes for a token: a sector, of a multiple of 128, is a page
            num_attention_heads=1,
            num_hidden_layers=1,
            vocab_size=8,
        )
        cache_config = ContinuousBatchingConfig(
            page_size=sizes.page_size,
            num_blocks=sizes.pages,
            max_batch_tokens=sizes.chunk,
            max_memory_percent=0.9,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            return_logprobs=False,
            use_async_batching=False,
        )
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        helper = DistributedHelper(None, None)
        self.chunk = sizes.chunk
        self.cache = PagedAttentionCache(config, cache_config, "cpu", helper, torch.float32)
        self.scheduler = FIFOScheduler(self.cache, None, sizes.max_batch)
        self.offloading = OffloadingManager(self.cache, self.scheduler, 0.0, 0.5, None, helper)

    def add(self, number, tokens, max_new_tokens):
        from transformers.generation.continuous_batching.requests import RequestState

        state = RequestState(str(number), list(tokens), max_new_tokens=max_new_tokens)
        self.scheduler.add_waiting_request(state)

    def step(self):
        # as ContinuousBatchProcessor.prepare_next_batch and update_batch do
        tokens_in_cache = self.cache.max_tokens_read
        batch, *_ = self.scheduler.schedule_batch(self.chunk, tokens_in_cache)
        while batch is None:
            assert self.offloading.offload_requests()
            batch, *_ = self.scheduler.schedule_batch(self.chunk, tokens_in_cache)
        if self.scheduler.starved_requests:
            self.offloading.offload_requests()
        step = {}
        for chunk in batch:
            state = chunk.state
            step[int(state.request_id)] = chunk.query_length
            state.position_offset += chunk.query_length
        for chunk in batch:
            if chunk.has_new_token:
                state = chunk.state
                token = sampled_token(int(state.request_id), state.position_offset)
                if state.update_and_check_completion(token, None):
                    self.scheduler.finish_request(state.request_id)
                    self.scheduler.block_new_requests = False
        return step


class NanoVLLMEngine:
    """nano-vLLM's Scheduler and BlockManager, from a copy of its repository on sys.path."""

    def __init__(self, load):
        from nanovllm.engine.scheduler import Scheduler
        from nanovllm.engine.sequence import Sequence

        sizes = load.sizes
        config = Settings(
            max_num_seqs=sizes.max_batch,
            max_num_batched_tokens=sizes.chunk,
            eos=-1,
            num_kvcache_blocks=sizes.pages,
            kvcache_block_size=sizes.page_size,
        )
        Sequence.block_size = sizes.page_size
        self.scheduler = Scheduler(config)
        self.numbers = {}  # of the requests, by the ids of their sequences

    def add(self, number, tokens, max_new_tokens):
        from nanovllm.engine.sequence import Sequence

        params = Settings(temperature=1.0, max_tokens=max_new_tokens, ignore_eos=True)
        sequence = Sequence(list(tokens), params)
        self.numbers[sequence.seq_id] = number
        self.scheduler.add(sequence)

    def step(self):
        sequences, is_prefill = self.scheduler.schedule()
        step = {self.numbers[s.seq_id]: s.num_scheduled_tokens for s in sequences}
        tokens = [sampled_token(self.numbers[s.seq_id], s.num_tokens) for s in sequences]
        self.scheduler.postprocess(sequences, tokens, is_prefill)
        return step


def vllm_options(draw):
    """Random options of vllm-v1."""
    return {
        "long_prefill_token_threshold": draw.choice([0, 1, 5, 16]),
        "long_prefill_token_threshold_adaptive": draw.random() < 0.5,
        "prefill_schedule_interval": draw.choice([1, 2, 3, 5]),
    }


AMPLE = Kind("ample memory")
TIGHT = Kind("tight memory", tight=True)
SHARED = Kind("ample memory, shared beginnings", shared=True)
TIGHT_SHARED = Kind("tight memory, shared beginnings", tight=True, shared=True)


class Beside(NamedTuple):
    """How a policy is held beside its engine."""

    package: str
    make: Callable[[Load], Any]  # an engine, with the methods of Ours
    kinds: tuple[Kind, ...]


ENGINES = {
    "hf": Beside("transformers", TransformersEngine, (AMPLE, TIGHT)),
    "vllm-v1": Beside(
        "vllm",
        VLLMEngine,
        (
            AMPLE,
            TIGHT,
            SHARED,
            TIGHT_SHARED,
            Kind("with options", tight=True, options=vllm_options),
        ),
    ),
    "nano-vllm": Beside(
        "nanovllm",
        NanoVLLMEngine,
        tuple(
            kind._replace(caching=True, least_page=2, max_batch_binds=False)
            for kind in (AMPLE, TIGHT, SHARED, TIGHT_SHARED)
        ),
    ),
}


def differences(policy, make, kind, seeds):
    """Where the policy and the engine differ, one Difference for each load that is not equal."""
    found = [first_difference(policy, make, seed, random_load(seed, kind)) for seed in seeds]
    return [difference for difference in found if difference]


def first_difference(policy, make, seed, load):
    """Serve a load with both to the end of it, or to the first difference."""
    ours = Ours(policy, load)
    theirs = make(load)
    coming = list(enumerate(load.arrivals))
    for iteration in range(MAX_ITERATIONS):
        while coming and (coming[0][1].iteration <= iteration or not ours.scheduler.requests):
            number, arrival = coming.pop(0)
            for engine in (ours, theirs):
                engine.add(number, arrival.tokens, arrival.max_new_tokens)
        if not ours.scheduler.requests:
            return None
        steps = ours.step(), theirs.step()
        if steps[0] != steps[1]:
            return Difference(seed, iteration, *steps)
    raise AssertionError(f"load {seed} does not end")


def main():
    """Print how many loads are equal, and the first differences."""
    parser = argparse.ArgumentParser(prog="python -m tests.beside", description=__doc__)
    parser.add_argument("policy", choices=ENGINES)
    parser.add_argument("--loads", type=int, default=200, help="of each kind")
    parser.add_argument("--path", help="a folder with the engine's package")
    args = parser.parse_args()
    if args.path:
        sys.path.insert(0, args.path)
    engine = ENGINES[args.policy]
    if find_spec(engine.package) is None:
        parser.error(f"{engine.package} is not installed; --path FOLDER finds it elsewhere")
    for kind in engine.kinds:
        different = differences(args.policy, engine.make, kind, range(args.loads))
        print(f"{kind.label}: {args.loads - len(different)} of {args.loads} loads are equal")
        for difference in different[:3]:
            print(f"    {difference}")


if __name__ == "__main__":
    main()
