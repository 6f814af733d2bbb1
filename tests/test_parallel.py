"""Several processes give what one gives: the same tokens, and logprobs to 1e-10 in float64."""

import json
import time
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from config import EngineConfig, GPTConfig
from lab.measure.workload import Arrival
from lab.simulator.simulation import simulate
from parallel.shard import Shard, local_config
from parallel.stages import Stage
from policies import POLICIES
from tests import rank_program
from tests.helpers import GROWING, tiny_model, with_slow
from tests.rank_program import ABORTED, ENGINE, STOPPED
from tests.test_checkpoints import make

WORLDS = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
FEW = ENGINE | dict(page_size=4, pages=8)  # of each micro-batch: too few for three requests


@cache
def one_process(job):
    """What one process makes of a job, given as JSON."""
    return rank_program.serve(json.loads(job) | dict(tp=1, pp=1))


def check(worlds, tp, pp, engines, **job):
    """Compare a world with what one process makes of a job. Returns what the world made of it."""
    job = dict(program="serve", engines=engines) | job
    first, *_ = one_process(json.dumps(job))
    tokens, _, _ = first["answers"][0][STOPPED]
    job["stop"] = tokens[3]
    expected = one_process(json.dumps(job))
    served = worlds.result(**job, tp=tp, pp=pp)
    for one, several in zip(expected, served, strict=True):
        for run, answers in enumerate(zip(one["answers"], several["answers"], strict=True)):
            for number, pair in enumerate(zip(*answers, strict=True)):
                check_same_text(*pair, is_aborted=run == 0 and number == ABORTED)
    return served


def check_same_text(expected, got, is_aborted):
    """Tokens, logprobs and reason are the same; of what was aborted, so far as both got."""
    tokens, logprobs, reason = expected
    got_tokens, got_logprobs, got_reason = got
    assert got_reason == reason
    assert (reason == "abort") == is_aborted
    count = len(tokens)
    if is_aborted:
        count = min(count, len(got_tokens))
        got_tokens = got_tokens[:count]
        assert count >= 2
    assert got_tokens == tokens[:count]
    assert (got_logprobs is None) == (logprobs is None)
    if logprobs is not None:
        assert got_logprobs[:count] == pytest.approx(logprobs[:count], rel=0, abs=1e-10)


@pytest.mark.parametrize("tp, pp", with_slow([(2, 2), (1, 2), (2, 1), (1, 4)], fast=[(2, 2)]))
def test_ranks_give_what_one_process_gives_under_all_policies(worlds, tp, pp):
    of_each_kind = ["orca", "sarathi-serve", "priority"]  # reserve, grow, and look at the clock
    policies = POLICIES if (tp, pp) == (1, 2) else of_each_kind
    engines = [FEW | dict(policy=policy) for policy in policies]
    served = check(worlds, tp, pp, engines, tiny=dict(n_kv_head=2, n_layer=pp))
    rows = zip(policies, served, strict=True)
    preempting = {policy for policy, row in rows if row["preempted"]}
    assert pp == 4 or preempting == {*GROWING} & {*policies}


@pytest.mark.slow
@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_pages_of_any_size_may_be_shared_and_an_engine_serves_twice(worlds, tp, pp):
    found_again = ENGINE | dict(prefix_caching=True)
    of_max_len = ENGINE | dict(policy="vllm", page_size=32, pages=3)
    job = dict(tiny=dict(n_kv_head=2, n_layer=pp), at_once=2, warm_up=pp == 2)
    shared, unshared = check(worlds, tp, pp, [found_again, of_max_len], **job)
    assert shared["cached"]
    assert not unshared["cached"]


SIZES = dict(
    vocab_size=61,
    n_head=4,
    n_embd=32,
    n_inner=48,
    max_positions=64,
)
MODELS = {
    "gpt2": dict(tiny=dict(family="gpt2")),
    "llama multi-query": dict(tiny=dict(n_kv_head=1)),
    "llama tied": dict(
        tiny=dict(
            n_kv_head=2,
            tie_embeddings=True,
            qkv_bias=True,
            qk_norm=True,
        )
    ),
    "of a seed": dict(random=dict(family="gpt2", tie_embeddings=True, **SIZES)),
}
WORLDS_OF_MODELS = [(*world, "gpt2") for world in WORLDS]
WORLDS_OF_MODELS += [(2, 2, name) for name in MODELS if name != "gpt2"]
WORLDS_OF_MODELS += [(4, 1, "llama multi-query"), (4, 1, "llama tied")]  # fewer KV heads than ranks


