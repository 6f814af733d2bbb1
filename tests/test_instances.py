"""Two ranks with a whole model each give what one gives, and lose nothing that is sent between."""

import json
import random
import time
from collections import Counter, deque
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import bench
from kv_cache import KVCache, slot_mapping
from parallel import instances
from parallel.instances import PoolsEngine
from parallel.stages import Stage, StageResult
from parallel.transfer import Instance, export_pages, import_pages
from sampling import SamplingParams
from tests.helpers import Ledger, tiny_model, with_slow
from tests.test_parallel import FEW, check
from tests.test_pools import check_owners
from tests.test_ranks import check_all_end, check_error, struck

CACHED = FEW | dict(prefix_caching=True)
TWO = dict(
    tp=1,
    pp=1,
    copies=2,
    tiny=dict(n_kv_head=2),
)
POOLS = TWO | dict(kind="pools", engine=CACHED, engines=[CACHED])


@pytest.mark.slow
def test_replicas_give_what_one_process_gives_under_each_kind_of_policy(worlds):
    engines = [FEW | dict(policy=policy) for policy in ("orca", "sarathi-serve", "priority")]
    check(worlds, engines=engines, kind="replicas", **TWO)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pools", "pools chunks"])
def test_pools_give_what_one_process_gives(worlds, kind):
    """With pages that are found on the prefill instance, and with preemption."""
    engines = [CACHED, FEW | dict(page_size=1, pages=32)]
    cached, single = check(worlds, engines=engines, kind=kind, at_once=2, **TWO)
    assert cached["preempted"]
    assert cached["cached"]
    assert single["preempted"]


@pytest.mark.slow
def test_serve_shows_two_pools_beside_two_replicas(worlds, tmp_path):
    report = tmp_path / "r.json"
    words = (
        "serve --pools 1:1 --preset llama-tiny --dtype float32 --threads 1 --slo 100 "
        f"--max-len 64 --chunk 16 --batch 3 --requests 9 --qps 50 --policies vllm --json {report}"
    )
    worlds.result(program="command", words=words, busy=True, **TWO)
    answer = json.loads(report.read_text())
    assert answer["machine"]["copies"] == 2
    assert answer["runs"].keys() == {"vllm", "pools 1:1", "pools 1:1 chunks"}
    for name, run in answer["runs"].items():
        assert run["finished"] == run["requests"] == 9, name
        assert ("link" in run) == name.startswith("pools"), name
        if "link" in run:
            assert 0 < run["link"]["exposed_s"]["p50"] < 5
            assert run["hybrid"] == 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--pools 2:2", "--pools 2:2: must be 1:1 without --tp, or --simulate DEVICE"),
        ("--pools 1:1 --tp 2", "--pools 1:1: must be 1:1 without --tp, or --simulate DEVICE"),
        ("--pools 1:1 --pp 2", "--pools: goes without --pp and --replicas"),
        ("--pools 11", "must be PREFILL:DECODE"),
    ],
)
def test_other_pools_than_those_of_two_ranks_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(["serve", *words.split()])
    assert message in capsys.readouterr().err


def test_two_pools_in_one_process_name_the_command_to_type():
    with pytest.raises(ValueError, match="2 instances of .* needs 2 processes, not 1: torchrun "):
        bench.parse_args(["serve", "--pools", "1:1"])


def test_an_abort_on_the_link_frees_the_pages_of_both_sides(worlds):
    assert worlds.result(program="aborts", aborts=3, link_s=0.05, **POOLS) == 3


def test_an_interrupt_of_two_pools_changes_no_text(worlds):
    count = worlds.result(program="interrupted", seeds=[1, 2, 3], link_s=0.005, **POOLS)
    assert count >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicas", "pools"])
def test_an_interrupt_at_any_place_loses_no_completion(kind, worlds):
    job = POOLS | dict(program="interrupted_at_each_place", kind=kind)
    assert worlds.result(**job) > 100


