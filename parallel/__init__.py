"""Tensor and pipeline parallelism over torch.distributed: see README.md."""

from engine import Engine
from model import GPT
from parallel.shard import Shard
from parallel.stages import ParallelEngine, ParallelRunner
from runtime.runner import Runner


def engine_for(model: GPT) -> type[Engine]:
    """The class of engines that serve this model: on all ranks if it is a Shard, else here."""
    return ParallelEngine if isinstance(model, Shard) else Engine


def runner_for(model: GPT) -> type[Runner]:
    """The class of runners of this model, which compute batches without a scheduler."""
    return ParallelRunner if isinstance(model, Shard) else Runner
