"""Decode-only batches in CUDA graphs, without a GPU: a tape records what a graph would.

The tape keeps the operators that were called, with their tensors and numbers, and a replay calls
these again. So a tensor that moved, a number that changed, or one that was read from the device has
the consequence that it has on CUDA: a wrong result, or an error. Attention is one operator of it,
which keeps xformers' contract: all it knows is the tensors of a mask, and bounds.
"""

import copy
import itertools
import random
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attention import SDPA
from engine import Engine, Runner
from kernels import xformers
from kernels.graphs import DecodeGraphs, graph_size, wants_graphs
from kernels.xformers import XFormers
from kv_cache import Span, kv_bytes_per_token, slot_mapping
from model import FlatBatch
from policies import POLICIES
from sampling import SamplingParams, sample
from tests.helpers import alone, poison, poisoned_cache, tiny_model

COMPILED = set()  # what xformers' operators were called with
WAITS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


def tensors(tree):
    """All tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would be waited for: where the computer looks at a number in a tensor."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{operator} waits for the device")
        return operator(*args, **kwargs or {})


class Address:
    """Where a tensor is. What was made outside of the tape is not kept alive by it."""

    def __init__(self, tensor, kept):
        self.tensor = (lambda: tensor) if kept else weakref.ref(tensor)

    def read(self):
        if (tensor := self.tensor()) is None:
            raise RuntimeError("the graph reads memory that was freed")
        return tensor


class Tape(NoWaiting):
    """What torch.cuda.CUDAGraph is, on a CPU. Graphs of a pool share memory: what they computed is
    lost whenever one is replayed."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside, self.computed, self.tapes = [], {}, [], None

    def pool(self):
        return self.tapes

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = args, kwargs or {}
        frozen = tree_map_only(torch.Tensor, lambda x: Address(x, id(x) in self.inside), given)
        made = super().__torch_dispatch__(operator, types, *given)
        memory = {x.untyped_storage().data_ptr() for x in tensors(given)}
        for x in tensors(made):
            self.inside[id(x)] = x
            if x.is_floating_point() and x.untyped_storage().data_ptr() not in memory:
                self.computed.append(x)
        self.calls.append((operator, frozen, made))
        return made

    @torch.inference_mode()
    def replay(self):
        for x in [x for tape in self.tapes for x in tape.computed]:
            x.fill_(float("nan"))
        for operator, frozen, made in self.calls:
            args, kwargs = tree_map_only(Address, Address.read, frozen)
            for x, new in zip(tensors(made), tensors(operator(*args, **kwargs))):
                if x.data_ptr() != new.data_ptr():  # or it is a view, or was changed in place
                    x.copy_(new)


@contextmanager
def recording(tape, pool=None):
    """torch.cuda.graph: what is called within goes to the tape."""
    tape.tapes = [] if pool is None else pool
    tape.tapes.append(tape)
    with tape, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


@torch.library.custom_op("nanosarathi_tests::attention", mutates_args=())
def kernel(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor | None,
    page_size: int,
    most_queries: int,
    most_keys: int,
) -> torch.Tensor:
    """q (n, n_kv_head, group, head_dim), keys and values (slots, n_kv_head, head_dim)"""
    out, q_starts = torch.full_like(q, float("nan")), q_starts.tolist()
    assert len(q) == q_starts[-1]
    for i, length in enumerate(lengths.tolist()):
        rows = slice(q_starts[i], q_starts[i + 1])
        count = rows.stop - rows.start
        if tables is None:
            slots = list(range(int(starts[i]), int(starts[i]) + length))
        else:
            slots = slot_mapping(tables[i].tolist(), page_size, 0, length)
        assert 0 < count <= most_queries and 0 < length <= most_keys
        scores = torch.einsum("nhgd, khd -> hgnk", q[rows], keys[slots]) / q.shape[-1] ** 0.5
        unseen = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgnk, khd -> nhgd", weights, values[slots])
    return out


