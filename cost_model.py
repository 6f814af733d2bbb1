"""How long an iteration takes on a machine that is not here: sums over a few constants of the device.

    cost = CostModel(GEOMETRIES["yi-34b"], DEVICES["a100-80gb"], tp=2)
    cost.stages(batch)      seconds of each pipeline stage for chunks (request, start, length), and of a hop to the next

An operation of a layer takes as long as its arithmetic at the device's rate or its bytes at the memory's bandwidth,
whichever is longer (Sarathi-Serve §3.1, T = max(T_math, T_mem)), and a few microseconds to start and to drain. The rows
of a matrix product are rounded up to whole tiles (SARATHI §4.4). Each constant has its source beside it; `fit_products`
finds those of the matrix products from measured times. The memory that is left for keys and values, and so how many
requests run at once, is SARATHI §4.3.1.

Read next: simulator.py, which runs the policies on it.
"""

import csv
import math
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real

import numpy as np

from iteration_time import BatchShape, IterationTime
from model import PRESETS, GPTConfig
from scheduler import check_whole

BYTES = 2  # of a number: all weights, keys and values are of 16 bits
USABLE = 0.9  # of a device's memory for weights, keys and values; SARATHI's batches of 27 and 11 (§5.3) ask for it


@dataclass(frozen=True)
class Link:
    """What joins GPUs: bytes per second through it, and seconds that each step of a transfer takes besides.

    `per_gpu`: whether each GPU of a node has one of its own to other nodes; otherwise they share it.
    """

    bytes_per_s: float
    step_s: float
    source: str = ""
    per_gpu: bool = True


LINKS = {
    "nvlink3": Link(230e9, 2.5e-6, "nccl-tests on a DGX A100: bus bandwidth of large all-reduces, 40 us for small"),
    "nvlink4": Link(345e9, 2.5e-6, "that of nvlink3, times 900 / 600 GB/s"),
    "pcie4": Link(16e9, 5e-6, "half of the 32 GB/s of 16 lanes: data passes through the host's memory"),
    "infiniband": Link(20e9, 5e-6, "HDR, 200 Gb/s for each GPU of a DGX A100, at 80 %"),
    "ethernet": Link(10e9, 50e-6, "100 Gb/s for a whole node, at 80 %, through TCP", per_gpu=False),
}


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are those that kernels reach, not those of the data sheet.

    flops_per_s, bytes_per_s       of matrix products in 16 bits, and of the memory
    attention_flops_per_s, attention_bytes_per_s       of attention over chunks, and over the cache of decodes
    memory_bytes       all there is, as the data sheet says it
    tile               rows of a matrix product are rounded up to a multiple of it
    op_s               seconds to start and drain one kernel
    link               what joins it to others in its node, a name in LINKS
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    attention_flops_per_s: float
    attention_bytes_per_s: float
    memory_bytes: float
    tile: int = 128
    op_s: float = 5e-6
    link: str = "nvlink3"
    source: str = ""


# What `fit_products` finds, rounded, in measured times of a LLaMA-2-7B layer on one A100-80GB (Vidur's profile); the
# data sheet says 312 TFLOP/s and 2.04 TB/s. Chunks reach what FlashAttention-2 (Dao 2023, Figure 5) does with causal
# masks of about 1K keys; the cache of decodes is read as fast as weights.
A100 = Device("A100-80GB", 227e12, 1.66e12, 120e12, 1.66e12, 80e9, source="fit to measured products; FlashAttention-2")


def _like_a100(name, flops_per_s, bytes_per_s, memory_bytes, link):
    """A device of which only the data sheet is known, taken to reach the same share of it as an A100."""
    math_share, memory_share = flops_per_s / 312e12, bytes_per_s / 2.039e12
    return replace(A100, name=name, flops_per_s=math_share * A100.flops_per_s,
                   attention_flops_per_s=math_share * A100.attention_flops_per_s,
                   bytes_per_s=memory_share * A100.bytes_per_s,
                   attention_bytes_per_s=memory_share * A100.attention_bytes_per_s, memory_bytes=memory_bytes,
                   link=link, source="data sheet, and the shares of it that an A100 reaches")


