"""Stand-ins for what runs on CUDA alone: FlashAttention by its definition, and a pretended GPU."""

import torch

import attention
from attention import flash


def flash_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout, causal, debug, *,
    seqused_k, block_table,
):  # fmt: skip
    """aten::_flash_attention_forward by definition, with the checks that torch's kernel makes."""
    n = len(cu_seqlens_q) - 1
    assert dropout == 0 and causal and not debug and n > 0
    for tensor, shape in ((cu_seqlens_q, n + 1), (cu_seqlens_k, n + 1), (seqused_k, n)):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.shape == (shape,)
    for x in (q, k, v):
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    if block_table is not None:
        assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
        assert k.shape[1] % 256 == 0 and k.shape == v.shape and len(block_table) == n
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_q and sum(lengths) == len(q) and max(seqused_k.tolist()) <= max_k
    group = q.shape[1] // k.shape[-2]
    outputs = []
    for i, rows in enumerate(q.split(lengths)):
        used = int(seqused_k[i])
        if block_table is None:
            start = int(cu_seqlens_k[i])
            assert start >= 0 and start + used <= len(k)
            keys, values = k[start : start + used], v[start : start + used]
        else:
            pages = block_table[i, : -(-used // k.shape[1])].tolist()
            keys, values = (torch.cat([x[page] for page in pages])[:used] for x in (k, v))
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        scores = rows.transpose(0, 1) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(used - len(rows) + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs), None, None, None, None


def pretend_flash(monkeypatch, operator=flash_attention):
    """Let attention.flash run on a CPU in float64, by that operator."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (attention, flash):
        monkeypatch.setattr(module, "SIXTEEN_BITS", (torch.float64,))
