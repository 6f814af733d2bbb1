"""The models and stages of the jobs in rank_program.py, some of which fail as a job says."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from cli.loading import load_model
from cli.model import ModelOptions
from model import GPT, GPTConfig
from parallel.ranks import Ranks
from parallel.shard import Shard
from parallel.stages import Stage
from pretrained.sharding import views
from tests.helpers import tiny_model

LONG_S = 60  # longer than any world may take


class FaultyStage(Stage):
    """A stage that fails as `fault` says: `what` happens on `rank` when it is loaded, in the first
    batch that has prefill, or the first that has none, between two parts of a layer.

    Its caches hold big numbers until they are written: nobody may read them."""

    fault = None

    def __init__(self, model):
        super().__init__(model)
        self.suffer("load")

    def make_runner(self, key, *sizes):
        made = super().make_runner(key, *sizes)
        self.runners[key].cache.data.fill_(1e4)
        return made

    def run(self, key, sent):
        kind = "prefill" if any(len(chunk.tokens) > 1 for chunk in sent) else "decode"
        block = self.model.blocks[-1]
        block.project = partial(self.project, kind, block)
        return super().run(key, sent)

    def project(self, kind, block, *rows):
        """Compute the first part of a layer."""
        self.suffer(kind)
        return type(block).project(block, *rows)

    def suffer(self, when):
        """Suffer the fault, once, if this is the rank and the time for it."""
        fault = self.fault
        if fault and (fault["rank"], fault["when"]) == (self.model.ranks.rank, when):
            self.fault = None
            suffer(fault)


def out(kind):
    """A file of this job's world: "json" is its result."""
    return Path(f"{os.environ['RANK_OUT']}.{kind}")


def suffer(fault):
    """Get a signal, be late, or raise something."""
    what = fault["what"]
    if what == "wait":
        out("struck").touch()
        time.sleep(LONG_S)
    elif what == "be late":
        time.sleep(fault["seconds"])
    elif what == "raise":
        raise ArithmeticError("the model fails")
    else:
        os.kill(os.getpid(), getattr(signal, what))


def model_of(job, stage=FaultyStage):
    """The model of a job, that of one process or of several: from `tiny`, arguments of tiny_model;
    from `random`, a GPTConfig whose weights have a seed; or from a `checkpoint`, which may be one
    for each rank."""
    if "checkpoint" in job:
        return load_checkpoint(job)
    if size(job) == 1:
        return whole_of(job)
    FaultyStage.fault = job.get("fault")
    ranks = Ranks(job["tp"], job["pp"])
    return ranks.start(lambda: stage(shard_of(job, ranks))).model


def whole_of(job):
    """The model of a job in one process."""
    if "random" in job:
        return GPT(GPTConfig(**job["random"]), dtype=torch.float64, seed=7)
    return tiny_model(**job["tiny"])


def shard_of(job, ranks):
    """The part of the model that a rank has."""
    if "random" in job:
        return Shard(GPTConfig(**job["random"]), ranks, dtype=torch.float64, seed=7)
    model = tiny_model(**job["tiny"])
    shard = Shard(model.config, ranks, dtype=model.dtype, seed=None)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in shard.named_parameters():
        slices = shard.slices_of(name)
        parts = views(parameter, slices)
        for part, (start, end) in zip(parts, slices.ranges, strict=True):
            part.copy_(whole[slices.source].narrow(slices.dim, start, end - start))
    return shard


def size(job):
    """The number of processes."""
    return job["tp"] * job["pp"]


def load_checkpoint(job):
    """The checkpoint of a job, as the command line loads it."""
    directory = job["checkpoint"]
    if isinstance(directory, list):
        directory = directory[int(os.environ["RANK"])]
    options = ModelOptions(
        preset=None,
        model=directory,
        device="cpu",
        dtype="float64",
        attention="auto",
        seed=0,
        compile=False,
        threads=1,
        tp=job["tp"],
        pp=job["pp"],
    )
    return load_model(options, 32, positions_from="--max-len")
