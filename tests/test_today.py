"""What today's engines decide, and what their users ask for: each policy keeps its rule."""

from dataclasses import dataclass, field
from importlib.util import find_spec
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
from tests.helpers import tiny_model, with_slow

RANDOM_LOADS = 40  # of 2,000 that `bench.py check NAME --random-loads 2000` simulates


class World:
    """A scheduler that is driven by hand; each prompt is of tokens of its own, unless given."""

    def __init__(self, policy, page_size=4, pages=64, max_batch=8, shares=False, **options):
        options = dict(chunk=8, max_len=64) | options
        self.scheduler = make_scheduler(
            policy, make_pages(pages, page_size, shares), max_batch=max_batch, **options
        )
        self.ids = 0

    def add(self, prompt, max_new_tokens=4, user=""):
        """Queue a prompt: its length, or its tokens. Returns the Request."""
        tokens = [1000 + self.ids] * prompt if isinstance(prompt, int) else list(prompt)
        request = Request(
            self.ids, tokens, len(tokens), max_new_tokens, self.ids, service=Service(user=user)
        )
        self.ids += 1
        self.scheduler.add(request)
        return request

    def step(self):
        """One iteration: {request id: the length of its chunk, "d" for a decode}."""
        batch = self.scheduler.next_batch()
        chunks = {c.request.id: "d" if c.request.is_decoding else c.length for c in batch}
        tokens = [0 if chunk.yields_token else None for chunk in batch]
        self.scheduler.advance(batch, tokens, 0.0)
        return chunks

    def run(self):
        """All iterations until nothing is left."""
        return [self.step() for _ in iter(lambda: bool(self.scheduler.requests), False)]


def batches(policy, text, **options):
    """The batches of requests "prompt+output ..." that are all there at the beginning, as text."""
    world = World(policy, **options)
    for lengths in text.split():
        world.add(*map(int, lengths.split("+")))
    return " | ".join(
        " ".join(f"{i}:{length}" for i, length in batch.items()) for batch in world.run()
    )


@pytest.mark.parametrize("policy", with_slow(TODAY, fast=["vllm-v1", "sglang", "hf", "nano-vllm"]))
def test_every_policy_keeps_the_rules_on_random_loads(policy):
    verdict = check_random_loads(policy, RANDOM_LOADS)
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