@pytest.mark.slow
@pytest.mark.parametrize("tp, pp, name", WORLDS_OF_MODELS)
def test_all_families_and_heads(worlds, tp, pp, name):
    ((kind, sizes),) = MODELS[name].items()
    check(worlds, tp, pp, [ENGINE], **{kind: sizes | dict(n_layer=max(2, pp))})


@pytest.mark.filterwarnings("ignore:chunk is")  # if the machine is busy
def test_a_budget_found_at_start_up_changes_no_text(worlds):
    options = dict(policy="dynamic", chunk="auto", policy_options=dict(tbt_slo=10))
    auto = ENGINE | options | dict(page_size=4, pages=24)
    check(worlds, 1, 2, [auto], tiny=dict(n_layer=2))


CHECKPOINTS = ["gpt2", "llama", "qwen2", "qwen3"]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_loaded_in_parts(worlds, tmp_path, kind):
    make(kind, n_layer=4, dtype=torch.float64).save_pretrained(tmp_path)
    check(worlds, 2, 2, [ENGINE], checkpoint=str(tmp_path))


def shards_of(whole, tp, pp, **options):
    """The parts of a model, of all ranks."""
    for rank in range(tp * pp):
        stage, part = divmod(rank, tp)
        ranks = SimpleNamespace(
            tp=tp,
            pp=pp,
            rank=rank,
            stage=stage,
            part=part,
        )
        yield Shard(whole, ranks, seed=None, **options)


@pytest.mark.parametrize("vocab_size", [61, 5])
@pytest.mark.parametrize("name", ["gpt2", "llama multi-query", "llama tied"])
@pytest.mark.parametrize("tp, pp", [*WORLDS, (4, 2)])
def test_the_parts_of_all_ranks_are_the_whole(tp, pp, name, vocab_size):
    whole = tiny_model(**MODELS[name]["tiny"], n_layer=4, vocab_size=vocab_size)
    times = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
    for shard in shards_of(whole.config, tp, pp):
        for source, dim, ranges in map(shard.slices_of, dict(shard.named_parameters())):
            for start, end in ranges:
                times[source].narrow(dim, start, end - start).add_(1)
    for source, count in times.items():
        assert (count.min(), count.max()) == copies(whole.config, tp, pp, source), source