DEVICES = {
    "a100-80gb": A100,
    "a40": _like_a100("A40", 149.7e12, 696e9, 48e9, "pcie4"),
    # SARATHI, Table 2: 1,024 prefill tokens take 224.8 ms in linear layers and 10 ms in attention, four decodes at
    # 1,024 tokens 44.28 ms and 5.68 ms (LLaMA-13B, 40 layers; the rates are what gives these times, see the tests).
    "a6000": Device("A6000", 116.0e12, 584e9, 43.8e12, 612e9, 48e9, link="pcie4", source="SARATHI, Table 2"),
    "h100": _like_a100("H100", 989e12, 3.35e12, 80e9, "nvlink4"),
    "h200": _like_a100("H200", 989e12, 4.8e12, 141e9, "nvlink4"),
}

# Geometries of which there are only times here, no forward pass: learned positions and two matrices in the MLP, as in
# GPT-2. Falcon's attention and MLP stand side by side and share one all-reduce.
GEOMETRIES = PRESETS | {
    "gpt3-175b": GPTConfig("gpt2", 50257, 96, 96, 12288, max_positions=4096, tie_embeddings=True),
    "falcon-180b": GPTConfig("gpt2", 65024, 80, 232, 14848, n_kv_head=8, head_dim=64, max_positions=16384,
                             tie_embeddings=True),
}
PARALLEL_BLOCKS = ("falcon-180b",)


def find(table, what, name):
    """table[name]. Raises ValueError, naming what it should be, if it is not there."""
    if name not in table:
        raise ValueError(f"{what}={name!r}: must be one of {', '.join(table)}")
    return table[name]


def cost_of(model, device="a100-80gb", tp=1, pp=1, tp_link=None, pp_link=None, cpu_s=0.0):
    """The CostModel of a model, a device and links by name. Raises ValueError, naming what it should be, for others."""
    links = [None if name is None else find(LINKS, "link", name) for name in (tp_link, pp_link)]
    return CostModel(find(GEOMETRIES, "model", model), find(DEVICES, "device", device), tp, pp, *links, cpu_s,
                     model in PARALLEL_BLOCKS)


def heads_per_gpu(config, tp):
    """(query heads, KV heads) that each of `tp` GPUs has; KV heads are repeated where there are fewer than GPUs."""
    return config.n_head // tp, max(1, config.n_kv_head // tp)