# policy (options), prompt+output of each request = the chunks of each iteration, d for a decode
RULES = """
vllm-v1 chunk=8, 5+3 12+2 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 | 1:d  # decodes inside the budget
vllm-v1 chunk=2, 1+3 1+3 1+3 = 0:1 1:1 | 0:d 1:d | 0:d 1:d | 2:1 | 2:d | 2:d  # nobody beyond it
vllm-v1 chunk=8 long_prefill_token_threshold=3, 5+1 9+1 = 0:3 1:3 | 0:2 1:3 | 1:3  # the cap
vllm-v1 chunk=6 long_prefill_token_threshold=5, 6+1 = 0:6  # a lonely prompt is not cut
vllm-v1 chunk=4 prefill_schedule_interval=3, 3+5 6+1 = 0:3 1:1 | 0:d | 0:d | 0:d 1:3 | 0:d | 1:2
vllm-v1 chunk=2 prefill_schedule_interval=3, 1+4 2+1 1+1 = 0:1 1:1 | 0:d 1:1 | 0:d 2:1 | 0:d
interval every=0 chunk=4, 3+3 6+2 = 0:3 1:1 | 1:4 | 1:1 | 0:d 1:d | 0:d  # prefill first
interval every=1 chunk=4, 3+4 6+2 = 0:3 1:1 | 0:d | 1:4 | 0:d | 1:1 | 0:d 1:d  # chunked-only
interval every=2 chunk=4, 3+6 6+2 = 0:3 1:1 | 0:d | 0:d | 1:4 | 0:d | 0:d | 1:1 | 0:d 1:d
sglang chunk=4, 3+3 6+2 = 0:3 1:1 | 1:4 | 1:1 | 0:d 1:d | 0:d  # prefill first, alone
free-slots min_free_slots=2 max_batch=2 chunk=8, 2+3 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 0:d | 2:2
free-slots min_free_slots=1 max_batch=2 chunk=8, 2+3 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 2:2 | 0:d
lmdeploy max_batch=2 chunk=4, 2+4 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 0:d | 0:d | 2:2  # one runs: half
lmdeploy max_batch=2 chunk=4 prefill_interval=1, 2+4 2+2 2+1 = 0:2 1:2 | 0:d 1:d | 2:2 | 0:d | 0:d
lmdeploy max_batch=4 chunk=4, 2+3 2+3 2+1 = 0:2 1:2 | 0:d 1:d | 0:d 1:d | 2:2
lmdeploy max_batch=2 chunk=4, 2+4 2+2 4+1 = 0:2 1:2 | 0:d 1:d | 2:4 | 0:d | 0:d  # a budget waits
small-chunks-wait chunk=4 least_chunk=3, 2+3 2+2 6+1 = 0:2 1:2 | 0:d 1:d | 0:d 2:3 | 2:3
small-chunks-wait chunk=4 least_chunk=3 max_delay=0, 2+2 2+2 6+1 = 0:2 1:2 | 0:d 1:d 2:2 | 2:4
sglang-mixed chunk=4, 3+3 6+2 = 0:3 1:1 | 0:d 1:3 | 0:d 1:2 | 1:d  # decodes ride along
nano-vllm chunk=4, 6+2 3+2 1+2 = 0:4 | 0:2 | 1:3 2:1 | 0:d 1:d 2:d  # only the first is cut
nano-vllm chunk=4, 2+2 3+2 2+2 = 0:2 | 1:3 | 2:2 | 0:d 1:d 2:d  # others go whole, in order
equal-progress chunk=8, 9+1 3+1 9+1 = 1:2 0:3 2:3 | 1:1 0:3 2:4 | 2:2 0:3  # equal shares
equal-progress max_prefills=1 chunk=8, 12+1 3+1 = 0:8 | 0:4 | 1:3
shortest-uncached chunk=8, 12+1 3+1 2+1 = 2:2 1:3 0:3 | 0:8 | 0:1
threshold-under-contention chunk=8, 20+1 = 0:8 | 0:8 | 0:4  # alone it has all
threshold-under-contention chunk=8, 20+1 3+1 = 0:2 1:2 | 0:2 1:1 | 0:8 | 0:8
"""


@pytest.mark.parametrize("row", RULES.strip().splitlines())
def test_a_policy_does_what_its_source_says(row):
    given, expected = row.split("  #")[0].split(" = ")
    head, load = given.split(", ")
    policy, *options = head.split()
    options = {key: int(value) for key, value in (option.split("=") for option in options)}
    assert batches(policy, load, **options) == expected


def test_interval_1_is_chunked_only_and_0_is_prefill_first():
    load = "9+5 3+3 14+2 5+6 1+4"
    assert batches("interval", load, every=1) == batches("chunked-only", load)
    for batch in batches("interval", load, every=0).split(" | "):
        assert batch.endswith("d") or "d" not in batch


def test_vllm_v1_gives_memory_chunk_by_chunk_if_all_would_fit():
    world = World("vllm-v1", pages=16, chunk=8)
    request = world.add(30)
    held = []
    while len(request.tokens) == 30:
        world.step()
        held.append(len(request.pages))
    assert held == [2, 4, 6, 8]
    world = World("vllm-v1", pages=16, chunk=8)
    world.add(30)
    world.step()  # takes 2 of 16 pages
    world.add(60)
    assert world.step() == {0: 8} and len(world.scheduler.waiting) == 1  # 60 tokens do not fit