def copies(config, tp, pp, parameter):
    """How often the ranks have each row or column of a parameter, at least and at most."""
    if "final_norm" in parameter:
        return tp * pp, tp * pp
    if "norm" in parameter or "position" in parameter:
        return tp, tp
    if "preproj" in parameter:  # fewer KV heads than ranks are repeated
        return 1, max(1, tp // config.n_kv_head)
    is_tied = parameter == "token_embedding.weight" and config.tie_embeddings
    count = 2 if is_tied and pp > 1 else 1  # the first stage has it, and the last
    return count, count


@pytest.mark.parametrize(
    "tp, pp, message",
    [
        (5, 1, "tp=5: must divide n_head=12"),
        (1, 3, "pp=3: must divide n_layer=4"),
        (4, 1, "tp=4: must divide n_kv_head=6, or be a multiple of it"),
        (0, 1, "tp=0: must divide n_head=12"),
        (1, 0, "pp=0: must divide n_layer=4"),
    ],
)
def test_what_cannot_be_divided_is_named(tp, pp, message):
    config = GPTConfig(
        "llama",
        61,
        n_layer=4,
        n_head=12,
        n_kv_head=6,
        n_embd=48,
        n_inner=36,
    )
    with pytest.raises(ValueError, match=message):
        local_config(config, tp, pp)


LENGTHS = [(20, 3), (7, 9), (11, 5), (3, 12), (16, 4), (1, 8), (18, 2), (9, 6), (5, 10), (13, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_micro_batches_are_those_of_the_simulator(worlds, pp):
    """Of policies that do not look at the clock, if the stages take equal time."""
    policies = [name for name in POLICIES if name not in ("dynamic", "priority")]
    engines = [FEW | dict(policy=policy, pages=10) for policy in policies]
    job = dict(tiny=dict(n_layer=pp), engines=engines, arrivals=LENGTHS)
    got = worlds.result(program="batches", tp=1, pp=pp, **job)
    law = SimpleNamespace(
        pp=pp,
        cpu_s=0.0,
        tile=1,
        stages=lambda batch: ([1.0] * pp, 0.0),
    )
    arrivals = [Arrival(0.0, *lengths) for lengths in LENGTHS]
    for settings, batches in zip(engines, got, strict=True):
        config = EngineConfig(**settings | dict(pages=10 * pp))
        run = simulate(law, config, arrivals).run
        expected = [[i.micro_batch, [[*chunk] for chunk in i.chunks]] for i in run.iterations]
        assert batches == expected, settings["policy"]


# how long sums take


@pytest.fixture
def two_parts():
    """One of two ranks that share each layer."""
    ranks = SimpleNamespace(
        tp=2,
        pp=1,
        rank=0,
        stage=0,
        part=0,
        tp_group="these two",
    )
    return Shard(tiny_model(n_kv_head=2).config, ranks, seed=None)


def test_the_time_of_all_sums_is_added_up(two_parts, monkeypatch):
    groups = []

    def all_reduce(x, group):
        time.sleep(0.02)
        groups.append(group)

    monkeypatch.setattr("parallel.shard.dist.all_reduce", all_reduce)
    for _ in range(3):
        two_parts.sum_up(torch.zeros(1))
    assert two_parts.sum_timer.total_s >= 0.06
    assert groups == ["these two"] * 3


def test_the_time_of_sums_on_a_gpu_is_the_devices(two_parts, monkeypatch):
    """all_reduce returns at once; the device computes 30 ms, then sums for 20 ms, each time."""
    device = SimpleNamespace(launched_s=0.0, done_s=0.0)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.time_s = device.launched_s

        def elapsed_time(self, end):
            assert end.time_s <= device.done_s, "read before the device was done"
            return 1e3 * (end.time_s - self.time_s)

    def all_reduce(x, group):
        device.launched_s += 0.02

    monkeypatch.setattr("parallel.shard.dist.all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    x = SimpleNamespace(is_cuda=True)
    for total_s in (0.06, 0.12):
        for _ in range(3):
            device.launched_s += 0.03
            assert two_parts.sum_up(x) is x
        device.done_s = device.launched_s
        two_parts.sum_timer.read()
        assert two_parts.sum_timer.total_s == pytest.approx(total_s)


@pytest.mark.parametrize(
    "stage, calls_after_sums", [(0, ["wait", "isend", "read"]), (1, ["fetch", "read"])]
)
def test_a_stage_reads_the_times_of_sums_when_its_device_is_done(
    stage, calls_after_sums, monkeypatch
):
    calls = Mock()
    calls.ranks.configure_mock(stage=stage, pp=2, tp=2, rank=0, part=1, waited=0.0)
    calls.ranks.clock.return_value = 0.0
    calls.fetch.return_value = []
    model = Mock(
        ranks=calls.ranks,
        config=SimpleNamespace(n_embd=1),
        compute_layers=calls.sum,
        logits=calls.sum,
    )
    model.sum_timer.read = calls.read
    monkeypatch.setattr("parallel.stages.dist", Mock(isend=calls.isend))
    monkeypatch.setattr("parallel.stages.FlatBatch.build", lambda *_: SimpleNamespace(tokens=[1]))
    computing = Stage(model)
    computing.runners[7] = Mock(fetch=calls.fetch, wait=calls.wait)
    assert computing.run(7, []) is None
    names = [name for name, _, _ in calls.method_calls if not name.startswith("ranks")]
    last_sum = len(names) - names[::-1].index("sum")
    assert names[last_sum:] == calls_after_sums
