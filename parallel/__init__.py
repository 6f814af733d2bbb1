"""Tensor and pipeline parallelism, replicas and pools over torch.distributed: see README.md."""

from engine import Engine
from model import GPT
from parallel.instances import ReplicasEngine
from parallel.shard import Shard
from parallel.stages import ParallelEngine, ParallelRunner
from runtime.runner import Runner


def engine_for(model: GPT) -> type[Engine]:
    """The class of engines that serve this model: on all ranks if it is a Shard, else here."""
    if not isinstance(model, Shard):
        return Engine
    return ReplicasEngine if model.ranks.copies > 1 else ParallelEngine


def runner_for(model: GPT) -> type[Runner]:
    """The class of runners of this model, which compute batches without a scheduler."""
    return ParallelRunner if isinstance(model, Shard) else Runner