def test_vllm_v1_caps_at_a_fair_share_if_that_is_more():
    options = {"long_prefill_token_threshold": 1, "long_prefill_token_threshold_adaptive": True}
    assert batches("vllm-v1", "5+1 9+1", chunk=8, **options) == "0:4 1:4 | 0:1 1:4 | 1:1"


def test_vllm_v1_lets_nobody_in_when_it_has_preempted():
    world = World("vllm-v1", page_size=1, pages=16, max_len=16, chunk=16)
    for prompt in (5, 4, 4):
        world.add(prompt, 9)
    world.step()
    world.step()
    world.add(1)
    while not world.scheduler.next_batch().preempted:
        world.step()
    assert world.scheduler.batch.preempted == [2]
    assert [r.id for r in world.scheduler.waiting] == [2, 3]
    # a victim whose pages others hold, too, would fit at once
    world = World("vllm-v1", page_size=1, pages=9, max_batch=2, max_len=9, shares=True)
    for _ in range(2):
        world.add([1, 2, 3, 4], 4)
    while world.scheduler.requests:
        batch = world.scheduler.next_batch()
        assert not {chunk.request.id for chunk in batch} & {*batch.preempted}
        world.step()


SYSTEM_PROMPT = [*range(1, 17)]  # four pages


def test_vllm_v1_finds_the_pages_that_the_same_batch_computes():
    world = World("vllm-v1", chunk=64, shares=True)
    for tail in (2, 3, 4):
        world.add([*SYSTEM_PROMPT, tail])
    assert world.step() == {0: 17, 1: 1, 2: 1}
    with_caching, without = (
        Engine(tiny_model(), policy="vllm-v1", max_len=64, page_size=4, prefix_caching=caching)
        for caching in (True, False)
    )
    prompts = [[*SYSTEM_PROMPT, tail] for tail in (2, 3, 4)]
    params = SamplingParams(6, logprobs=True)
    shared, alone = (engine.generate(prompts, params) for engine in (with_caching, without))
    assert [completion.cached_tokens for completion in shared] == [0, 16, 16]
    for ours, expected in zip(shared, alone, strict=True):
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
    events = []
    while engine.has_work:
        events += engine.step()
    (completion,) = [event.completion for event in events if event.completion]
    assert completion.preemptions == 1
    assert completion.tokens == expected.tokens
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-10)


@pytest.mark.parametrize("pages, admitted", [(49, 1), (50, 2)])
def test_sglang_expects_a_share_of_the_outputs(pages, admitted):
    """7 + 7 tokens, 0.7 * 20 of who runs, 20 and a page of one of who waits: 49 must be less."""
    world = World("sglang", page_size=1, pages=pages, max_len=40, chunk=14)
    world.add(7, 20)
    world.add(7, 20)
    assert len(world.step()) == admitted


def test_sglang_retracts_the_fewest_outputs_and_adapts_its_ratio():
    world = World("sglang", page_size=1, pages=40, max_len=40, chunk=40)
    scheduler = world.scheduler
    old = world.add(4, 30)
    for _ in range(5):
        world.step()
    assert scheduler.ratio == pytest.approx(0.7 - 4 * (0.7 - 0.098) / 600)
    scheduler.ratio = 0.0  # admits too much
    longer = world.add(5, 10)
    young = world.add(4, 12)
    world.step()
    while not scheduler.next_batch().preempted:
        world.step()
    assert scheduler.batch.preempted == [longer.id]  # as many outputs, the longer prompt
    outputs = len(old.tokens) - 4 + len(young.tokens) - 4
    assert scheduler.ratio == pytest.approx(min(1, (outputs + 20 * 2) / (30 + 12 + 1)))


def test_no_evict_reserves_prompt_and_output_and_never_preempts():
    for policy in ("no-evict", "tgi"):
        world = World(policy, pages=10, max_len=40)
        first = world.add(9, 11)
        second = world.add(9, 12)
        world.step()
        assert len(first.pages) == 5 and second in world.scheduler.waiting  # 5 + 6 pages of 10
        world.run()
        assert first.preemptions == second.preemptions == 0


