"""The lowest-level operator of flash attention: what it is given, and attention by definition.

xformers and torch call it by several names; all end in mha_varlen_fwd of torch's flash_api.cpp. Its
conditions are those of `check_flash_call`. `FlashByDefinition` computes what it would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import fallback
from attention.plan import SIXTEEN_BITS
from kv_cache import slot_mapping
from request import Chunk

OPERATORS = (
    "xformers_flash::flash_fwd",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_forward_no_dropout_inplace",
)
TORCH_OPERATOR = torch.ops.aten._flash_attention_forward.default
ALIASES = {  # of arguments, by the name that they have here
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_q", "cum_seq_q"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seq_k", "cum_seq_k"),
    "max_seqlen_q": ("max_seqlen_q", "max_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_k"),
    "scale": ("scale", "softmax_scale"),
    "block_table": ("block_table", "block_tables"),
}
BLOCK_TABLE_PAGE = 256  # FlashAttention 2: pages behind a block table are a multiple of it
ALIGNED_BYTES = 16  # of each row and head


@dataclass(frozen=True)
class FlashCall:
    """The arguments of one call, whatever its operator calls them."""

    query: Tensor  # (num_tokens, n_head, head_dim)
    key: Tensor  # (slots, n_kv_head, head_dim); with a block table (pages, page_size, ...)
    value: Tensor  # as key
    cu_seqlens_q: Tensor  # (n + 1,): the rows of sequence i are cu_seqlens_q[i] to [i + 1]
    cu_seqlens_k: Tensor  # (n + 1,): its keys begin at slot cu_seqlens_k[i]
    seqused_k: Tensor  # (n,): and are so many
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float | None
    causal: bool  # aligned at the last query and the last key
    block_table: Tensor | None  # (n, pages of a sequence)


def flash_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlashCall | None:
    """The call of an operator, None if it is not one of flash attention's."""
    if op.name().partition(".")[0] not in OPERATORS:
        return None
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    if arguments.get("p") or arguments.get("dropout_p") or arguments.get("alibi_slopes"):
        raise ValueError("flash attention with dropout or ALiBi")
    window = arguments.get("window_size") or (
        arguments.get("window_size_left", arguments.get("window_left")),
        arguments.get("window_size_right", arguments.get("window_right")),
    )
    left, right = (-1 if size is None else size for size in window)
    if left != -1 or right > 0:
        raise ValueError(f"flash attention with a window of {window}")
    for name, aliases in ALIASES.items():
        arguments[name] = next((arguments[alias] for alias in aliases if alias in arguments), None)
    causal = arguments["is_causal"] or right == 0
    fields = {name: arguments[name] for name in FlashCall.__dataclass_fields__ if name != "causal"}
    return FlashCall(**fields, causal=causal)


