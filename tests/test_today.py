"""Today's engines and their users' remedies, held against tables by hand, models, the engines."""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from random import Random

import pytest

from engine import Engine
from lab.simulator.referee import check_random_loads, rules_of
from policies import ALL_POLICIES, TODAY
from policies.cards import CARDS
from policies.referee import chunks_come_next
from sampling import SamplingParams
from tests.beside import AMPLE, ENGINES, TIGHT, Kind, differences
from tests.by_hand import World, check_row, request_of, rows_of
from tests.helpers import completions_of, finish, tiny_model, with_slow

RANDOM_LOADS = 40  # of 2,000 that `bench.py check NAME --random-loads 2000` simulates


@pytest.mark.parametrize("policy", with_slow(TODAY, fast=["vllm-v1", "sglang", "hf", "nano-vllm"]))
def test_every_policy_keeps_the_rules_on_random_loads(policy):
    verdict = check_random_loads(policy, range(RANDOM_LOADS))
    assert verdict.violation is None
    assert verdict.iterations > 20 * RANDOM_LOADS


def test_only_policies_that_say_so_may_drop_decodes():
    drops = {name for name in ALL_POLICIES if "no decode dropped" not in rules_of(name)}
    assert drops == {"ppas", "fastgen", "hf", "nano-vllm"}


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
    assert all(bool(card.engine) == bool(card.version) for card in CARDS.values())


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
        return cls(
            blocks=load.sizes.pages,
            block_size=load.sizes.page_size,
            budget=load.sizes.chunk,
            max_seqs=load.sizes.max_batch,
            threshold=load.options["long_prefill_token_threshold"],
        )

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


# ---- Each rule by hand --------------------------------------------------------------------------

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
fastgen pages=5 max_len=20 chunk=16, 8+12 8+12 1+2 = \
    0:8 1:8 | 0:d x4 | 0:d 2:1 | 0:d 2:d | 0:d x5 | 1:9 | 1:d x10  # a deadlock: 1 goes to the back
hf page_size=3 pages=4 chunk=2, 3+5 2+7 1+1@5 = \
    0:2 | 0:1 1:1 | 0:d 1:1 | 0:d 1:d x2 | 1:d x4 | 2:1 0:1 | 0:2 x3  # 1 has ended
wait-for-prefix chunk=37, aaaaaaaaaaaaaaaa+2 aaaaaaaaaaaaaaaa+2 bbbbb+2 = \
    0:16 2:5 | 0:d 2:d 1:4 | 1:d  # who shares waits
sarathi-serve chunk=37, aaaaaaaaaaaaaaaa+2 aaaaaaaaaaaaaaaa+2 bbbbb+2 = 0:16 1:16 2:5 | 0:d 1:d 2:d
vllm-v1 page_size=1 pages=9 max_batch=2 max_len=9, abcd+4 abcd+4 = \
    0:4 1:1 | 0:d 1:d x2 | 0:d | 1:d  # no victim for shared pages
vllm-v1 chunk=64, abcdabcdabcdabcdx+4 abcdabcdabcdabcdy+4 abcdabcdabcdabcdz+4 = \
    0:17 1:1 2:1 | 0:d 1:d 2:d x3  # in one batch
shortest-uncached chunk=4, aaaaaaaaaaaaaaaa+1 ddddd+1@4 aaaaaaaaaaaaaaaabc+1@4 = \
    0:4 x4 | 2:2 1:2 | 1:3
vtc max_batch=1 chunk=16, 6+2/a 6+2/a 6+2/a 6+2/b 6+2@8/a 6+2@8/c 6+2@8/b = \
    0:6 | 0:d | 3:6 | 3:d | 1:6 | 1:d | 2:6 | 2:d | 4:6 | 4:d | 6:6 | 6:d | 5:6 | 5:d
