"""How long an iteration takes on a machine that is not here: sums over constants of the device.

    cost = CostModel(GEOMETRIES["yi-34b"], DEVICES["a100-80gb"], tp=2)
    cost.stages(batch)      seconds of each pipeline stage for chunks (request, start, length)

An operation of a layer takes its arithmetic at the device's rate or its bytes at the memory's
bandwidth, whichever is longer (Sarathi-Serve §3.1, T = max(T_math, T_mem)), and a few microseconds
to start and drain. The rows of a matrix product are rounded up to whole tiles (SARATHI §4.4). Read
first: devices.py. Read next: simulation.py, which runs the policies on it."""

import math
from dataclasses import dataclass

from errors import check_number
from lab.simulator.devices import DEVICES, GEOMETRIES, LINKS, PARALLEL_BLOCKS, Device, Link, find
from model import Block, GPTConfig
from policies.iteration_time import BatchShape, IterationTime
from pretrained.sharding import local_config

BYTES = 2  # of a number: all weights, keys and values are of 16 bits
USABLE = 0.9  # of a device's memory; SARATHI's batches of 27 and 11 (§5.3) ask for it


def matrices(config, tp=1):
    """The four products of a layer on one of `tp` GPUs: name -> (rows of the weight, columns), one
    of which is divided (Megatron-LM), or ValueError; fewer KV heads than GPUs are repeated."""
    layer = Block(local_config(config, tp), device="meta")
    its = {name: getattr(layer, name) for name in ("preproj", "postproj", "ffn_ln1", "ffn_ln2")}
    return {name: (product.in_features, product.out_features) for name, product in its.items()}


