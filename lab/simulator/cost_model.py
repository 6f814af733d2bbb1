"""How long an iteration takes on a machine that is not here: sums over constants of the device.

    cost = CostModel(GEOMETRIES["yi-34b"], DEVICES["a100-80gb"], tp=2)
    cost.stages(batch)      StageTimes of a batch of chunks (request, start, length)

An operation of a layer takes its arithmetic at the device's rate or its bytes at the memory's
bandwidth, whichever is longer (Sarathi-Serve §3.1, T = max(T_math, T_mem)), and a few microseconds
to start and drain. The rows of a matrix product are rounded up to whole tiles (SARATHI §4.4). Read
first: devices.py. Read next: simulation.py, which runs the policies on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from config import GPTConfig
from lab.simulator.devices import DEVICES, GEOMETRIES, LINKS, PARALLEL_BLOCKS, Device, Link, find
from pretrained.sharding import local_config

BYTES = 2  # of a number: all weights, keys and values are of 16 bits
USABLE = 0.9  # of a device's memory; SARATHI's batches of 27 and 11 (§5.3) ask for it

Chunks = Sequence[tuple[Any, int, int]]  # (request, start, length) of each; a Batch is one
START = itemgetter(1)  # of a chunk; these are quick, and simulations ask for millions
LENGTH = itemgetter(2)


class StageTimes(NamedTuple):
    """The times of one batch in a pipeline."""

    seconds: list[float]  # of each stage
    hop_s: float  # to send the batch from one stage to the next


class LayerSeconds(NamedTuple):
    """The time of one layer by kind of operation."""

    linear: float  # the four matrix products
    elementwise: float  # norms, sums, rotation, activation
    all_reduce: float  # between the GPUs that share the layer
    attention: float


class Matrix(NamedTuple):
    """The shape of a weight, by which (tokens, rows) are multiplied."""

    rows: int
    columns: int


class LayerMatrices(NamedTuple):
    """The weights of the four products of a layer."""

    preproj: Matrix
    postproj: Matrix
    ffn_ln1: Matrix
    ffn_ln2: Matrix


def token_count(batch: Chunks) -> int:
    """The number of tokens in a batch."""
    return sum(map(LENGTH, batch))


def matrices(config: GPTConfig, tp: int = 1) -> LayerMatrices:
    """The weights of a layer on one of `tp` GPUs, which divide rows or columns (Megatron-LM); fewer
    KV heads than GPUs are repeated. Raises ValueError if `tp` does not divide the model."""
    local = local_config(config, tp)
    queries = local.n_head * local.head_dim
    keys = local.n_kv_head * local.head_dim
    gate_and_up = 2 if local.family == "llama" else 1  # SwiGLU has both, in one matrix
    return LayerMatrices(
        preproj=Matrix(local.n_embd, queries + 2 * keys),
        postproj=Matrix(queries, local.n_embd),
        ffn_ln1=Matrix(local.n_embd, gate_and_up * local.n_inner),
        ffn_ln2=Matrix(local.n_inner, local.n_embd),
    )


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at `x` on the line through `points`, (x, y) in increasing order of x. Before the
    first point and after the last one it stays level. Without numpy, which a browser lacks."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x < x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0)
    return points[-1][1]


def product_seconds(device: Device, tokens: int, rows: int, columns: int) -> float:
    """Seconds of (tokens, rows) times (rows, columns). It computes whole tiles of tokens, or it
    moves bytes, if that is longer."""
    whole_tiles = -(-tokens // device.tile) * device.tile
    flops = 2 * whole_tiles * rows * columns
    moved_bytes = BYTES * (rows * columns + tokens * (rows + columns))
    return device.op_s + max(flops / device.flops_per_s, moved_bytes / device.bytes_per_s)


@dataclass(eq=False)
class CostModel:
    """The time of iterations of one model on GPUs. Raises ValueError unless these divide it."""

    config: GPTConfig
    device: Device
    tp: int = 1  # GPUs that share a layer
    pp: int = 1  # stages of a pipeline; tp * pp GPUs in all
    tp_link: Link | None = None  # within a stage; None: the device's own
    pp_link: Link = LINKS["infiniband"]  # between stages
    cpu_s: float = 0.0  # CPU time of a stage in an iteration, before its GPU has work
    parallel_block: bool = False  # whether attention and MLP share one all-reduce
    # measured: (tokens, seconds that an iteration takes longer than is computed), the fewest tokens
    # first. It is interpolated, from nothing for no tokens.
    measured_excess: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        self.layers = local_config(self.config, self.tp, self.pp).n_layer  # of a stage
        self.tile = self.device.tile
        self.stage_link = self.tp_link or LINKS[self.device.link]
        self.matrices = matrices(self.config, self.tp)
        qkv = self.matrices.preproj.columns  # dimensions on one GPU
        queries = self.matrices.postproj.rows
        self.kv_bytes = BYTES * (qkv - queries)  # of a token in a layer, on one GPU
        self._pair_s = 4 * queries / self.device.attention_flops_per_s
        self._key_s = self.kv_bytes / self.device.attention_bytes_per_s
        self._token_seconds: dict[int, tuple[float, float, float]] = {}  # see token_seconds
        self._head_seconds: dict[int, float] = {}  # of the output head, by its rows
        # to reach the next stage, each of the tp GPUs sends its part
        links = self.tp if self.pp_link.per_gpu else 1
        self._hop_token_s = BYTES * self.config.n_embd / (links * self.pp_link.bytes_per_s)

    @classmethod
    def named(
        cls,
        preset: str,
        device: str = "a100-80gb",
        tp: int = 1,
        pp: int = 1,
        tp_link: str | None = None,
        pp_link: str | None = None,
        cpu_s: float = 0.0,
    ) -> "CostModel":
        """The CostModel of names in devices.py. Raises ValueError for other names."""
        return cls(
            config=find(GEOMETRIES, "preset", preset),
            device=find(DEVICES, "device", device),
            tp=tp,
            pp=pp,
            tp_link=None if tp_link is None else find(LINKS, "link", tp_link),
            pp_link=find(LINKS, "link", "infiniband" if pp_link is None else pp_link),
            cpu_s=cpu_s,
            parallel_block=preset in PARALLEL_BLOCKS,
        )

    def weight_bytes(self) -> int:
        """Bytes of weights on the GPU that has most: its layers, and an embedding at either end."""
        layer_bytes = BYTES * sum(rows * columns for rows, columns in self.matrices)
        tables = 1 if self.pp > 1 or self.config.tie_embeddings else 2
        table_bytes = BYTES * self.config.vocab_size * self.config.n_embd
        return self.layers * layer_bytes + tables * table_bytes // self.tp

    def kv_tokens(self) -> int:
        """Tokens of KV cache that fit beside the weights, for all batches in flight (SARATHI
        §4.3.1); each stage holds them for its own layers. Raises ValueError if none fits."""
        memory_bytes = self.device.memory_bytes
        weight_bytes = self.weight_bytes()
        kv_bytes = self.kv_bytes * self.layers  # of a token on one GPU
        tokens = int((USABLE * memory_bytes - weight_bytes) // kv_bytes)
        if tokens < 1:
            memory = f"{USABLE:.0%} of the {memory_bytes / 1e9:.0f} GB of an {self.device.name}"
            weights = f"{weight_bytes / 1e9:.1f} GB of weights"
            raise ValueError(f"{weights} do not fit {memory}: try more tp or pp")
        return tokens

    def max_batch(self, max_len: int) -> int:
        """B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1, of each of `pp` micro-batches."""
        return self.kv_tokens() // max_len // self.pp

    def layer_seconds(self, batch: Chunks) -> LayerSeconds:
        """The LayerSeconds of a batch. Attention goes chunk by chunk, and over all chunks of one
        token (decodes) at once."""
        chunks = [(start, n) for _, start, n in batch if n > 1]
        attention_s = sum([self.chunk_seconds(start, n) for start, n in chunks])
        decodes = len(batch) - len(chunks)
        if decodes:
            # a decode reads the keys before it and its own
            keys = sum(map(START, batch)) - sum([start for start, _ in chunks]) + decodes
            riding = self.device.riding if attention_s else 1  # SARATHI, Table 2
            attention_s += self.device.op_s + riding * self._key_s * keys
        linear_s, others_s, all_reduce_s = self.token_seconds(token_count(batch))
        return LayerSeconds(linear_s, others_s, all_reduce_s, attention_s)

    def token_seconds(self, tokens: int) -> tuple[float, float, float]:
        """Seconds of what one layer does for `tokens` tokens, whichever requests they are of:
        products, other operations, all-reduces. An all-reduce goes around a ring of tp GPUs in
        2 (tp - 1) steps, each with a part of the numbers."""
        if tokens in self._token_seconds:
            return self._token_seconds[tokens]
        device = self.device
        linear_s = sum([product_seconds(device, tokens, *matrix) for matrix in self.matrices])

        n_embd = self.config.n_embd
        widths = self.matrices.preproj.columns + self.matrices.ffn_ln1.columns
        numbers = 8 * n_embd + 2 * widths  # of norms and sums, rotation, activation
        others_s = 5 * device.op_s + BYTES * tokens * numbers / device.bytes_per_s

        all_reduce_s = 0.0
        if self.tp > 1:
            link = self.stage_link
            step_s = link.step_s + BYTES * tokens * n_embd / self.tp / link.bytes_per_s
            all_reduces = 1 if self.parallel_block else 2
            all_reduce_s = all_reduces * (device.op_s + 2 * (self.tp - 1) * step_s)
        if self.measured_excess:
            others_s += interpolate(tokens, [(0, 0.0), *self.measured_excess]) / self.layers
        self._token_seconds[tokens] = linear_s, others_s, all_reduce_s
        return linear_s, others_s, all_reduce_s

    def chunk_seconds(self, start: int, length: int) -> float:
        """Seconds of one layer's attention for a chunk: whole tiles of queries, with all tokens
        before it and the chunk, or half of it if masked keys are skipped; or to read its keys and
        values, if that takes longer."""
        own_keys = length / 2 if self.device.skips_masked else length
        pairs = -(-length // self.tile) * self.tile * (start + own_keys)
        return self.device.op_s + max(self._pair_s * pairs, self._key_s * (start + length))

    def stages(self, batch: Chunks) -> StageTimes:
        """The StageTimes of a batch."""
        return self._stages(sum(self.layer_seconds(batch)), token_count(batch), len(batch))

    def decode_stages(self, decodes: int, keys: int) -> StageTimes:
        """The StageTimes of so many decodes that read `keys` in all, their own included."""
        attention_s = self.device.op_s + self._key_s * keys
        return self._stages(sum(self.token_seconds(decodes)) + attention_s, decodes, decodes)

    def _stages(self, layer_s: float, tokens: int, chunks: int) -> StageTimes:
        """The StageTimes of a batch, of which a layer takes `layer_s`. The last stage has the
        output head, too."""
        seconds = [self.cpu_s + self.layers * layer_s] * self.pp
        if chunks not in self._head_seconds:
            head = Matrix(self.config.n_embd, self.config.vocab_size // self.tp)
            self._head_seconds[chunks] = product_seconds(self.device, chunks, *head)
        seconds[-1] += self._head_seconds[chunks]
        return StageTimes(seconds, self.pp_link.step_s + tokens * self._hop_token_s)

    def seconds(self, batch: Chunks) -> float:
        """Seconds of one iteration from the first stage to the last, with nothing in the way."""
        times = self.stages(batch)
        return sum(times.seconds) + (self.pp - 1) * times.hop_s