"""


@pytest.mark.parametrize("row", rows_of(RULES))
def test_a_policy_does_what_its_source_says(row):
    check_row(row)


EXAMPLE = r"`((?:\w+=\d+ ?)+), ([\w+ ]+)`[^`]*?`((?:\.\.\. \| )?0:[^`]*)`,? theirs `([^`]+)`"
EXAMPLES = [
    (name, *example)
    for name, policy in TODAY.items()
    for example in re.findall(EXAMPLE, " ".join(policy.__doc__.split()))
]


@pytest.mark.parametrize("name, sizes, load, batches, theirs", EXAMPLES)
def test_an_example_of_what_differs_from_an_engine_is_true_here(name, sizes, load, batches, theirs):
    options = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", sizes)}
    steps = World(name, load, **options).steps()
    text = " | ".join(["", *steps, ""])
    expected = batches.removeprefix("...") if batches.startswith("...") else f" | {batches}"
    assert f"{expected} | " in text
    assert batches.startswith("...") or text.startswith(expected)
    assert theirs != batches


def test_each_difference_from_an_engine_has_its_example():
    differing = {name for name, cls in TODAY.items() if "Differs from theirs" in cls.__doc__}
    assert differing == {name for name, *_ in EXAMPLES}
    assert len(EXAMPLES) == 15


PROMPTS = [[*range(1, 17), tail] for tail in (2, 3)]  # four pages are alike
PARAMS = SamplingParams(6, logprobs=True)


def expect_equal(completions, prompts):
    """Each has the tokens and log probabilities that it has without prefix caching."""
    expected = Engine(tiny_model(), max_len=64).generate(prompts, PARAMS)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-10)


def test_pages_that_the_same_batch_computes_are_read():
    engine = Engine(
        tiny_model(),
        policy="vllm-v1",
        max_len=64,
        page_size=4,
        prefix_caching=True,
    )
    completions = engine.generate(PROMPTS, PARAMS)
    assert [completion.cached_tokens for completion in completions] == [0, 16]
    expect_equal(completions, PROMPTS)


def test_pages_that_an_aborted_request_would_have_filled_are_not_read(monkeypatch):
    model = tiny_model()
    engine = Engine(
        model,
        policy="vllm-v1",
        max_len=64,
        page_size=4,
        prefix_caching=True,
    )
    first, _ = (engine.add_request(prompt, PARAMS) for prompt in PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", None)
        with pytest.raises(TypeError):
            engine.step()
    engine.abort(first)
    completions = list(completions_of(finish(engine)).values())
    assert completions[0].preemptions == 1
    expect_equal(completions, PROMPTS[1:])


def test_only_those_admitted_for_a_batch_may_read_what_it_computes():
    scheduler = World("vllm-v1", "abcdx+4 abcdy+4").scheduler
    batch = scheduler.next_batch()
    assert list(chunks_come_next(scheduler, batch, {0, 1})) == []
    breaches = list(chunks_come_next(scheduler, batch, {0}))  # one has run before
    assert [breach.request for breach in breaches] == [0]


def test_sglang_retracts_the_fewest_outputs_and_adapts_its_ratio():
    world = World(
        "sglang",
        "4+30",
        page_size=1,
        pages=40,
        max_len=40,
        chunk=40,
    )
    scheduler = world.scheduler
    for _ in range(5):
        world.step()
    assert scheduler.ratio == pytest.approx(0.7 - 4 * (0.7 - 0.098) / 600)
    scheduler.ratio = 0.0  # admits too much
    scheduler.RETRACT_STEPS = 5
    world.add("5+10")
    world.add("4+12")
    while not scheduler.next_batch().preempted:
        world.step()
    assert scheduler.batch.preempted == [1]  # as many outputs as the last, the longer prompt
    old, _, young = world.requests
    outputs = len(old.tokens) - 4 + len(young.tokens) - 4
    assert scheduler.ratio == pytest.approx((outputs + 5 * 2) / (30 + 12 + 1))


def test_the_peak_is_the_most_that_requests_ever_hold():
    draw = Random(0)
    scheduler = World("peak", page_size=1).scheduler
    for _ in range(200):
        sizes = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(draw.randint(1, 6))]
        requests = [request_of(i, *lengths) for i, lengths in enumerate(sizes)]
        held = [sum(prompt + time for prompt, new in sizes if time <= new) for time in range(1, 31)]
        assert scheduler.peak_tokens(requests) == max(held)


@pytest.mark.parametrize(
    "policy, load, sizes, steps",
    [
        # a prompt of 4; 3 tokens of its output are no prefill
        ("ppas", "1+30 4+9", dict(chunk=5, pressed_budget=2), ["0:d 1:4", "0:d 1:3"]),
        # alone, as prompts are, to its last token
        ("nano-vllm", "4+20 2+9", dict(chunk=3), ["1:3", "1:d", "0:d 1:d"]),
    ],
)
def test_what_a_victim_recomputes(policy, load, sizes, steps):
    world = World(policy, load, **sizes)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(world.requests[1])
    assert [world.step() for _ in steps] == steps


def test_vtc_counts_the_tokens_of_users():
    world = World("vtc", "6+2/a 6+2/a 6+2/b", max_batch=1, chunk=16)
    world.run()
    served = world.scheduler.waiting.served
    assert served == {"a": 2 * (6 + 2 * 2), "b": 6 + 2 * 2}
    for user in "ac":
        world.add(f"6+2/{user}")
    world.arrive()
    assert served["c"] == served["a"] == 20  # lifted to the least of those that wait