def product_seconds(device, tokens, rows, columns):
    """Seconds of (tokens, rows) times (rows, columns): it computes whole tiles, in whole waves of
    them if the device says how many units share a wave, or moves bytes."""
    tiles = -(-tokens // device.tile) * columns / device.tile
    if device.units:
        tiles = -(-math.ceil(tiles) // device.units) * device.units
    flops = 2 * tiles * device.tile**2 * rows
    moved = BYTES * (rows * columns + tokens * (rows + columns))
    return device.op_s + max(flops / device.flops_per_s, moved / device.bytes_per_s)


@dataclass(eq=False)
class CostModel:
    """The time of iterations of one model on GPUs. Raises ValueError unless these divide it."""

    config: GPTConfig
    device: Device
    tp: int = 1  # GPUs that share a layer
    pp: int = 1  # stages of a pipeline; tp * pp GPUs in all
    tp_link: Link | None = None  # within a stage; None: the device's own
    pp_link: Link | None = None  # between stages; None: InfiniBand
    cpu_s: float = 0.0  # what a stage spends on an iteration before its GPU has work
    parallel_block: bool = False  # whether attention and MLP share one all-reduce

    def __post_init__(self):
        self.layers = local_config(self.config, self.tp, self.pp).n_layer
        check_number("cpu_s", self.cpu_s, "a finite number of seconds, at least 0", least=0)
        device, self.tile = self.device, self.device.tile
        self.tp_link = self.tp_link or LINKS[device.link]
        self.pp_link = self.pp_link or LINKS["infiniband"]
        self.matrices = matrices(self.config, self.tp)
        qkv, queries = self.matrices["preproj"][1], self.matrices["postproj"][0]  # of one GPU
        self.kv_bytes = BYTES * (qkv - queries)  # of a token in a layer, on one GPU
        self._pair_s = 4 * queries / device.attention_flops_per_s
        self._key_s = self.kv_bytes / device.attention_bytes_per_s

    @classmethod
    def named(cls, model, device="a100-80gb", tp=1, pp=1, tp_link=None, pp_link=None, cpu_s=0.0):
        """That of names in devices.py. Raises ValueError for others."""
        config, device = find(GEOMETRIES, "model", model), find(DEVICES, "device", device)
        links = [None if name is None else find(LINKS, "link", name) for name in (tp_link, pp_link)]
        return cls(config, device, tp, pp, *links, cpu_s, model in PARALLEL_BLOCKS)

    def weight_bytes(self):
        """Bytes of weights on the GPU that has most: its layers, and an embedding at either end."""
        layer = BYTES * sum(rows * columns for rows, columns in self.matrices.values())
        tables = 1 if self.pp > 1 or self.config.tie_embeddings else 2
        table = BYTES * self.config.vocab_size * self.config.n_embd
        return self.layers * layer + tables * table // self.tp

    def kv_tokens(self):
        """Tokens of KV cache that fit beside the weights, SARATHI §4.3.1, for all that is in flight
        at once; each stage holds them for its own layers. Raises ValueError if none does."""
        memory, weights = self.device.memory_bytes, self.weight_bytes()
        tokens = int((USABLE * memory - weights) // (self.kv_bytes * self.layers))
        if tokens < 1:
            why = f"do not fit {USABLE:.0%} of the {memory / 1e9:.0f} GB of an {self.device.name}"
            raise ValueError(f"{weights / 1e9:.1f} GB of weights {why}: try more tp or pp")
        return tokens

    def max_batch(self, max_len):
        """B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1, of each of `pp` micro-batches."""
        return self.kv_tokens() // max_len // self.pp

    def layer_seconds(self, batch):
        """Seconds of one layer by kind, a dict. Attention goes chunk by chunk, all of one token
        (decodes) at once; an all-reduce in a ring of tp GPUs in 2 (tp - 1) steps of a part."""
        device, tp, n_embd, link = self.device, self.tp, self.config.n_embd, self.tp_link
        tokens = sum([length for _, _, length in batch])
        qkv, inner = self.matrices["preproj"][1], self.matrices["ffn_ln1"][1]
        numbers = 8 * n_embd + 2 * qkv + 2 * inner  # of norms and sums, rotation, activation
        step_s = link.step_s + BYTES * tokens * n_embd / tp / link.bytes_per_s
        all_reduce_s = device.op_s + 2 * (tp - 1) * step_s if tp > 1 else 0.0
        products = [product_seconds(device, tokens, *its) for its in self.matrices.values()]
        attention = sum([self.chunk_seconds(start, n) for _, start, n in batch if n > 1])
        if keys := sum([start + 1 for _, start, n in batch if n == 1]):
            riding = device.riding if attention else 1  # SARATHI, Table 2
            attention += device.op_s + riding * self._key_s * keys
        return {
            "linear": sum(products),
            "others": 5 * device.op_s + BYTES * tokens * numbers / device.bytes_per_s,
            "all_reduce": all_reduce_s * (1 if self.parallel_block else 2),
            "attention": attention,
        }

    def chunk_seconds(self, start, length):
        """Seconds of one layer's attention for a chunk: whole tiles of queries, with all before and
        half of themselves; or to read its keys and values, if that takes longer."""
        pairs = -(-length // self.tile) * self.tile * (start + length / 2)
        return self.device.op_s + max(self._pair_s * pairs, self._key_s * (start + length))

    def stages(self, batch):
        """A list: seconds of each stage for a batch of (request, start, length); those of a hop."""
        tokens, n_embd = sum([length for _, _, length in batch]), self.config.n_embd
        head = n_embd, self.config.vocab_size // self.tp  # for one token of each chunk
        seconds = [self.cpu_s + self.layers * sum(self.layer_seconds(batch).values())] * self.pp
        seconds[-1] += product_seconds(self.device, len(batch), *head)
        # to reach the next stage; each of the tp GPUs sends its part
        bandwidth = self.pp_link.bytes_per_s * (self.tp if self.pp_link.per_gpu else 1)
        return seconds, self.pp_link.step_s + BYTES * tokens * n_embd / bandwidth

    def seconds(self, batch):
        """Seconds of one iteration from the first stage to the last, with nothing in the way."""
        stages, hop = self.stages(batch)
        return sum(stages) + (self.pp - 1) * hop


class FittedCost:
    """The cost of iterations on a machine that was timed: a law for each of its stages, fitted to
    the stage's profile, [(BatchShape, seconds)], and `hop_s` from one to the next."""

    cpu_s, tile = 0.0, 1

    def __init__(self, profiles, hop_s=0.0):
        self.laws, self.hop_s = [IterationTime(profile) for profile in profiles], hop_s
        self.pp = len(self.laws)

    def stages(self, batch):
        """As CostModel.stages, of chunks whose requests have not moved on."""
        shape = BatchShape.of(batch)
        return [law.predict(shape) for law in self.laws], self.hop_s
