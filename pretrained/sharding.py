"""Which slices of a model's weights one of several ranks has: Megatron-LM's (Shoeybi et al. 2019).

Of preproj and ffn_ln1 a rank has columns, by head and gate with up; of postproj and ffn_ln2 the
rows that go with them; of embedding and head some of the vocabulary. KV heads are repeated where
there are fewer than ranks. A pipeline's stages have layers that follow each other. Read next:
checkpoints.py, parallel/shard.py."""

import re
from dataclasses import replace

import torch

from errors import check_whole
from model import init_weight


def local_config(config, tp, pp=1):
    """The GPTConfig of what one rank has. Raises ValueError, naming what does not divide."""
    for name, size, field in (("tp", tp, "n_head"), ("tp", tp, "n_inner"), ("pp", pp, "n_layer")):
        if (n := getattr(config, field)) % check_whole(name, size, least=1):
            raise ValueError(f"{name}={size}: must divide {field}={n}")
    if (n := config.n_kv_head) % tp and tp % n:
        raise ValueError(f"tp={tp}: must divide n_kv_head={n}, or be a multiple of it")
    own = dict(n_head=config.n_head // tp, n_kv_head=max(1, n // tp), n_inner=config.n_inner // tp)
    return replace(config, n_layer=config.n_layer // pp, **own)


def cut(config, tp, pp, rank, name, shape):
    """What a rank has of the parameter that it calls `name`, of local `shape`: its name in the
    whole model of this GPTConfig, the dimension that is divided, and [(start, end)] of it there.
    These follow each other in the local one, and then zeros. Rank r is part r % tp of its stage."""
    stage, part = divmod(rank, tp)
    local, (*_, module, kind) = local_config(config, tp, pp), name.split(".")
    layer = lambda match: str(int(match[0]) + stage * local.n_layer)
    name = re.sub(r"(?<=blocks\.)\d+", layer, name)
    if module == "head" and config.tie_embeddings:
        name = "token_embedding.weight"
    share = lambda n, first=0: (first + n * part // tp, first + n * (part + 1) // tp)
    dim, ranges = 0, [(0, shape[0])]
    if module == "preproj":
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        a = q + config.n_kv_head * part // tp * config.head_dim  # the first of its keys
        b = a + local.n_kv_head * config.head_dim
        ranges = [share(q), (a, b), (a + kv, b + kv)]
    elif module == "ffn_ln1":
        starts = range(0, shape[0] * tp, config.n_inner)  # of gate and up, or of the only one
        ranges = [share(config.n_inner, first) for first in starts]
    elif module in ("postproj", "ffn_ln2") and kind == "weight":
        dim, ranges = 1, [share(shape[1] * tp)]
    elif module in ("postproj", "ffn_ln2") and part:
        ranges = []  # all parts are added up, and the bias once
    elif module in ("token_embedding", "head"):
        ranges = [tuple(min(config.vocab_size, shape[0] * n) for n in (part, part + 1))]
    return name, dim, ranges


def views(p, dim, ranges):
    """A view of each of the `ranges` in a rank's parameter `p`, as of `cut`; what is left is 0."""
    sizes = [end - start for start, end in ranges]
    *parts, rest = p.split([*sizes, p.shape[dim] - sum(sizes)], dim)
    rest.zero_()
    return parts


def random_weights(shard, generator):
    """Give a parallel.shard.Shard what a GPT would have there: all weights of the whole model are
    made, one by one, and it keeps its own."""
    own = {name: (p, *its) for n, p in shard.named_parameters() for name, *its in [shard.cut(n)]}
    for name, p in shard.whole_model().named_parameters():
        p = torch.empty(p.shape, dtype=shard.dtype, device=shard.device)
        init_weight(name, p, shard.whole.n_layer, generator)
        if name in own:
            target, dim, ranges = own[name]
            for view, (start, end) in zip(views(target, dim, ranges), ranges):
                view.copy_(p.narrow(dim, start, end - start))