def matrices(config, tp=1):
    """The four matrix products of a layer on one of `tp` GPUs: name -> (rows of the weight, columns).

    Columns or rows are divided (Megatron-LM); KV heads are repeated where there are fewer than GPUs. Raises ValueError
    unless tp divides heads and inner dimension, and KV heads go into GPUs or GPUs into KV heads.
    """
    check_whole("tp", tp, least=1)
    for field in ("n_head", "n_inner"):
        if getattr(config, field) % tp:
            raise ValueError(f"tp={tp}: must divide {field}={getattr(config, field)}")
    if config.n_kv_head % tp and tp % config.n_kv_head:
        raise ValueError(f"tp={tp}: must divide n_kv_head={config.n_kv_head}, or be a multiple of it")
    heads, kv_heads = heads_per_gpu(config, tp)
    gates = 2 if config.family == "llama" else 1
    return {"preproj": (config.n_embd, (heads + 2 * kv_heads) * config.head_dim),
            "postproj": (heads * config.head_dim, config.n_embd),
            "ffn_ln1": (config.n_embd, gates * config.n_inner // tp), "ffn_ln2": (config.n_inner // tp, config.n_embd)}


def whole_tiles(rows, tile):
    """The rows, or an array of them, rounded up to a multiple of the tile."""
    return -(-rows // tile) * tile


def product_seconds(device, tokens, rows, columns):
    """Seconds of (tokens, rows) times (rows, columns): computing in whole tiles, or moving its bytes."""
    math_s = 2 * whole_tiles(tokens, device.tile) * rows * columns / device.flops_per_s
    return device.op_s + max(math_s, BYTES * (rows * columns + tokens * (rows + columns)) / device.bytes_per_s)


def linear_seconds(config, device, tokens, tp=1):
    """Seconds of each matrix product of one layer with so many tokens: name -> seconds."""
    return {name: product_seconds(device, tokens, *shape) for name, shape in matrices(config, tp).items()}


class CostModel:
    """The time of iterations of one model on one arrangement of GPUs.

    config       a GPTConfig
    device       a Device
    tp, pp       GPUs that share a layer, and stages of a pipeline; tp * pp GPUs in all
    tp_link, pp_link       Links within and between stages; None: the device's own, and InfiniBand
    cpu_s        seconds that each stage spends on an iteration before its GPU has work (scheduling, launching)
    parallel_block       whether attention and MLP share one all-reduce

    Raises ValueError if tp does not divide heads and inner dimension, or pp the layers.
    """

    def __init__(self, config, device, tp=1, pp=1, tp_link=None, pp_link=None, cpu_s=0.0, parallel_block=False):
        check_whole("pp", pp, least=1)
        if config.n_layer % pp:
            raise ValueError(f"pp={pp}: must divide n_layer={config.n_layer}")
        if not isinstance(cpu_s, Real) or not 0 <= cpu_s < math.inf:
            raise ValueError(f"cpu_s={cpu_s!r}: must be a finite number of seconds, at least 0")
        self.config, self.device, self.tp, self.pp, self.cpu_s, self.tile = config, device, tp, pp, cpu_s, device.tile
        self.tp_link, self.pp_link = tp_link or LINKS[device.link], pp_link or LINKS["infiniband"]
        self.layers = config.n_layer // pp
        self.all_reduces = 1 if parallel_block else 2
        self.matrices = matrices(config, tp)
        heads, kv_heads = heads_per_gpu(config, tp)
        self.kv_bytes = 2 * kv_heads * config.head_dim * BYTES  # of a token in one layer on one GPU
        self._pair_s = 4 * heads * config.head_dim / device.attention_flops_per_s
        self._key_s = self.kv_bytes / device.attention_bytes_per_s
        self._by_tokens, self._by_rows = {}, {}

    def weight_bytes(self):
        """Bytes of weights on the GPU that has most: its layers, and on the first and last stage an embedding."""
        layer = BYTES * sum(rows * columns for rows, columns in self.matrices.values())
        embeddings = 1 if self.pp > 1 or self.config.tie_embeddings else 2
        return self.layers * layer + embeddings * BYTES * self.config.vocab_size * self.config.n_embd // self.tp

    def kv_tokens(self):
        """Tokens of KV cache that fit beside the weights, SARATHI §4.3.1. Raises ValueError if the model does not.

        All stages hold so many tokens, each for its own layers; what is in flight at once shares them.
        """
        left = USABLE * self.device.memory_bytes - self.weight_bytes()
        if left < self.kv_bytes * self.layers:
            raise ValueError(f"{self.weight_bytes() / 1e9:.1f} GB of weights do not fit {USABLE:.0%} of the "
                             f"{self.device.memory_bytes / 1e9:.0f} GB of an {self.device.name}: try more tp or pp")
        return int(left // (self.kv_bytes * self.layers))

    def max_batch(self, max_len):
        """B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1, for each of the `pp` micro-batches in flight."""
        check_whole("max_len", max_len, least=1)
        return self.kv_tokens() // max_len // self.pp

    def layer_seconds(self, tokens):
        """Seconds of one layer apart from attention: {"linear", "others", "all_reduce"}."""
        config, device = self.config, self.device
        qkv, inner = self.matrices["preproj"][1], self.matrices["ffn_ln1"][1]
        traffic = BYTES * tokens * (8 * config.n_embd + 2 * qkv + 2 * inner)  # norms and sums; rotation; activation
        return {"linear": sum(linear_seconds(config, device, tokens, self.tp).values()),
                "others": 5 * device.op_s + traffic / device.bytes_per_s,  # two norms, rotation, activation, sum
                "all_reduce": self.all_reduces * self.all_reduce_seconds(tokens)}

    def all_reduce_seconds(self, tokens):
        """Seconds of adding up (tokens, n_embd) over tp GPUs in a ring: 2 (tp - 1) steps of a part each."""
        if self.tp == 1:
            return 0.0
        steps, link = 2 * (self.tp - 1), self.tp_link
        part = BYTES * tokens * self.config.n_embd / self.tp
        return self.device.op_s + steps * (link.step_s + part / link.bytes_per_s)

    def chunk_seconds(self, start, length):
        """Seconds of one layer's attention for a chunk: its queries, in whole tiles, with all before them and half of
        themselves; or reading its keys and values, if that takes longer."""
        padded = whole_tiles(length, self.device.tile)
        return self.device.op_s + max(self._pair_s * padded * (start + length / 2), self._key_s * (start + length))

    def head_seconds(self, rows):
        """Seconds of the output head for so many rows, one for each chunk; its columns are divided like a layer's."""
        return product_seconds(self.device, rows, self.config.n_embd, self.config.vocab_size // self.tp)

    def hop_seconds(self, tokens):
        """Seconds for a batch to get from one stage to the next; each of the tp GPUs sends its part."""
        bandwidth = self.pp_link.bytes_per_s * (self.tp if self.pp_link.per_gpu else 1)
        return self.pp_link.step_s + BYTES * tokens * self.config.n_embd / bandwidth

    def stages(self, batch):
        """Seconds that each stage works on a batch of (request, start, length), a list; and seconds of a hop.

        A chunk of one token costs what a decode does, whatever it is.
        """
        tokens = keys = 0
        attention = 0.0
        for _, start, length in batch:
            tokens += length
            if length == 1:
                keys += start + 1
            else:
                attention += self.chunk_seconds(start, length)
        if keys:
            attention += self.device.op_s + self._key_s * keys
        known = self._by_tokens.get(tokens)
        if known is None:
            known = self._by_tokens[tokens] = (sum(self.layer_seconds(tokens).values()), self.hop_seconds(tokens))
        layer, hop = known
        head = self._by_rows.get(len(batch))
        if head is None:
            head = self._by_rows[len(batch)] = self.head_seconds(len(batch))
        seconds = [self.cpu_s + self.layers * (layer + attention)] * self.pp
        seconds[-1] += head
        return seconds, hop

    def seconds(self, batch):
        """Seconds of one iteration from the first stage to the last, with nothing in the way."""
        stages, hop = self.stages(batch)
        return sum(stages) + (self.pp - 1) * hop

    def parts(self, batch):
        """The seconds of an iteration by kind, without hops: linear, attention, others, all_reduce, head, cpu."""
        tokens = sum(length for _, _, length in batch)
        layer = {kind: self.config.n_layer * s for kind, s in self.layer_seconds(tokens).items()}
        head, cpu = self.head_seconds(len(batch)), self.pp * self.cpu_s
        attention = self.seconds(batch) - sum(layer.values()) - head - cpu - (self.pp - 1) * self.hop_seconds(tokens)
        return layer | {"attention": attention, "head": head, "cpu": cpu}


# -----------------------------------------------------------------------------------------------------
# constants from measured times

# columns of Vidur's profiles, and the names of the same products here
COLUMNS = {"attn_pre_proj": "preproj", "attn_post_proj": "postproj", "mlp_up_proj": "ffn_ln1",
           "mlp_down_proj": "ffn_ln2"}


def read_products(file):
    """Measured times of the matrix products of a layer: (tokens, name -> seconds), arrays of equal lengths.

    `file` is CSV with a column num_tokens and the columns of COLUMNS, in ms; others are ignored. Raises ValueError,
    naming file, line and column, if it is not that, and OSError if it cannot be read.
    """
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            missing = {"num_tokens", *COLUMNS} - set(reader.fieldnames or ())
            if missing:
                raise ValueError(f"{file}: must have the columns num_tokens and {', '.join(COLUMNS)}; "
                                 f"there is no {', '.join(sorted(missing))}")
            rows = []
            for row in reader:
                values = []
                for column in ("num_tokens", *COLUMNS):
                    try:
                        values.append(float(row[column]))
                    except (TypeError, ValueError):
                        values.append(math.nan)
                    whole = column == "num_tokens"
                    if not 0 < values[-1] < math.inf or whole and values[-1] % 1:
                        raise ValueError(f"{file} line {reader.line_num}: {column}={row[column]!r}: must be a positive "
                                         f"{'whole ' * whole}number")
                rows.append(values)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: must be CSV in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{file}: no times after the header: must have at least one")
    tokens, *times = np.array(rows).T
    return tokens.astype(int), {COLUMNS[column]: seconds / 1e3 for column, seconds in zip(COLUMNS, times)}


def product_errors(device, config, tokens, times, tp=1):
    """|predicted / measured - 1| of the sum of a layer's products, and of each: {"layer", name -> array}."""
    rows = [linear_seconds(config, device, int(n), tp) for n in tokens]
    predicted = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    errors = {name: abs(predicted[name] / times[name] - 1) for name in predicted}
    return {"layer": abs(sum(predicted.values()) / sum(times.values()) - 1)} | errors


def fit_products(device, config, tokens, times, tp=1, tiles=(1, 32, 64, 128, 256)):
    """The device with the rate, bandwidth, op_s and tile that fit measured times best.

    That is, with the least |log(predicted / measured)|, where each product and each doubling of the tokens counts
    alike. For every tile, a grid over the three others that narrows around its best point.
    """
    order = np.argsort(tokens)
    shapes = np.array([matrices(config, tp)[name] for name in times], float)  # (products, 2)
    measured = np.array([times[name][order] for name in times])  # (products, rows)
    tokens = tokens[order]
    weight = np.gradient(np.log(tokens)) if len(set(tokens)) > 2 else np.ones(len(tokens))
    weights = shapes.prod(axis=1)[:, None]
    moved = BYTES * (weights + tokens * shapes.sum(axis=1)[:, None])
    best = (math.inf, None)
    for tile in tiles:
        math_work = 2 * whole_tiles(tokens, tile) * weights
        rate, bandwidth, start = (math_work / measured).max(), (moved / measured).max(), measured.min()
        spans, found = [(rate / 2, rate), (bandwidth / 2, 2 * bandwidth), (0.0, start)], (math.inf, None)
        for _ in range(10):
            for rate, bandwidth, op_s in product(*(np.linspace(*span, 9) for span in spans)):
                seconds = op_s + np.maximum(math_work / rate, moved / bandwidth)
                found = min(found, (np.average(abs(np.log(seconds / measured)).mean(axis=0), weights=weight),
                                    (rate, bandwidth, op_s)))
            spans = [(max(x - (high - low) / 3, 0.0), x + (high - low) / 3) for x, (low, high) in zip(found[1], spans)]
        best = min(best, (found[0], (*found[1], tile)))
    rate, bandwidth, op_s, tile = best[1]
    return replace(device, flops_per_s=float(rate), bytes_per_s=float(bandwidth), op_s=float(op_s), tile=tile)


# -----------------------------------------------------------------------------------------------------
# a device that is here


class FittedCost:
    """The cost of iterations on this machine, as iteration_time.IterationTime fits it to a profile.

    `profile` is a list of (BatchShape, seconds), see profiling.py. One device, no pipeline.
    """

    pp, cpu_s, tile = 1, 0.0, 1

    def __init__(self, profile):
        self.law = IterationTime(profile)

    def stages(self, batch):
        """As CostModel.stages."""
        decodes = [start + 1 for _, start, length in batch if length == 1]
        shape = BatchShape(decodes=len(decodes), context_tokens=sum(decodes))
        for _, start, length in batch:
            if length > 1:
                shape = shape.with_chunk(start, length)
        return [self.law.predict(shape)], 0.0

    def seconds(self, batch):
        """Seconds of one iteration."""
        return self.stages(batch)[0][0]

    def describe(self):
        """The law, in words."""
        base, token, decode, key, pair = (1e3 * coefficient for coefficient in self.law.law)
        return (f"{base:.1f} ms, {token:.3f} per prefill token,\n{decode:.2f} per decode, {1e3 * key:.2f} per 1,000 "
                f"keys of a decode, {1e3 * pair:.3f} per 1,000 pairs of a chunk")