def check_flash_call(call: FlashCall, dtypes: Sequence[torch.dtype] = SIXTEEN_BITS) -> None:
    """Raise AssertionError where mha_varlen_fwd would refuse this call.

    Reads no numbers of tensors."""
    device, dtype = call.query.device, call.query.dtype
    assert dtype in dtypes
    for x in (call.query, call.key, call.value):
        assert x.device == device and x.dtype == dtype and x.stride(-1) == 1
        elements = ALIGNED_BYTES // dtype.itemsize
        assert x.storage_offset() % elements == 0, "the first element is not aligned"
        strides = x.stride()[:-1]
        assert all(stride % elements == 0 for stride in strides), f"not aligned: {strides}"
    n_head, head_dim = call.query.shape[1:]
    assert call.key.shape == call.value.shape and call.key.shape[-1] == head_dim
    assert head_dim <= 256 and head_dim % 8 == 0 and n_head % call.key.shape[-2] == 0
    count = len(call.cu_seqlens_q) - 1
    assert count > 0
    lengths = {"cu_seqlens_q": count + 1, "cu_seqlens_k": count + 1, "seqused_k": count}
    for name, length in lengths.items():
        x = getattr(call, name)
        assert x.shape == (length,) and x.dtype == torch.int32, name
        assert x.device == device and x.is_contiguous(), name
    assert isinstance(call.max_seqlen_q, int) and isinstance(call.max_seqlen_k, int)
    if call.block_table is None:
        assert call.key.ndim == 3
    else:
        assert call.key.ndim == 4 and call.key.shape[1] % BLOCK_TABLE_PAGE == 0
        assert call.block_table.dtype == torch.int32 and call.block_table.stride(-1) == 1
        assert call.block_table.device == device and len(call.block_table) == count


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Attention by definition, in float64, of one sequence. Its last query sees the last key.

    q (queries, n_head, head_dim), k and v (keys, n_kv_head, head_dim) -> as q."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if causal:
        queries, keys = scores.shape[1:]
        position = torch.arange(keys - queries, keys)[:, None]
        scores = scores.masked_fill(torch.arange(keys) > position, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


def attend_spans(
    q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Chunk], page_size: int
) -> Tensor:
    """What an attention plan must yield for these spans, in float64; shapes as AttentionPlan's."""
    parts = []
    row = 0
    for span in spans:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        k, v = (x[:, slots].transpose(0, 1) for x in (keys, values))
        parts.append(attend(q[row : row + span.length], k, v, None, causal=True))
        row += span.length
    return torch.cat(parts)


class FlashByDefinition(TorchDispatchMode):
    """Computes each call of flash attention from exactly its arguments, and keeps the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[FlashCall] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = flash_call(op, args, kwargs)
        if call is None:
            return op(*args, **kwargs)
        check_flash_call(call)
        self.calls.append(call)
        result = compute(call).to(call.query.dtype)
        unused = torch.empty(0)
        if op._schema.arguments[0].name == "out":
            args[0].copy_(result)
            return unused
        return (result, *[unused] * (len(op._schema.returns) - 1))


def flash_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None, None, None, None]:
    """aten::_flash_attention_forward by definition, in float64."""
    call = flash_call(TORCH_OPERATOR, args, kwargs)
    assert call is not None
    check_flash_call(call, dtypes=[torch.float64])
    return compute(call), None, None, None, None


def pretend_flash(monkeypatch: Any, operator: Callable[..., Any] = flash_attention) -> None:
    """Let attention.flash run on a CPU in float64, by that operator."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (attention, fallback):
        monkeypatch.setattr(module, "SIXTEEN_BITS", (torch.float64,))


def compute(call: FlashCall) -> Tensor:
    """The result of a call, in float64. NaN in the rows of no sequence."""
    first_rows = call.cu_seqlens_q.tolist()
    used = call.seqused_k.tolist()
    lengths = [end - start for start, end in zip(first_rows, first_rows[1:], strict=False)]
    assert call.max_seqlen_q == max(lengths) and call.max_seqlen_k >= max(used)
    assert first_rows[0] == 0 and first_rows[-1] == len(call.query)
    result = torch.full(call.query.shape, float("nan"), dtype=torch.float64)
    for i, (row, length, keys) in enumerate(zip(first_rows, lengths, used, strict=False)):
        k, v = (keys_of(call, x, i, keys) for x in (call.key, call.value))
        q = call.query[row : row + length]
        result[row : row + length] = attend(q, k, v, call.scale, call.causal)
    return result


def keys_of(call: FlashCall, x: Tensor, i: int, count: int) -> Tensor:
    """The first `count` keys, or values, of sequence i: (count, n_kv_head, head_dim)."""
    assert count > 0
    if call.block_table is not None:
        slots = slot_mapping(call.block_table[i].tolist(), x.shape[1], 0, count)
        return x.flatten(0, 1)[slots]
    first = int(call.cu_seqlens_k[i])
    assert first >= 0 and first + count <= len(x)
    return x[first : first + count]
