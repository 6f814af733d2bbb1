"""What today's engines decide, and what their users ask for: each policy keeps its rule."""

from ast import literal_eval
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from random import Random

import pytest

from engine import Engine
from lab.simulator.referee import check_random_loads, rules_of
from policies import ALL_POLICIES, TODAY, make_scheduler
from policies.cards import CARDS
from policies.pages import make_pages
from policies.referee import chunks_come_next
from request import Service
from sampling import SamplingParams
from scheduler import Request
from tests.beside import AMPLE, ENGINES, TIGHT, Kind, differences
from tests.helpers import advance, completions_of, finish, tiny_model, with_slow

RANDOM_LOADS = 40  # of 2,000 that `bench.py check NAME --random-loads 2000` simulates


class World:
    """A scheduler that is driven by hand, with the requests of a load "prompt+output ...".

    A request "prompt+output@iteration" comes before that iteration, others at the beginning. Each
    prompt is of tokens of its own, unless given."""

    def __init__(self, policy, load="", page_size=4, pages=64, shares=False, **options):
        options = dict(chunk=8, max_len=64, max_batch=8) | options
        self.scheduler = make_scheduler(policy, make_pages(pages, page_size, shares), **options)
        self.requests = []
        self.later = []  # (iteration, prompt_len, output_len)
        self.iterations = 0
        for text in load.split():
            lengths, _, iteration = text.partition("@")
            self.later.append((int(iteration or 0), *map(int, lengths.split("+"))))
        self.arrive()

    def arrive(self):
        """Queue the requests of the load that come before the next iteration."""
        while self.later and self.later[0][0] == self.iterations:
            self.add(*self.later.pop(0)[1:])

    def add(self, prompt, max_new_tokens=4, user=""):
        """Queue a prompt: its length, or its tokens. Returns the Request."""
        number = len(self.requests)
        tokens = [1000 + number] * prompt if isinstance(prompt, int) else list(prompt)
        request = Request(
            number, tokens, len(tokens), max_new_tokens, number, service=Service(user=user)
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self):
        """One iteration: "0:d 1:7", the request and the length of each chunk, d for a decode."""
        batch = self.scheduler.next_batch()
        chunks = [
            f"{chunk.request.id}:{'d' if chunk.request.is_decoding else chunk.length}"
            for chunk in batch
        ]
        advance(self.scheduler, batch)
        self.iterations += 1
        self.arrive()
        return " ".join(chunks)

    def run(self):
        """All iterations until nothing is left: "0:5 | 0:d x4", four of them are alike."""
        steps = []
        while self.scheduler.requests or self.later:
            steps.append(self.step())
        runs = [(step, len(list(group))) for step, group in groupby(steps)]
        return " | ".join(step if count == 1 else f"{step} x{count}" for step, count in runs)

    def steps_until_preempted(self):
        """Iterate to the first that preempts, which is decided, and not done. Returns whom."""
        while not self.scheduler.next_batch().preempted:
            self.step()
        return self.scheduler.batch.preempted


@pytest.mark.parametrize("policy", with_slow(TODAY, fast=["vllm-v1", "sglang", "hf", "nano-vllm"]))
def test_every_policy_keeps_the_rules_on_random_loads(policy):
    verdict = check_random_loads(policy, range(RANDOM_LOADS))
    assert verdict.violation is None and verdict.iterations > 20 * RANDOM_LOADS


def test_only_policies_that_say_so_may_drop_decodes():
    drops = {name for name, cls in ALL_POLICIES.items() if cls.drops_decodes}
    assert drops == {"ppas", "fastgen", "hf", "nano-vllm"}
    for name in ALL_POLICIES:
        assert ("no decode dropped" in rules_of(name)) == (name not in drops)


# ---- Beside the engines' own schedulers ---------------------------------------------------------


@pytest.mark.parametrize("loads", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [AMPLE, TIGHT], ids=lambda kind: kind.label)
def test_hf_decides_what_transformers_decides(kind, loads):
    pytest.importorskip("transformers", minversion="5.23.0")
    assert differences("hf", ENGINES["hf"].make, kind, range(loads)) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in ENGINES if name != "hf"])
