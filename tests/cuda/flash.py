"""The lowest-level operator of flash attention: what it is given, and torch's attention for it.

It is torch's, which xformers calls by a name of its own; both end in mha_varlen_fwd of torch's
flash_api.cpp. Its conditions are those of `check_flash_call`."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fast
from fast import fallback
from fast.fallback import SIXTEEN_BITS
from kv_cache import slot_mapping

OPERATORS = ("xformers_flash::flash_fwd", "aten::_flash_attention_forward")
TORCH_OPERATOR = torch.ops.aten._flash_attention_forward.default
NAMES = {  # of arguments: the name that they have here
    "cum_seq_q": "cu_seqlens_q",
    "cum_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
    "softmax_scale": "scale",
    "block_tables": "block_table",
    "window_size_left": "window_left",
    "window_size_right": "window_right",
    "dropout_p": "p",
}
BLOCK_TABLE_PAGE = 256  # FlashAttention 2: pages behind a block table are a multiple of it
ALIGNED_BYTES = 16  # of each row and head


OF_THIS_MACHINE = (  # reasons of xformers against an operator
    "device=",
    "bf16 is only supported on",
    "requires",
    "operator wasn't built",
    "triton is not",
)


class FlashCall(NamedTuple):
    """The arguments of one call, whatever its operator calls them."""

    query: Tensor  # (num_tokens, n_head, head_dim)
    key: Tensor  # (slots, n_kv_head, head_dim); with a block table (pages, page_size, ...)
    value: Tensor  # as key
    cu_seqlens_q: Tensor  # (n + 1,): the rows of sequence i are cu_seqlens_q[i] to [i + 1]
    cu_seqlens_k: Tensor  # (n + 1,): its keys begin at slot cu_seqlens_k[i]
    seqused_k: Tensor  # (n,): and are so many
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None  # (n, pages of a sequence)


def flash_call(op, args, kwargs):
    """The call of an operator, None if it is not one of flash attention's.

    Raises AssertionError unless it is causal attention: the last query sees the last key."""
    if op.name().partition(".")[0] not in OPERATORS:
        return None
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    arguments = {NAMES.get(name, name): value for name, value in arguments.items()}
    assert not arguments["p"]
    assert not arguments.get("alibi_slopes")
    assert arguments["window_left"] in (None, -1)
    assert arguments["is_causal"] or arguments["window_right"] == 0
    head_dim = arguments["query"].shape[2]
    assert arguments["scale"] in (None, head_dim**-0.5)
    return FlashCall(**{name: arguments[name] for name in FlashCall._fields})


def check_flash_call(call, dtypes=SIXTEEN_BITS):
    """Raise AssertionError where mha_varlen_fwd would refuse this call.

    Reads no numbers of tensors."""
    device = call.query.device
    dtype = call.query.dtype
    assert dtype in dtypes
    elements = ALIGNED_BYTES // dtype.itemsize
    for x in (call.query, call.key, call.value):
        assert (x.device, x.dtype, x.stride(-1)) == (device, dtype, 1)
        assert x.storage_offset() % elements == 0, "the first element is not aligned"
        strides = x.stride()[:-1]
        assert all(stride % elements == 0 for stride in strides), f"not aligned: {strides}"
    _, n_head, head_dim = call.query.shape
    *_, n_kv_head, key_dim = call.key.shape
    assert call.key.shape == call.value.shape
    assert key_dim == head_dim <= 256
    assert head_dim % 8 == 0
    assert n_head % n_kv_head == 0
    count = len(call.seqused_k)
    assert count > 0
    assert call.cu_seqlens_q.shape == call.cu_seqlens_k.shape == (count + 1,)
    numbers = [call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k]
    assert isinstance(call.max_seqlen_q, int)
    assert isinstance(call.max_seqlen_k, int)
    if call.block_table is None:
        assert call.key.ndim == 3
    else:
        assert call.key.ndim == 4
        assert call.key.shape[1] % BLOCK_TABLE_PAGE == 0
        assert len(call.block_table) == count
        numbers.append(call.block_table)
    for x in numbers:
        assert (x.device, x.dtype, x.stride(-1)) == (device, torch.int32, 1)


def attend(q, k, v):
    """torch's attention of one sequence, in float64. Its last query sees the last key.

    q (queries, n_head, head_dim), k and v (keys, n_kv_head, head_dim) -> as q."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    queries = q.shape[1]
    keys = k.shape[1]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    y = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return y.transpose(0, 1)


