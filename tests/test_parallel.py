"""Several processes give what one gives: the same tokens, and logprobs to 1e-10 in float64."""

import json
import time
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open

from config import EngineConfig
from lab.simulator.simulation import simulate
from parallel.shard import Shard, local_config
from parallel.stages import Stage
from policies import POLICIES
from pretrained import checkpoints
from pretrained.geometry import GPTConfig
from tests import rank_program
from tests.helpers import GROWING, tiny_model
from tests.rank_program import ABORTED, STOPPED
from tests.test_checkpoints import gpt2, llama_like
from tests.test_simulation import Law, at_once

WORLDS = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
SMALL = dict(chunk=6, max_batch=3, max_len=32, page_size=4)
FEW = SMALL | dict(pages=8)  # of each micro-batch: too few for three requests


@cache
def one_process(job):
    """What one process makes of a job, given as JSON."""
    return rank_program.serve(json.loads(job))


def check(worlds, tp, pp, engines, **job):
    """Compare a world with what one process makes of a job. Returns what the world made of it."""
    job = dict(program="serve", engines=engines) | job
    alone = dict(tp=1, pp=1, copies=1)
    first = one_process(json.dumps(job | alone))
    stop = first[0]["as they come"][STOPPED][0][3]  # its fourth token
    job |= dict(tp=tp, pp=pp, stop=stop)
    expected = one_process(json.dumps(job | alone))
    got = worlds.result(**job)
    for settings, one, several in zip(engines, expected, got, strict=True):
        for way in one.keys() - {"preempted", "cached"}:
            for number, answers in enumerate(zip(one[way], several[way], strict=True)):
                is_aborted = number == ABORTED and way == "as they come"
                check_same_text(*answers, f"{settings}, {way}, request {number}", is_aborted)
    return got


def check_same_text(expected, got, where, is_aborted):
    """Tokens, logprobs and reason are the same; of what was aborted, so far as both got."""
    tokens, logprobs, reason = expected
    got_tokens, got_logprobs, got_reason = got
    assert reason == got_reason, where
    count = min(len(tokens), len(got_tokens)) if is_aborted else len(tokens)
    compared = got_tokens[:count] if is_aborted else got_tokens
    assert compared == tokens[:count], where
    assert (got_reason == "abort") == is_aborted and count >= (2 if is_aborted else 1)
    assert (got_logprobs is None) == (logprobs is None), where
    if logprobs is not None:
        actual = torch.tensor(got_logprobs[:count], dtype=torch.float64)
        wanted = torch.tensor(logprobs[:count], dtype=torch.float64)
        torch.testing.assert_close(
            actual, wanted, rtol=0, atol=1e-10, msg=lambda text: f"{where}: {text}"
        )


OF_EACH_KIND = ["orca", "sarathi-serve", "priority"]  # that reserve, grow, and look at the clock


@pytest.mark.parametrize(
    "tp, pp",
    [(2, 2), *(pytest.param(*world, marks=pytest.mark.slow) for world in [(1, 2), (2, 1), (1, 4)])],
)
def test_ranks_give_what_one_process_gives_under_all_policies(worlds, tp, pp):
    policies = POLICIES if (tp, pp) == (1, 2) else OF_EACH_KIND
    engines = [FEW | dict(policy=policy) for policy in policies]
    got = check(worlds, tp, pp, engines, tiny=dict(n_kv_head=2, n_layer=pp))
    answers = zip(engines, got, strict=True)
    preempting = {settings["policy"] for settings, done in answers if done["preempted"]}
    assert preempting == {*GROWING} & {*policies} if pp < 4 else preempting


BIG = dict(chunk=6, max_batch=3, max_len=32)
PAGES = [  # of 16 tokens, which are found again, and of max_len
    BIG | dict(policy="sarathi-serve", page_size=16, pages=6, prefix_caching=True),
    BIG | dict(policy="vllm", page_size=32, pages=3),
]


@pytest.mark.slow
@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_pages_of_any_size_may_be_shared_and_an_engine_serves_twice(worlds, tp, pp):
    job = dict(tiny=dict(n_kv_head=2, n_layer=pp), at_once=2, warm_up=pp == 2)
    assert [bool(done["cached"]) for done in check(worlds, tp, pp, PAGES, **job)] == [1, 0]


SIZES = dict(vocab_size=61, n_head=4, n_embd=32, n_inner=48, max_positions=64)
MODELS = {
    "gpt2": dict(tiny=dict(family="gpt2")),
    "llama multi-query": dict(tiny=dict(n_kv_head=1)),
    "llama tied": dict(tiny=dict(n_kv_head=2, tie_embeddings=True, qkv_bias=True, qk_norm=True)),
    "of a seed": dict(random=dict(family="gpt2", tie_embeddings=True, **SIZES)),
}
TWO = BIG | dict(policy="sarathi-serve", page_size=16, pages=6)