FAULTS = [  # what, when, on which rank; and what the line says, but where rank 0 is lost
    ("SIGKILL", "prefill", 0, None),
    ("SIGKILL", "decode", 1, "rank 1 is gone"),
    ("SIGKILL", "on the link", 1, "rank 1 is gone"),
    ("raise", "decode", 1, "rank 1: ArithmeticError"),
    ("run out of memory", "on the link", 1, "rank 1: OutOfMemoryError"),
]


def test_when_one_of_two_pools_is_lost_both_end_and_one_line_names_it(worlds):
    job = POOLS | dict(program="serve")
    jobs = [struck(job, *fault) for *fault, _ in FAULTS]
    for (*_, line), ended in zip(FAULTS, worlds.run(*jobs), strict=True):
        check_all_end(ended)
        if line:
            check_error(ended.errors, line)


def test_a_transfer_that_is_broken_off_is_the_last(worlds):
    (ended,) = worlds.run(POOLS | dict(program="broken_off"))
    check_all_end(ended)
    check_error(ended.errors, "the ranks are out of step, as rank 0 broke a command off")


@pytest.mark.parametrize("page_size", [1, 4])
def test_keys_and_values_are_the_same_in_other_pages(page_size):
    model = tiny_model()
    source, target = (KVCache(model.config, 12, page_size, dtype=model.dtype) for _ in range(2))
    source.data.copy_(torch.randn_like(source.data))
    target.data.zero_()
    kv = export_pages(source, [3, 1, 2, 0], 2 * page_size)
    import_pages(target, [7, 5, 4], kv)
    assert kv.shape == (2, 2, 4, 2 * page_size, 8)
    sent, got = (cache.data.unflatten(3, (12, page_size)) for cache in (source, target))
    assert torch.equal(sent[:, :, :, [3, 1]], got[:, :, :, [7, 5]])
    assert target.data.count_nonzero() == kv.numel()


# both ranks in this process: random loads with faults


MAX_LEN = 24


class Fault(Exception):  # noqa: N818
    """What a broken model raises."""


def value(token, position):
    """What the cache holds of a token."""
    return (token + 1) * (position + 3)


def next_token(values):
    """The token after so many: it depends on each of their values."""
    return int(sum(values)) % 61


def text_of(prompt, params):
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(params.max_new_tokens):
        tokens.append(next_token(value(token, i) for i, token in enumerate(tokens)))
    return tokens[len(prompt) :]


class AddingInstance(Instance):
    """An instance whose model adds up what is in the cache. Sometimes that of rank 0 raises."""

    def __init__(self, model, fails):
        Stage.__init__(self, model)
        self.received = {}
        self.fails = fails

    def make_runner(self, key, pages, page_size, max_len, attention):
        cache = KVCache(self.model.config, pages, page_size, dtype=torch.float64)
        cache.data.fill_(1e4)
        self.runners[key] = SimpleNamespace(model=self.model, cache=cache, attention=None)
        return True

    def run(self, key, sent):
        cache = self.runners[key].cache
        if self.fails():
            raise Fault
        sampled = []
        for span in [chunk.chunk() for chunk in sent]:
            slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
            values = [value(token, i) for i, token in enumerate(span.tokens, span.start)]
            row = cache.data[0, 0, 0, :, 0]
            row[slots[span.start :]] = torch.tensor(values, dtype=torch.float64)
            if span.yields_token:
                sampled.append((next_token(row[slots].tolist()), None))
        return StageResult(0.0, 0.0, 0.0, sampled)