def test_fastgen_lets_a_decode_wait_and_flushes_in_a_deadlock():
    world = World("fastgen", page_size=4, pages=5, max_len=20, chunk=16)
    first = world.add(7, 13)
    second = world.add(8, 4)
    assert world.step() == {0: 7, 1: 8}
    assert world.step() == {0: "d", 1: "d"}  # the second takes the fifth page
    assert world.step() == {1: "d"}  # the first waits for one, and keeps its own
    assert first.preemptions == 0
    world.run()
    assert second.preemptions == first.preemptions == 0
    world = World("fastgen", page_size=4, pages=5, max_len=20, chunk=16)
    first = world.add(8, 12)
    second = world.add(8, 12)
    world.add(1, 2)
    while not second.preemptions:
        world.step()
    assert first.preemptions == 0
    assert [r.id for r in world.scheduler.waiting] in ([2, 1], [1])  # at the back


def test_tgi_waits_for_many_or_for_long():
    world = World("tgi", pages=64, waiting_served_ratio=1.0, max_waiting_tokens=6)
    for _ in range(2):
        world.add(4, 20)
    assert world.step() == {0: 4, 1: 4}
    world.add(4, 20)  # one, and two run
    decodes = 0
    while 2 not in world.step():
        decodes += 1
    assert decodes == 5
    for _ in range(3):
        world.add(4, 20)  # as many as run: at once, but after a decode batch
    assert [*world.step().values()] == ["d"] * 3
    assert world.step() == {3: 4, 4: 4, 5: 4}


def test_tgi_asks_the_queue_twice_when_it_was_idle():
    assert batches("tgi", "2+2 2+2 2+1", max_len=4) == "0:2 1:2 | 2:2 | 0:d 1:d"
    assert batches("tgi", "2+1 2+1 2+1 2+1 2+1", max_len=4) == "0:2 1:2 | 2:2 3:2 | 4:2"


def test_hf_lets_nobody_in_below_its_margin():
    for margin, admitted in ((0, 3), (30, 2)):
        world = World("hf", page_size=1, pages=20, max_len=20, chunk=20, margin_percent=margin)
        for prompt in (8, 7):
            world.add(prompt)
        world.step()
        world.add(2)  # 5 of 20 pages are free: a quarter
        assert len(world.step()) == admitted


def test_hf_preempts_among_those_that_find_no_memory_and_closes_the_queue():
    world = World("hf", page_size=3, pages=4, chunk=2)
    world.add(3, 5)
    world.add(2, 7)
    for _ in range(5):
        world.step()
    world.add(1, 1)
    batch = world.scheduler.next_batch()
    assert [chunk.request.id for chunk in batch] == [1] and batch.preempted == [0]
    assert [r.id for r in world.scheduler.waiting] == [2, 0]  # the older one, at the back
    steps = world.run()
    assert steps[:4] == [{1: "d"}] * 4  # until it has ended, although there is room for the next
    assert steps[4] == {2: 1, 0: 1}


def test_a_page_of_a_running_prefill_is_not_computed_twice():
    prompt = [1] * 16
    for policy, computed in (("sarathi-serve", 16 + 16 + 5), ("wait-for-prefix", 16 + 4 + 5)):
        world = World(policy, chunk=32, shares=True)
        requests = [world.add(prompt, 2), world.add(prompt, 2), world.add(5, 2)]
        prefill = [length for batch in world.run() for length in batch.values() if length != "d"]
        assert sum(prefill) == computed
        assert requests[1].cached_tokens == (12 if policy == "wait-for-prefix" else 0)
    world = World("wait-for-prefix", chunk=24, shares=True)
    for tokens in (prompt, prompt, [2] * 5):
        world.add(tokens, 2)
    assert world.step() == {0: 16, 2: 5}  # who shares nothing passes