def test_a_policy_decides_what_its_engine_decides_where_that_is_installed(policy):
    engine = ENGINES[policy]
    if find_spec(engine.package) is None:
        pytest.skip(f"{engine.package} is not installed")
    different = [differences(policy, engine.make, kind, range(200)) for kind in engine.kinds]
    assert max(map(len, different)) <= 22  # of nano-vllm's with shared beginnings in tight memory


def test_each_figure_of_equal_loads_has_its_command():
    assert {name for name, card in CARDS.items() if card.equal} == set(ENGINES)
    for card in CARDS.values():
        assert bool(card.engine) == bool(card.version), card.name
        assert card.note and "`" not in card.note, card.name


@dataclass
class Sequence:
    """A request as the model below sees it: counters."""

    id: int
    prompt: int
    max_new: int
    known: int  # tokens: the prompt, and the output so far
    computed: int = 0
    blocks: int = 0


@dataclass
class ModelOfV1:
    """vLLM V1's rule in numbers: who gets how many tokens, who is preempted, who waits."""

    blocks: int
    block_size: int
    budget: int
    max_seqs: int
    threshold: int
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)

    @classmethod
    def of(cls, load):
        sizes = load.sizes
        threshold = load.options["long_prefill_token_threshold"]
        return cls(sizes.pages, sizes.page_size, sizes.chunk, sizes.max_batch, threshold)

    def add(self, number, tokens, max_new_tokens):
        self.waiting.append(Sequence(number, len(tokens), max_new_tokens, known=len(tokens)))

    def blocks_for(self, tokens):
        return (tokens + self.block_size - 1) // self.block_size

    @property
    def free(self):
        return self.blocks - sum(sequence.blocks for sequence in self.running)

    def step(self):
        """{id: tokens} of one step; the sequences move on."""
        budget = self.budget
        is_alone = len(self.running) + len(self.waiting) == 1
        threshold = 0 if is_alone else self.threshold
        scheduled = {}
        preempted = False
        index = 0

        def share(sequence):
            wanted = sequence.known - sequence.computed
            return min(wanted, budget, threshold or wanted)

        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = share(sequence)
            while True:
                missing = self.blocks_for(sequence.computed + tokens) - sequence.blocks
                if missing <= self.free:
                    sequence.blocks += max(0, missing)
                    break
                victim = self.running.pop()
                victim.blocks = victim.computed = 0
                self.waiting.insert(0, victim)
                preempted = True
                if victim is sequence:
                    break
            if sequence not in self.running:
                break
            scheduled[sequence.id] = tokens
            budget -= tokens
            index += 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            if self.blocks_for(sequence.known) > self.free:
                break
            tokens = share(sequence)
            sequence.blocks = self.blocks_for(tokens)
            self.running.append(self.waiting.pop(0))
            scheduled[sequence.id] = tokens
            budget -= tokens
        for sequence in list(self.running):
            sequence.computed += scheduled.get(sequence.id, 0)
            if sequence.computed == sequence.known and sequence.id in scheduled:
                sequence.known += 1
                if sequence.known == sequence.prompt + sequence.max_new:
                    self.running.remove(sequence)
        return scheduled