class OneProcess:
    """Two ranks in this process, and the link between them: each does a thing when it is drawn."""

    tp = pp = 1
    copies = 2

    def __init__(self, model, draw):
        self.draw = draw
        self.numbers = count()
        self.replies = {}
        self.tasks = [deque(), deque(), deque()]  # of rank 0, of rank 1, of the link
        self.sending = {}  # as of Link
        model.ranks = self
        self.work = AddingInstance(model, fails=lambda: draw.random() < 0.03)
        self.instances = [self.work, AddingInstance(model, fails=lambda: False)]

    def call(self, method, *arguments):
        return [getattr(instance, method)(*arguments) for instance in self.instances]

    command = call

    def tell(self, rank, method, *arguments):
        number = next(self.numbers)
        self.tasks[rank].append((number, rank, getattr(self.instances[rank], method), arguments))
        return number

    def send(self, number, cache, pages, tokens):
        kv = export_pages(cache, pages, tokens)
        self.tasks[2].append((number, 1, self.receive, (number, kv)))
        self.sending[number] = kv

    def receive(self, number, kv):
        self.instances[1].received[number] = kv
        return time.perf_counter()

    def forget_all_but(self, numbers):
        """As of Link."""
        self.sending = {n: kv for n, kv in self.sending.items() if n in numbers}

    def first_reply(self, numbers, timeout_s):
        turns = [tasks for tasks in self.tasks if tasks]
        if turns and self.draw.random() < 0.8:
            number, rank, function, arguments = self.draw.choice(turns).popleft()
            try:
                result = function(*arguments)
            except Fault as fault:
                result = fault
            if result is not None:
                self.replies[number] = {rank: result}
        return next((number for number in numbers if number in self.replies), None)


class RandomLoad(Ledger):
    """A random load for two pools, which checks all owners of pages after each step."""

    def __init__(self, model, seed, counts):
        self.draw = random.Random(seed)
        self.counts = counts
        self.ranks = OneProcess(model, self.draw)
        engine = PoolsEngine(
            model,
            chunk=self.draw.choice([1, 3, 8, 24]),
            max_batch=self.draw.choice([1, 2, 6]),
            max_len=MAX_LEN,
            page_size=4,
            pages=self.draw.choice([6, 7, 9, 24]),
            prefix_caching=self.draw.random() < 0.5,
        )
        super().__init__(engine, text_of)
        self.coming = []
        for _ in range(self.draw.randint(1, 10)):
            prompt = [self.draw.randint(0, 1)] * self.draw.randint(1, MAX_LEN - 1)
            params = SamplingParams(self.draw.randint(1, MAX_LEN - len(prompt)))
            self.coming.append((prompt, params))

    def run(self):
        engine = self.engine
        while self.coming or engine.has_work:
            if self.coming and self.draw.random() < 0.2:
                self.add(*self.coming.pop())
            if engine.scheduler.requests and self.draw.random() < 0.01:
                self.abort_one()
            if self.draw.random() < 0.003:
                self.counts["begun anew"] += 1
                engine.drop([])
            self.step()
        while any(self.ranks.tasks):
            self.ranks.first_reply([], 0.0)
        received = self.ranks.instances[1].received
        assert not (self.asked or self.ranks.replies or received or engine.sending)
        assert all(s.pages.num_free == s.pages.total for s in engine.schedulers)

    def abort_one(self):
        engine = self.engine
        if self.draw.random() < 0.5:
            engine.pools.start_transfers()  # as if an interrupt came before they are sent
        request_id = self.draw.choice(list(engine.scheduler.requests))
        self.counts["aborted on the link"] += (
            engine.scheduler.requests[request_id] in engine.pools.transfers
        )
        self.abort(request_id)

    def step(self):
        try:
            self.take(self.engine.step())
        except Fault:
            self.counts["faults"] += 1
        check_owners(self.engine.pools)

    def end(self, completion):
        super().end(completion)
        self.counts["preempted"] += completion.preemptions
        self.counts["cached"] += completion.cached_tokens


@pytest.mark.parametrize("first", with_slow(range(0, 500, 100), fast=[0]))
def test_no_page_leaks_on_either_side_in_random_loads_with_faults(first, monkeypatch):
    monkeypatch.setattr(instances, "Link", lambda ranks, target: ranks)
    model = tiny_model(
        n_layer=1,
        n_head=1,
        n_kv_head=1,
        n_embd=2,
    )
    counts = Counter()
    for seed in range(first, first + 100):
        RandomLoad(model, seed, counts).run()
    assert all(counts[name] > 3 for name in ("aborted on the link", "begun anew", "faults"))
    assert counts["preempted"] > 50
    assert counts["cached"] > 50