ALL = [(*world, "gpt2") for world in WORLDS] + [(2, 2, name) for name in MODELS if name != "gpt2"]
ALL += [(4, 1, "llama multi-query"), (4, 1, "llama tied")]  # fewer KV heads than ranks


@pytest.mark.slow
@pytest.mark.parametrize("tp, pp, name", ALL)
def test_all_families_and_heads(worlds, tp, pp, name):
    (key, sizes), *_ = MODELS[name].items()
    check(worlds, tp, pp, [TWO], **{key: sizes | dict(n_layer=max(2, pp))})


@pytest.mark.filterwarnings("ignore:chunk='auto' is")  # if the machine is busy
def test_a_budget_found_at_start_up_changes_no_text(worlds):
    auto = BIG | dict(policy="dynamic", chunk="auto", page_size=4, pages=24)
    auto |= dict(policy_options=dict(tbt_slo=10))
    check(worlds, 1, 2, [auto], tiny=dict(n_layer=2))


QWEN = dict(num_key_value_heads=2, tie_word_embeddings=True)
CHECKPOINTS = {  # what they are to transformers; all have 4 layers
    "gpt2": (gpt2, {}),
    "llama": (llama_like, dict(num_key_value_heads=1, rms_norm_eps=0.1)),
    "qwen2": (partial(llama_like, transformers.Qwen2Config), QWEN),
    "qwen3": (partial(llama_like, transformers.Qwen3Config), QWEN | dict(head_dim=16)),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_loaded_in_parts(worlds, tmp_path, kind):
    config, sizes = CHECKPOINTS[kind]
    config = config(**sizes)
    config.bos_token_id = config.eos_token_id = None
    config.num_hidden_layers = 4
    config.layer_types = ["full_attention"] * 4
    save(config, tmp_path)
    check(worlds, 2, 2, [TWO], checkpoint=str(tmp_path))


def save(config, directory):
    """A random model of transformers in float64, whose every parameter matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3)
            if p.ndim == 1 and name.endswith("weight"):
                p += 1
    model.save_pretrained(directory)


LOAD = [(20, 3), (7, 9), (11, 5), (3, 12), (16, 4), (1, 8), (18, 2), (9, 6), (5, 10), (13, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_micro_batches_are_those_of_the_simulator(worlds, pp):
    """Of policies that do not look at the clock, if the stages take equal time."""
    policies = [name for name in POLICIES if name not in ("dynamic", "priority")]
    engines = [SMALL | dict(policy=policy, pages=10) for policy in policies]
    job = dict(tiny=dict(n_layer=pp), engines=engines, arrivals=LOAD)
    got = worlds.result(program="batches", tp=1, pp=pp, **job)
    for settings, batches in zip(engines, got, strict=True):
        config = EngineConfig(**settings | dict(pages=10 * pp))
        law = Law(pp, seconds=lambda batch: 1.0)
        run = simulate(law, config, at_once(*LOAD)).run
        expected = [[i.micro_batch, [[*chunk] for chunk in i.chunks]] for i in run.iterations]
        assert batches == expected, settings["policy"]


@pytest.mark.parametrize("vocab_size", [61, 5])
@pytest.mark.parametrize("name", ["gpt2", "llama multi-query", "llama tied"])
@pytest.mark.parametrize("tp, pp", [*WORLDS, (4, 2)])
def test_the_parts_of_all_ranks_are_the_whole(tp, pp, name, vocab_size):
    whole = tiny_model(**MODELS[name]["tiny"], n_layer=4, vocab_size=vocab_size)
    times = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
    for rank in range(tp * pp):
        ranks = SimpleNamespace(tp=tp, pp=pp, rank=rank, stage=rank // tp, part=rank % tp)
        shard = Shard(whole.config, ranks, seed=None)
        for source, dim, ranges in map(shard.slices_of, dict(shard.named_parameters())):
            for start, end in ranges:
                times[source].narrow(dim, start, end - start).add_(1)
    for source, count in times.items():
        assert (count.min(), count.max()) == copies(whole.config, tp, pp, source), source


def two_parts():
    """One of two ranks that share each layer."""
    ranks = SimpleNamespace(tp=2, pp=1, rank=0, stage=0, part=0, tp_group="these two")
    return Shard(tiny_model(n_kv_head=2).config, ranks, seed=None)


def test_the_time_of_all_sums_is_added_up(monkeypatch):
    shard = two_parts()
    groups = []

    def all_reduce(x, group):
        time.sleep(0.02)
        groups.append(group)

    monkeypatch.setattr("parallel.shard.dist.all_reduce", all_reduce)
    for _ in range(3):
        shard.sum_up(torch.zeros(1))
    assert shard.sum_timer.total_s >= 0.06 and groups == ["these two"] * 3


def test_the_time_of_sums_on_a_gpu_is_the_devices(monkeypatch):
    """all_reduce returns at once; the device computes 30 ms, then sums for 20 ms, each time."""
    stream = SimpleNamespace(device_s=0.0, done_s=0.0)
    events = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            events.append(self)

        def record(self):
            self.time_s = stream.device_s

        def elapsed_time(self, end):
            assert end.time_s <= stream.done_s, "read before the device was done"
            return 1e3 * (end.time_s - self.time_s)

    def all_reduce(x, group):
        stream.device_s += 0.02

    monkeypatch.setattr("parallel.shard.dist.all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    shard = two_parts()
    x = SimpleNamespace(is_cuda=True)
    for iteration in (1, 2):
        for _ in range(3):
            stream.device_s += 0.03
            assert shard.sum_up(x) is x
        assert shard.sum_timer.total_s == pytest.approx((iteration - 1) * 0.06)
        stream.done_s = stream.device_s
        shard.sum_timer.read()
        assert shard.sum_timer.total_s == pytest.approx(iteration * 0.06)
    assert len(events) == 2 * 3  # of the first iteration: they are used again


@pytest.mark.parametrize("stage_number", [0, 1])
def test_a_stage_reads_the_times_of_sums_when_its_device_is_done(stage_number, monkeypatch):
    calls = []

    def note(name):
        return lambda *_: calls.append(name) or [1.0]

    model = SimpleNamespace(
        ranks=SimpleNamespace(
            clock=lambda: 0.0, waited=0.0, stage=stage_number, pp=2, tp=2, rank=0, part=1
        ),
        config=SimpleNamespace(n_embd=1),
        final_norm=SimpleNamespace(weight=torch.ones(1)),
        embed=note("sum"),
        compute_layers=note("sum"),
        logits=note("sum"),
        sum_timer=SimpleNamespace(read=note("read")),
    )
    monkeypatch.setattr("parallel.stages.dist.recv", note("recv"))
    monkeypatch.setattr("parallel.stages.dist.isend", note("send"))
    stage = Stage(model)
    batch = SimpleNamespace(tokens=[1])
    stage.runners[7] = SimpleNamespace(flatten=lambda _: batch, fetch=note("fetch"), cache=None)
    assert stage.run(7, [], [], []) is None
    after_sums = [call for call in calls[calls.index("sum") :] if call != "sum"]
    assert after_sums == (["fetch", "send", "read"] if stage_number == 0 else ["fetch", "read"])


@pytest.mark.parametrize("tp, pp", [(4, 1), (2, 2)])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_rank_reads_no_more_of_a_checkpoint_than_it_keeps(tmp_path, monkeypatch, kind, tp, pp):
    config, sizes = CHECKPOINTS[kind]
    save(config(**sizes), tmp_path)
    read = []

    class Counted:
        def __init__(self, file, name):
            self.tensor = file.get_slice(name)
            self.get_shape = self.tensor.get_shape
            self.get_dtype = self.tensor.get_dtype

        def __getitem__(self, slices):
            read.append(self.tensor[slices])
            return read[-1]

    def counting(path, framework):
        file = safe_open(path, framework)
        return SimpleNamespace(keys=file.keys, get_slice=partial(Counted, file))

    monkeypatch.setattr(checkpoints, "safe_open", counting)
    whole = checkpoints.read_config(tmp_path)
    for rank in range(tp * pp):
        ranks = SimpleNamespace(tp=tp, pp=pp, rank=rank, stage=rank // tp, part=rank % tp)
        shard = Shard(whole, ranks, "meta", torch.float64, seed=None)
        read.clear()
        checkpoints.load_weights(shard, tmp_path, "cpu")
        kept = sum(p.numel() for p in shard.parameters())
        padding = sum(tensor.numel() for tensor in read) - kept  # of the vocabulary; biases once
        assert -kept / 20 < padding <= 0


def copies(config, tp, pp, parameter):
    """How often the ranks have each row or column of a parameter, at least and at most."""
    if "norm" in parameter or "position" in parameter:
        return (tp * pp, tp * pp) if "final" in parameter else (tp, tp)
    if "preproj" in parameter:  # fewer KV heads than ranks are repeated
        return 1, max(1, tp // config.n_kv_head)
    both = parameter == "token_embedding.weight" and config.tie_embeddings and pp > 1
    return 1 + both, 1 + both  # the first stage has it, and the last


@pytest.mark.parametrize(
    "tp, pp, message",
    [
        (5, 1, "tp=5: must divide n_head=12"),
        (1, 3, "pp=3: must divide n_layer=4"),
        (4, 1, "tp=4: must divide n_kv_head=6, or be a multiple of it"),
        (0, 1, "tp=0: must be a whole number of at least 1"),
        (1, 0, "pp=0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_divided_is_named(tp, pp, message):
    config = GPTConfig("llama", 61, n_layer=4, n_head=12, n_kv_head=6, n_embd=48, n_inner=36)
    with pytest.raises(ValueError, match=message):
        local_config(config, tp, pp)