def apply(operator, inputs, needs_gradient):
    """What xformers' operators are called with, on a CPU. The first call compiles a kernel."""
    kind = operator, inputs.query.shape
    if torch.cuda.is_current_stream_capturing() and kind not in COMPILED:
        raise RuntimeError("a kernel was compiled while capturing")
    COMPILED.add(kind)
    mask, paged = inputs.attn_bias, hasattr(inputs.attn_bias, "block_tables")
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    where = (mask.block_tables, mask.page_size) if paged else (None, 0)
    heads = inputs.query[0], inputs.key[0, :, :, 0], inputs.value[0, :, :, 0]
    most = keys.padding if paged else keys.max_seqlen
    seen = queries.seqstart, keys.seqstart, keys.seqlen
    return kernel(*heads, *seen, *where, queries.max_seqlen, most)[None], None


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device as far as DecodeGraphs and XFormers can tell."""
    fmha = pytest.importorskip("xformers.ops.fmha")
    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    monkeypatch.setattr(xformers, "SIXTEEN_BITS", (torch.float64,))
    pretended = dict(get_device_capability=lambda device: (9, 0), CUDAGraph=Tape, graph=recording)
    pretended |= dict(current_stream=lambda device: None, stream=lambda stream: nullcontext())
    pretended |= dict(is_current_stream_capturing=lambda: False)
    COMPILED.clear()
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)


LAYOUTS = {"one page each": (26, 72, 72), "small pages": (80, 64, 192)}  # pages, page_size, max_len
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def make_graphs(model, layout, split_k=False):
    """DecodeGraphs of a model over a cache of NaN, which holds one page more than `layout` says."""
    pages, page_size, max_len = layout
    cache = poisoned_cache(model, pages + 1, page_size, max_len, position_major=True)
    return DecodeGraphs(model, cache, XFormers(model.config, cache, split_k))


def decodes(graphs, count, seed=0):
    """Spans of requests that decode, in pages anywhere; what came before is in the cache."""
    cache, rng = graphs.cache, random.Random(f"{count}/{seed}")
    cache.data.fill_(float("nan"))
    free, spans = rng.sample(range(cache.pages - 1), cache.pages - 1), []
    for i in range(count):
        start = rng.choice([0, 63, rng.randrange(cache.max_len), cache.max_len - 1])
        pages = [free.pop() for _ in range(start // cache.page_size + 1)]
        past = slot_mapping(pages, cache.page_size, 0, start)
        cache.data[:, :, :, past] = torch.randn_like(cache.data[:, :, :, past])
        spans.append(Span(pages, start, [rng.randrange(61)], i == 0 or rng.random() < 0.8))
    return spans


def test_sizes_are_powers_of_two_and_then_multiples_of_8():
    sizes = [1, 2, 4, 4, 8, 8, 8, 8, *[16] * 8, *[24] * 8, *[32] * 8]
    assert [graph_size(n) for n in range(1, 33)] == sizes


@pytest.mark.parametrize("case", [*LAYOUTS, "one page each, split-k"])
@pytest.mark.parametrize("family, n_kv_head", [("gpt2", 4), ("llama", 2)])
def test_a_filled_up_batch_equals_the_batch(family, n_kv_head, case, gpu):
    model, (layout, *split_k) = tiny_model(family, n_kv_head, head_dim=16), case.split(", ")
    graphs, previous = make_graphs(model, LAYOUTS[layout], bool(split_k)), None
    for seed, count in enumerate([3, 6, 1, 4, 2, 7, 12, 5, 8, 25, 16, 3, 1, 9]):
        spans = decodes(graphs, count, seed)
        expected = copy.deepcopy(graphs.cache)
        logits = model(FlatBatch.build(spans, SDPA(model.config, expected)), expected)
        got = graphs.prepare(spans)()
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-10)
        # beside the decodes' own slots, one was written: the first of the page that nobody owns
        idle = (expected.pages - 1) * expected.page_size
        if count < graph_size(count):
            assert not graphs.cache.data[:, :, :, idle].isnan().any()
        graphs.cache.data[:, :, :, idle] = float("nan")
        written, kept = graphs.cache.data, expected.data
        torch.testing.assert_close(written, kept, rtol=0, atol=1e-10, equal_nan=True)
        if previous:
            assert torch.equal(*previous)  # what the last one returned is still there
        previous = got, got.clone()
    assert list(graphs.graphs) == [4, 8, 1, 2, 16, 32]


@by_layout
def test_rows_that_fill_up_are_decodes_of_the_page_that_nobody_owns(layout, gpu):
    graphs = make_graphs(tiny_model(head_dim=16), layout)
    pages, size, max_len = layout
    spans = [span._replace(wants_logits=i != 1) for i, span in enumerate(decodes(graphs, 5))]
    graphs.prepare(spans)
    static, *_ = graphs.graphs[8]
    tokens, positions, slots, rows, lengths, firsts = static[:48].split(8)
    assert tokens.tolist() == [span.tokens[0] for span in spans] + [0] * 3
    assert positions.tolist() == [span.start for span in spans] + [0] * 3
    own = [span.pages[span.start // size] * size + span.start % size for span in spans]
    assert slots.tolist() == own + [pages * size] * 3
    assert rows.tolist()[:4] == [0, 2, 3, 4] and max(rows.tolist()) < 8
    assert lengths.tolist() == [span.start + 1 for span in spans] + [1] * 3
    assert firsts.tolist()[5:] == [pages if size < max_len else pages * size] * 3


@by_layout
def test_a_graph_is_made_once_and_its_memory_stays(layout, gpu):
    graphs = make_graphs(tiny_model(head_dim=16), layout)
    graphs.warm_up(11)
    assert list(graphs.graphs) == [16, 8, 4, 2, 1]  # memory that the largest took serves all
    made = dict(graphs.graphs)
    assert len({id(graph.pool()) for _, graph, *_ in made.values()}) == 1
    places = {size: static.data_ptr() for size, (static, *_) in made.items()}
    for count in (11, 2, 7, 1, 3, 11):
        graphs.prepare(decodes(graphs, count))()
    assert graphs.graphs == made
    assert {size: static.data_ptr() for size, (static, *_) in made.items()} == places


def test_a_batch_with_a_chunk_is_not_taken(gpu):
    graphs = make_graphs(tiny_model(head_dim=16), LAYOUTS["one page each"])
    spans = [Span([0], 5, [1]), Span([1], 0, [1, 2])]
    assert graphs.prepare(spans) is graphs.prepare(spans[1:]) is None and not graphs.graphs
    assert graphs.prepare(spans[:1])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_where_capturing_fails_batches_run_as_ever_and_one_line_says_why(error, gpu, monkeypatch):
    graphs = make_graphs(tiny_model(head_dim=16), LAYOUTS["one page each"])
    spans = decodes(graphs, 9)
    assert graphs.prepare(spans[:2])

    def fail():
        raise error("out of luck\nand so on")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", fail)
    with pytest.warns(UserWarning, match="^no CUDA graphs of decodes: out of luck$"):
        assert graphs.prepare(spans) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.prepare(spans) is None and graphs.prepare(spans[:2])


def test_attention_that_cannot_be_captured_is_named():
    model = tiny_model()
    cache = poisoned_cache(model, 3, 8)
    graphs = DecodeGraphs(model, cache, SDPA(model.config, cache))
    with pytest.warns(UserWarning, match="need attention by xformers"):
        assert graphs.prepare([Span([0], 0, [1])]) is None


def test_graphs_are_made_where_compile_asks_for_them_on_cuda():
    for compiled, device in itertools.product((False, True), ("cpu", "cuda")):
        model = SimpleNamespace(compiled=compiled, device=torch.device(device))
        assert wants_graphs(model) == (compiled and device == "cuda")
    assert not wants_graphs(tiny_model())


def test_the_page_for_graphs_must_fit_too(monkeypatch):
    model = tiny_model(n_kv_head=2, head_dim=16)
    page_bytes = 64 * kv_bytes_per_token(model.config, model.dtype)
    monkeypatch.setattr("policies.config.free_bytes", lambda device: 4 * page_bytes)
    assert Runner(model, 4, 64).cache.pages == 4
    monkeypatch.setattr("engine.wants_graphs", lambda model: True)
    assert Runner(model, 3, 64).cache.pages == 4
    with pytest.raises(ValueError, match="pages=4, page_size=64: takes"):
        Runner(model, 4, 64)


@pytest.mark.parametrize("layout", [(4, 64, 64), (6, 64, 128)], ids=LAYOUTS)
@pytest.mark.parametrize("policy, fails", [*zip(POLICIES, [0] * 99), ("sarathi-serve", 1)])
def test_an_engine_with_graphs_gives_the_same_tokens(policy, layout, fails, gpu, monkeypatch):
    model, (pages, page_size, max_len) = tiny_model(n_kv_head=2, head_dim=16), layout
    monkeypatch.setattr("engine.wants_graphs", lambda model: True)
    monkeypatch.setattr("engine.make_attention", lambda config, cache, _: XFormers(config, cache))
    sizes = dict(chunk=8, max_batch=3, page_size=page_size, pages=pages, max_len=max_len)
    engine, forward, run = Engine(model, policy=policy, **sizes), type(model).forward, Tape.replay
    assert engine.runner.cache.pages == engine.scheduler.pages.total + 1
    engine.warm_up()
    assert list(engine.runner.graphs.graphs) == [4, 2, 1]
    chunks, replayed = [], []

    def plain(self, batch, cache):
        chunks.append(len(batch.tokens))
        poison(engine)
        return forward(self, batch, cache)

    def replay(tape):
        replayed.append(tape)
        if fails and len(replayed) == 3:
            raise torch.OutOfMemoryError("once")
        poison(engine)
        run(tape)

    monkeypatch.setattr(type(model), "forward", plain)
    monkeypatch.setattr(Tape, "replay", replay)
    prompts = [[i + 1] * n for i, n in enumerate((9, 30, 2, 17))]
    params = [SamplingParams(n, temperature=0.5 * (n % 2), seed=n) for n in (9, 4, 12, 7)]
    for prompt, p in zip(prompts, params):
        engine.add_request(prompt, p)
    done, failed = {}, 0
    while engine.has_work:
        try:
            events = engine.step()
        except torch.OutOfMemoryError:
            failed += 1
            continue
        iteration = engine.last_iteration
        assert iteration.start <= iteration.launch <= iteration.end
        done |= {e.request_id: e.completion.tokens for e in events if e.completion}
    assert failed == fails and len(replayed) > 3 and min(chunks) > 1
    monkeypatch.setattr(type(model), "forward", forward)
    assert [done[i] for i in range(4)] == [alone(model, *given) for given in zip(prompts, params)]


@pytest.mark.parametrize("count, filled", [(1, 1), (3, 4), (5, 8), (9, 11)])
def test_decodes_beside_a_chunk_come_in_the_sizes_of_graphs(count, filled, gpu, monkeypatch):
    """With small pages, for which Triton compiles a kernel for each number of decodes."""
    model, sizes = tiny_model(head_dim=16), []
    graphs = make_graphs(model, LAYOUTS["small pages"])
    spans = decodes(graphs, count)
    used = {page for span in spans for page in span.pages}
    chunk = Span([page for page in range(1, 80) if page not in used][:1], 0, [1] * (11 - count))
    expected = copy.deepcopy(graphs.cache)
    batch = FlatBatch.build([*spans, chunk], SDPA(model.config, expected))
    logits = model(batch, expected)
    called = lambda op, inputs, **more: (
        sizes.append(inputs.query.shape[1]) or apply(op, inputs, **more)
    )
    for operator in (graphs.attention.decode_operator, graphs.attention.chunk_operator):
        monkeypatch.setattr(operator, "apply", classmethod(called))
    got = model(FlatBatch.build([*spans, chunk], graphs.attention), graphs.cache)
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-10)
    assert sizes == [filled, 11 - count] * model.config.n_layer


@by_layout
def test_nothing_is_read_from_the_device_before_the_tokens_are_fetched(layout, gpu):
    model = tiny_model(head_dim=16)
    graphs, params = (
        make_graphs(model, layout),
        [
            SamplingParams(temperature=t, top_k=k, top_p=p, logprobs=True)
            for t, k, p in ((0, 0, 1), (1, 0, 1), (0.7, 5, 1), (2, 0, 0.5))
        ],
    )
    spans = [span._replace(wants_logits=True) for span in decodes(graphs, 4)]
    chunk = Span([graphs.cache.pages - 2], 0, [1, 2, 3], False)
    graphs.warm_up(4)
    with NoWaiting():
        sample(graphs.prepare(spans)(), params, range(4))
        batch = FlatBatch.build([*spans, chunk], graphs.attention)
        sample(model(batch, graphs.cache), params, range(4))
    with pytest.raises(RuntimeError, match="waits for the device"), NoWaiting():
        batch.tokens.max().item()