@pytest.mark.parametrize("loads", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_vllm_v1_decides_what_a_model_of_its_rule_decides(loads):
    def threshold(draw: Random):
        return {"long_prefill_token_threshold": draw.choice([0, 0, 1, 3, 7])}

    kind = Kind("thresholds", tight=True, options=threshold)
    assert differences("vllm-v1", ModelOfV1.of, kind, range(loads)) == []


# ---- Each rule by hand ---------------------------------------------------------------------------

# policy (options), a load = the chunks of each iteration; ... stands for the others
RULES = """
vllm-v1 long_prefill_token_threshold=1 prefill_schedule_interval=2 chunk=2 max_batch=2 pages=4 \
    page_size=1 max_len=4, 3+1 2+2 = 0:1 1:1 x2 | 0:1 | 1:2 | 1:d  # who decodes loses its memory
vllm-v1 chunk=8, 5+3 12+2 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 | 1:d  # decodes inside the budget
vllm-v1 chunk=2, 1+3 1+3 1+3 = 0:1 1:1 | 0:d 1:d x2 | 2:1 | 2:d x2  # nobody beyond it
vllm-v1 chunk=8 long_prefill_token_threshold=3, 5+1 9+1 = 0:3 1:3 | 0:2 1:3 | 1:3  # the cap
vllm-v1 chunk=6 long_prefill_token_threshold=5, 6+1 = 0:6  # a lonely prompt is not cut
vllm-v1 chunk=4 prefill_schedule_interval=3, 3+5 6+1 = 0:3 1:1 | 0:d x2 | 0:d 1:3 | 0:d | 1:2
vllm-v1 chunk=2 prefill_schedule_interval=3, 1+4 2+1 1+1 = 0:1 1:1 | 0:d 1:1 | 0:d 2:1 | 0:d
interval every=0 chunk=4, 3+3 6+2 = 0:3 1:1 | 1:4 | 1:1 | 0:d 1:d | 0:d  # prefill first
interval every=1 chunk=4, 3+4 6+2 = 0:3 1:1 | 0:d | 1:4 | 0:d | 1:1 | 0:d 1:d  # chunked-only
interval every=2 chunk=4, 3+6 6+2 = 0:3 1:1 | 0:d x2 | 1:4 | 0:d x2 | 1:1 | 0:d 1:d
sglang chunk=4, 3+3 6+2 = 0:3 1:1 | 1:4 | 1:1 | 0:d 1:d | 0:d  # prefill first, alone
free-slots min_free_slots=2 max_batch=2 chunk=8, 2+3 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 0:d | 2:2
free-slots min_free_slots=1 max_batch=2 chunk=8, 2+3 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 2:2 | 0:d
lmdeploy max_batch=2 chunk=4, 2+4 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 0:d x2 | 2:2  # one runs: half
lmdeploy max_batch=2 chunk=4 prefill_interval=1, 2+4 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 2:2 | 0:d x2
lmdeploy max_batch=4 chunk=4, 2+3 2+3 2+1 = 0:2 1:2 | 0:d 1:d x2 | 2:2
lmdeploy max_batch=2 chunk=4, 2+4 2+2 4+1 = 0:2 1:2 | 0:d 1:d | 2:4 | 0:d x2  # a budget waits
small-chunks-wait chunk=4 least_chunk=3, 2+3 2+2 6+1 = 0:2 1:2 | 0:d 1:d | 0:d 2:3 | 2:3
small-chunks-wait chunk=4 least_chunk=3 max_delay=0, 2+2 2+2 6+1 = 0:2 1:2 | 0:d 1:d 2:2 | 2:4
sglang-mixed chunk=4, 3+3 6+2 = 0:3 1:1 | 0:d 1:3 | 0:d 1:2 | 1:d  # decodes ride along
nano-vllm chunk=4, 6+2 3+2 1+2 = 0:4 | 0:2 | 1:3 2:1 | 0:d 1:d 2:d  # only the first is cut
nano-vllm chunk=4, 2+2 3+2 2+2 = 0:2 | 1:3 | 2:2 | 0:d 1:d 2:d  # others go whole, in order
equal-progress chunk=8, 9+1 3+1 9+1 = 1:2 0:3 2:3 | 1:1 0:3 2:4 | 2:2 0:3  # equal shares
equal-progress max_prefills=1 chunk=8, 12+1 3+1 = 0:8 | 0:4 | 1:3
shortest-uncached page_size=1 chunk=4, 10+1 2+1@1 2+1@1 = 0:4 | 0:1 1:2 2:1 | 2:1 0:3 | 0:2
sglang page_size=1 pages=602 max_len=602 max_batch=2 chunk=8, 1+601 1+400@601 1+400@601 = \
    0:1 | 0:d x600 | 1:1 | ...  # the ratio begins anew after a pause
shortest-uncached chunk=8, 12+1 3+1 2+1 = 2:2 1:3 0:3 | 0:8 | 0:1
threshold-under-contention chunk=8, 20+1 = 0:8 x2 | 0:4  # alone it has all
threshold-under-contention chunk=8, 20+1 3+1 = 0:2 1:2 | 0:2 1:1 | 0:8 x2
vllm-v1 long_prefill_token_threshold=1 long_prefill_token_threshold_adaptive=True, 5+1 9+1 = \
    0:4 1:4 | 0:1 1:4 | 1:1  # the cap is a fair share if that is more
sglang page_size=1 pages=49 max_len=40 chunk=14, 7+20 7+20 = 0:7 | ...  # 7 + 7, 0.7 * 20, 20 + 1
sglang page_size=1 pages=50 max_len=40 chunk=14, 7+20 7+20 = 0:7 1:7 | ...  # are less than 50
no-evict pages=10 max_len=40 chunk=16, 9+11 9+12 = 0:9 | 0:d x10 | 1:9 | 1:d x11  # 5 + 6 pages
tgi pages=10 max_len=40 chunk=16, 9+11 9+12 = 0:9 | 0:d x10 | 1:9 | 1:d x11
tgi max_len=4, 2+2 2+2 2+1 = 0:2 1:2 | 2:2 | 0:d 1:d  # asks the queue twice when it was idle
tgi max_len=4, 2+1 2+1 2+1 2+1 2+1 = 0:2 1:2 | 2:2 3:2 | 4:2
tgi waiting_served_ratio=1.0 max_waiting_tokens=6, 4+20 4+20 4+20@1 4+20@7 4+20@7 4+20@7 = \
    0:4 1:4 | 0:d 1:d x5 | 2:4 | 0:d 1:d 2:d | 3:4 4:4 5:4 | ...  # waits for many or for long
fastgen pages=5 max_len=20 chunk=16, 7+13 8+4 = 0:7 1:8 | 0:d 1:d | 1:d x2 | 0:d x11  # no fifth
hf page_size=1 pages=20 max_len=20 chunk=20 margin_percent=0, 8+4 7+4 2+4@1 = \
    0:8 1:7 | 0:d 1:d 2:2 | ...
hf page_size=1 pages=20 max_len=20 chunk=20 margin_percent=30, 8+4 7+4 2+4@1 = \
    0:8 1:7 | 0:d 1:d x2 | ...  # 5 of 20 pages are free: a quarter
peak page_size=1 pages=34 max_len=30 chunk=40, 10+8 20+2 = 0:10 | ...
peak page_size=1 pages=35 max_len=30 chunk=40, 10+8 20+2 = 0:10 1:20 | ...  # 10 + 20 + 2 * 2 fit
ppas chunk=16 pressed_budget=4, 20+9 20+4@2 20+4@3 = \
    0:16 | 0:4 | 0:d 1:15 | 0:d 1:3 | 0:d 1:2 2:1 | ...  # two prefills press, with a decode
shortest-uncached chunk=8, 30+1 3+1@1 20+1@2 7+1@3 = \
    0:8 | 0:5 1:3 | 0:8 | 0:4 3:4 | ...  # 20 is more than is left of the first, 7 is less
"""


@pytest.mark.parametrize("row", RULES.replace("\\\n", "").strip().splitlines())
def test_a_policy_does_what_its_source_says(row):
    given, expected = row.split("  #")[0].split(" = ")
    head, load = given.split(", ")
    policy, *options = head.split()
    options = {key: literal_eval(value) for key, value in (each.split("=") for each in options)}
    expected = expected.strip()
    steps = World(policy, load, **options).run()
    if expected.endswith("..."):
        assert steps.startswith(expected.removesuffix("..."))
    else:
        assert steps == expected


SYSTEM_PROMPT = [*range(1, 17)]  # four pages


def test_vllm_v1_lets_no_victim_in_that_would_fit_for_pages_that_others_hold():
    world = World("vllm-v1", page_size=1, pages=9, max_batch=2, max_len=9, shares=True)
    for _ in range(2):
        world.add([1, 2, 3, 4], 4)
    (victim,) = world.steps_until_preempted()
    assert world.step() == f"{1 - victim}:d"


def test_vllm_v1_finds_the_pages_that_the_same_batch_computes():
    world = World("vllm-v1", chunk=64, shares=True)
    for tail in (2, 3, 4):
        world.add([*SYSTEM_PROMPT, tail])
    assert world.step() == "0:17 1:1 2:1"
    with_caching, without = (
        Engine(tiny_model(), policy="vllm-v1", max_len=64, page_size=4, prefix_caching=caching)
        for caching in (True, False)
    )
    prompts = [[*SYSTEM_PROMPT, tail] for tail in (2, 3, 4)]
    params = SamplingParams(6, logprobs=True)
    shared = with_caching.generate(prompts, params)
    assert [completion.cached_tokens for completion in shared] == [0, 16, 16]
    for ours, expected in zip(shared, without.generate(prompts, params), strict=True):
        assert ours.tokens == expected.tokens
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-10)