def attend_spans(q, keys, values, spans, page_size):
    """What an attention plan must yield for these spans, in float64; shapes as AttentionPlan's."""
    parts = []
    row = 0
    for span in spans:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        k, v = (x[:, slots].transpose(0, 1) for x in (keys, values))
        parts.append(attend(q[row : row + span.length], k, v))
        row += span.length
    return torch.cat(parts)


def attend_sequences(operator, inputs):
    """What an operator of xformers must yield for its Inputs: each sequence of the mask alone.

    Raises AssertionError for what it does not take."""
    inputs.validate_inputs()
    reasons = operator.not_supported_reasons(inputs)  # of shapes, strides and mask
    assert all(reason.startswith(OF_THIS_MACHINE) for reason in reasons), reasons
    group = inputs.key.shape[3]
    assert group == 1 or inputs.key.stride(3) == inputs.value.stride(3) == 0
    mask = inputs.attn_bias
    q, k, v = (x.flatten(2, 3)[0] for x in (inputs.query, inputs.key, inputs.value))
    counts = mask.k_seqinfo.seqlen.tolist()
    assert mask.k_seqinfo.max_seqlen >= max(counts)
    first_rows = mask.q_seqinfo.seqstart_py
    parts = []
    for i, count in enumerate(counts):
        if hasattr(mask, "block_tables"):
            slots = slot_mapping(mask.block_tables[i].tolist(), mask.page_size, 0, count)
        else:
            first = mask.k_seqinfo.seqstart_py[i]
            slots = list(range(first, first + count))
        rows = slice(first_rows[i], first_rows[i + 1])
        parts.append(attend(q[rows], k[slots], v[slots]))
    y = torch.cat(parts).to(q.dtype)[None]
    return y.unflatten(2, inputs.query.shape[2:4])


def pretend_flash(monkeypatch, dtypes=(torch.float64,)):
    """Let fast.flash run on a CPU in these dtypes, by definition. Returns the list of its calls."""
    calls = []

    def operator(*args, **kwargs):
        call = flash_call(TORCH_OPERATOR, args, kwargs)
        check_flash_call(call, dtypes)
        calls.append(call)
        y = compute(call).to(call.query.dtype)
        return y, None, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (fast, fallback):
        monkeypatch.setattr(module, "SIXTEEN_BITS", dtypes)
    return calls


def compute(call):
    """The result of a call, in float64."""
    first_rows = call.cu_seqlens_q.tolist()
    used = call.seqused_k.tolist()
    lengths = call.cu_seqlens_q.diff().tolist()
    assert call.max_seqlen_q == max(lengths)
    assert call.max_seqlen_k >= max(used)
    assert first_rows[0] == 0
    assert first_rows[-1] == len(call.query)
    parts = []
    for i, q in enumerate(call.query.split(lengths)):
        k = keys_of(call, call.key, i, used[i])
        v = keys_of(call, call.value, i, used[i])
        parts.append(attend(q, k, v))
    return torch.cat(parts)


def keys_of(call, x, i, count):
    """The first `count` keys, or values, of sequence i: (count, n_kv_head, head_dim)."""
    assert count > 0
    if call.block_table is not None:
        slots = slot_mapping(call.block_table[i].tolist(), x.shape[1], 0, count)
        return x.flatten(0, 1)[slots]
    first = int(call.cu_seqlens_k[i])
    assert 0 <= first <= len(x) - count
    return x[first : first + count]
