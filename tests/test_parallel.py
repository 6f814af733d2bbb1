"""Several processes give what one gives: the same tokens, and logprobs to 1e-10 in float64."""

import json
from functools import cache

import pytest
import torch

from config import GPTConfig
from parallel.shard import local_config
from policies import POLICIES
from tests import rank_program
from tests.helpers import GROWING, with_slow
from tests.rank_program import ENGINE
from tests.test_checkpoints import make

LLAMA = dict(n_kv_head=2)
TIED = LLAMA | dict(tie_embeddings=True, qkv_bias=True, qk_norm=True)
FOUR_RANKS = [  # (4, 1): fewer KV heads than ranks
    (2, 2, dict(family="gpt2")),
    (2, 2, TIED),
    (4, 1, dict(n_kv_head=1)),
    (4, 1, LLAMA),
]


@cache
def one_process(job):
    """What one process makes of a job, given as JSON."""
    return rank_program.serve(json.loads(job) | dict(tp=1, pp=1))


def check(worlds, tp, pp, engines, **job):
    """Compare a world with what one process makes of a job. Returns what the world made of it."""
    job |= dict(engines=engines)
    expected = one_process(json.dumps(job))
    served = worlds.result(
        program="serve",
        tp=tp,
        pp=pp,
        **job,
    )
    for one, several in zip(expected, served, strict=True):
        for (tokens, logprobs, reason), got in zip(one["answers"], several["answers"], strict=True):
            assert got == [tokens, pytest.approx(logprobs, rel=0, abs=1e-10), reason]
    return served


@pytest.mark.parametrize("tp, pp", with_slow([(2, 2), (1, 2), (2, 1), (1, 4)], fast=[(2, 2)]))
def test_ranks_give_what_one_process_gives_under_all_policies(worlds, tp, pp):
    of_each_kind = ["orca", "sarathi-serve", "priority"]  # reserve, grow, and look at the clock
    policies = POLICIES if (tp, pp) == (1, 2) else of_each_kind
    engines = [ENGINE | dict(policy=policy) for policy in policies]
    engines.append(ENGINE | dict(prefix_caching=True, pages=16))
    *served, caching = check(
        worlds,
        tp,
        pp,
        engines,
        tiny=LLAMA | dict(n_layer=pp),
    )
    rows = zip(policies, served, strict=True)
    preempting = {policy for policy, row in rows if row["preempted"]}
    assert pp == 4 or preempting == {*GROWING} & {*policies}
    assert caching["cached"]


@pytest.mark.slow
@pytest.mark.parametrize("tp, pp, tiny", FOUR_RANKS)
def test_all_families_and_heads(worlds, tp, pp, tiny):
    check(
        worlds,
        tp,
        pp,
        [ENGINE],
        tiny=tiny | dict(n_layer=2),
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3", None])
def test_a_checkpoint_or_random_weights_are_loaded_in_parts(worlds, tmp_path, kind):
    load = dict(preset="llama-tiny", layers=2)
    if kind:
        make(kind, n_layer=4, dtype=torch.float64).save_pretrained(tmp_path)
        load = dict(model=str(tmp_path))
    check(worlds, 2, 2, [ENGINE], load=load)


@pytest.mark.parametrize(
    "tp, pp, message",
    [(5, 1, "tp=5: .* n_head"), (1, 3, "pp=3: .* n_layer")],
)
def test_what_cannot_be_divided_is_named(tp, pp, message):
    sizes = dict(
        n_layer=4,
        n_head=12,
        n_kv_head=6,
        n_embd=48,
        n_inner=36,
    )
    with pytest.raises(ValueError, match=message):
        local_config(GPTConfig("llama", 61, **sizes), tp, pp)