def test_only_those_admitted_for_a_batch_may_read_what_it_computes():
    world = World("vllm-v1", chunk=64, shares=True)
    writer, reader = (world.add([*SYSTEM_PROMPT, tail]) for tail in (2, 3))
    batch = world.scheduler.next_batch()
    assert list(chunks_come_next(world.scheduler, batch, {writer.id, reader.id})) == []
    breaches = list(chunks_come_next(world.scheduler, batch, {writer.id}))  # one has run before
    assert [breach.request for breach in breaches] == [writer.id] * 4
    assert "is written, and others read it" in breaches[0].observation


def test_pages_that_an_aborted_request_would_have_filled_are_not_read(monkeypatch):
    model = tiny_model()
    engine = Engine(model, policy="vllm-v1", max_len=64, page_size=4, prefix_caching=True)
    params = SamplingParams(6, logprobs=True)
    prompts = [[*SYSTEM_PROMPT, tail] for tail in (2, 3)]
    (expected,) = Engine(model, max_len=64).generate(prompts[1:], params)
    first, _ = (engine.add_request(prompt, params) for prompt in prompts)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", None)
        with pytest.raises(TypeError):
            engine.step()
    engine.abort(first)
    (completion,) = completions_of(finish(engine)).values()
    assert completion.preemptions == 1
    assert completion.tokens == expected.tokens
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-10)