def test_the_peak_is_the_most_that_requests_ever_hold():
    draw = Random(0)
    scheduler = World("peak", page_size=1).scheduler
    for _ in range(200):
        sizes = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(draw.randint(1, 6))]
        requests = [Request(i, [0] * prompt, prompt, new) for i, (prompt, new) in enumerate(sizes)]
        held = [sum(prompt + time for prompt, new in sizes if time <= new) for time in range(1, 31)]
        assert scheduler.peak_tokens(requests) == max(held)
    for pages, admitted in ((34, 1), (35, 2)):  # 10 + 20 + 2 * 2 at most, and less than all
        world = World("peak", page_size=1, pages=pages, max_len=30, chunk=40)
        world.add(10, 8)
        world.add(20, 2)
        assert len(world.step()) == admitted


def test_ppas_shrinks_the_budget_only_under_pressure():
    world = World("ppas", chunk=16, pressed_budget=4, pages=64)
    world.add(20, 9)
    assert world.step() == {0: 16}  # a prefill, and no decode
    assert world.step() == {0: 4}
    world.add(20)
    assert world.step() == {0: "d", 1: 15}  # one prefill presses nobody
    world.add(20)
    assert world.step() == {0: "d", 1: 3}  # two do
    assert world.step() == {0: "d", 1: 2, 2: 1}


def test_ppas_counts_a_recomputed_request_past_its_prompt_as_a_decode():
    world = World("ppas", chunk=5, pressed_budget=2)
    world.add(1, 30)
    victim = world.add(4, 9)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(victim)
    assert world.step() == {0: "d", 1: 4}  # its prompt; 3 tokens of output are left
    world.add(20)
    assert world.step() == {0: "d", 1: 3, 2: 1}


def test_nano_vllm_prefills_a_victim_to_its_last_token():
    world = World("nano-vllm", chunk=3, pages=64)
    world.add(4, 20)
    victim = world.add(2, 9)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(victim)  # of 4 tokens
    assert [world.step() for _ in range(2)] == [{1: 3}, {1: "d"}]  # alone, as prompts are
    assert world.step() == {0: "d", 1: "d"}


def test_shortest_uncached_counts_what_is_cached_as_computed():
    world = World("shortest-uncached", chunk=4, shares=True)
    world.add([1] * 16, 1)
    world.run()
    long_but_cached = [1] * 16 + [2, 3]
    short = [4] * 5
    world.add(short, 1)
    world.add(long_but_cached, 1)
    assert world.step() == {2: 2, 1: 2}


def test_a_long_prompt_that_has_begun_leaves_budget_to_shorter_ones():
    world = World("shortest-uncached", chunk=8)
    world.add(30, 1)
    assert world.step() == {0: 8}
    world.add(3, 1)
    assert world.step() == {0: 5, 1: 3}
    world.add(20, 1)  # longer than what is left of the first: 17
    assert world.step() == {0: 8}
    world.add(7, 1)
    assert world.step() == {0: 4, 3: 4}  # it gets a page in any case


def test_vtc_serves_the_user_with_the_fewest_tokens():
    world = World("vtc", max_batch=1, chunk=16)
    for user in "aaab":
        world.add(6, 2, user=user)
    order = []
    for batch in world.run():
        order += [i for i in batch if i not in order]
    assert order == [0, 3, 1, 2]
    served = world.scheduler.served
    assert served == {"a": 3 * (6 + 2 * 2), "b": 6 + 2 * 2}
    world.add(6, 2, user="a")
    world.add(6, 2, user="c")  # new: lifted to the least of those that wait
    assert served["c"] == served["a"] == 30
    world.add(6, 2, user="b")  # lifted, too; of equals, who came first long ago is served first
    assert [*world.step()] == [4]
    assert [i for step in world.run() for i in step if step[i] != "d"] == [6, 5]


def test_vtc_is_fair_between_the_users_of_an_engine():
    engine = Engine(tiny_model(), policy="vtc", max_batch=1, max_len=32)
    for user in "aaab":
        engine.add_request([1, 2, 3], SamplingParams(2), user=user)
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == [0, 3, 1, 2]