def test_sglang_retracts_the_fewest_outputs_and_adapts_its_ratio():
    world = World("sglang", "4+30", page_size=1, pages=40, max_len=40, chunk=40)
    scheduler = world.scheduler
    for _ in range(5):
        world.step()
    assert scheduler.ratio == pytest.approx(0.7 - 4 * (0.7 - 0.098) / 600)
    scheduler.ratio = 0.0  # admits too much
    world.add(5, 10)
    world.add(4, 12)
    world.step()
    assert world.steps_until_preempted() == [1]  # as many outputs as the last, the longer prompt
    old, _, young = world.requests
    outputs = len(old.tokens) - 4 + len(young.tokens) - 4
    assert scheduler.ratio == pytest.approx(min(1, (outputs + 20 * 2) / (30 + 12 + 1)))


def test_fastgen_flushes_in_a_deadlock():
    world = World("fastgen", "8+12 8+12 1+2", pages=5, max_len=20, chunk=16)
    while not world.requests[1].preemptions:
        world.step()
    assert world.requests[0].preemptions == 0
    assert world.scheduler.waiting[-1].id == 1  # at the back


def test_hf_preempts_among_those_that_find_no_memory_and_closes_the_queue():
    world = World("hf", "3+5 2+7 1+1@5", page_size=3, pages=4, chunk=2)
    assert world.steps_until_preempted() == [0]  # the older one
    assert [request.id for request in world.scheduler.waiting] == [2, 0]  # at the back
    # until 1 has ended nobody enters, although there is room for the next
    assert world.run().startswith("1:d x4 | 2:1 0:1 | ")


def test_a_page_of_a_running_prefill_is_not_computed_twice():
    prompt = [1] * 16
    for policy, chunks in (
        ("sarathi-serve", "0:16 1:16"),
        ("wait-for-prefix", "0:16 2:5"),  # who shares nothing passes
    ):
        world = World(policy, chunk=37, shares=True)
        for tokens in (prompt, prompt, [2] * 5):
            world.add(tokens, 2)
        assert world.step().startswith(chunks)
        world.run()
        cached_tokens = [request.cached_tokens for request in world.requests]
        assert cached_tokens == [0, 12 if policy == "wait-for-prefix" else 0, 0]


def test_the_peak_is_the_most_that_requests_ever_hold():
    draw = Random(0)
    scheduler = World("peak", page_size=1).scheduler
    for _ in range(200):
        sizes = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(draw.randint(1, 6))]
        requests = [Request(i, [0] * prompt, prompt, new) for i, (prompt, new) in enumerate(sizes)]
        held = [sum(prompt + time for prompt, new in sizes if time <= new) for time in range(1, 31)]
        assert scheduler.peak_tokens(requests) == max(held)


def test_ppas_counts_a_recomputed_request_past_its_prompt_as_a_decode():
    world = World("ppas", "1+30 4+9", chunk=5, pressed_budget=2)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(world.requests[1])
    assert world.step() == "0:d 1:4"  # its prompt; 3 tokens of output are left
    world.add(20)
    assert world.step() == "0:d 1:3 2:1"


def test_nano_vllm_prefills_a_victim_to_its_last_token():
    world = World("nano-vllm", "4+20 2+9", chunk=3)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(world.requests[1])  # of 4 tokens
    steps = [world.step() for _ in range(3)]
    assert steps == ["1:3", "1:d", "0:d 1:d"]  # alone, as prompts are


def test_shortest_uncached_counts_what_is_cached_as_computed():
    world = World("shortest-uncached", chunk=4, shares=True)
    world.add([1] * 16, 1)
    world.run()
    world.add([4] * 5, 1)
    world.add([1] * 16 + [2, 3], 1)  # long, but cached
    assert world.step() == "2:2 1:2"


def test_vtc_serves_the_user_with_the_fewest_tokens():
    world = World("vtc", max_batch=1, chunk=16)
    for user in "aaab":
        world.add(6, 2, user=user)
    assert world.run() == "0:6 | 0:d | 3:6 | 3:d | 1:6 | 1:d | 2:6 | 2:d"
    served = world.scheduler.waiting.served
    assert served == {"a": 3 * (6 + 2 * 2), "b": 6 + 2 * 2}
    world.add(6, 2, user="a")
    world.add(6, 2, user="c")  # new: lifted to the least of those that wait
    assert served["c"] == served["a"] == 30
    world.add(6, 2, user="b")  # lifted, too; of equals, who came first long ago is served first
    assert world.run() == "4:6 | 4:d | 6:6 | 6:d | 5:6 | 5:d"


def test_vtc_is_fair_between_the_users_of_an_engine():
    engine = Engine(tiny_model(), policy="vtc", max_batch=1, max_len=32)
    for user in "aaab":
        engine.add_request([1, 2, 3], SamplingParams(2), user=user)
    assert list(completions_of(finish(engine))) == [0, 3, 1, 2]


class Counting(deque):
    """A queue that counts how many of its requests were looked at."""

    looked_at = 0

    def __iter__(self):
        for request in super().__iter__():
            self.looked_at += 1
            yield request


@pytest.mark.parametrize("policy", ["hf", "sarathi-serve"])
def test_a_decision_looks_at_few_of_those_that_wait(policy):
    world = World(policy, " ".join(["9+9"] * 1000), max_batch=2)
    queue = world.scheduler.waiting = Counting(world.scheduler.waiting)
    world.step()
    world.step()
    assert len(world.scheduler.running) == 2 and queue.looked_at <= 4


def test_vtc_looks_at_users_and_not_at_their_requests(monkeypatch):
    world = World("vtc", max_batch=2)
    for number in range(1000):
        world.add(9, user="ab"[number % 2])
    monkeypatch.setattr(type(world.scheduler.waiting), "__iter__", None)
    assert world.step() == "0:8"
