"""The models and stages of the jobs in rank_program.py, some of which fail as a job says."""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch

from cli.loading import ModelOptions, load_model
from model import GPT, GPTConfig
from parallel.ranks import Ranks
from parallel.shard import Shard
from parallel.stages import Stage
from parallel.transfer import Instance
from pretrained.sharding import views
from tests.helpers import tiny_model

LONG_S = 60  # longer than any world may take


def shard_of(model, ranks):
    """The part of a GPT that a rank has, as a Shard."""
    shard = Shard(model.config, ranks, dtype=model.dtype, seed=None)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in shard.named_parameters():
        slices = shard.slices_of(name)
        parts = views(parameter, slices)
        for part, (start, end) in zip(parts, slices.ranges, strict=True):
            part.copy_(whole[slices.source].narrow(slices.dim, start, end - start))
    return shard


class Spoilt:
    """A stage whose caches hold big numbers until they are written: nobody may read them."""

    def make_runner(self, key, *sizes):
        made = super().make_runner(key, *sizes)
        self.runners[key].cache.data.fill_(1e4)
        return made


class Faulty(Spoilt):
    """A stage that fails as `fault` says: `what` happens on `rank` when it is loaded, in the first
    batch that has prefill, or the first that has none, between two parts of a layer."""

    fault = None

    def __init__(self, model):
        super().__init__(model)
        fault = self.fault
        if fault and fault["when"] == "load" and fault["rank"] == model.ranks.rank:
            suffer(fault)

    def run(self, key, sent):
        kind = "prefill" if any(len(chunk.tokens) > 1 for chunk in sent) else "decode"
        rank = self.model.ranks.rank
        if self.fault and self.fault["rank"] == rank and self.fault["when"] == kind:
            block = self.model.blocks[-1]
            self.fault["project"] = block.project
            block.project = self.strike
        return super().run(key, sent)

    def strike(self, *rows):
        """Suffer the fault, once."""
        fault = self.fault
        self.fault = None
        project = fault["project"]
        self.model.blocks[-1].project = project
        suffer(fault)
        return project(*rows)


class SpoiltStage(Spoilt, Stage):
    """The part of a model."""


class FaultyStage(Faulty, Stage):
    """The part of a model."""


class FaultyInstance(Faulty, Instance):
    """A whole model. Keys and values take `link_s` seconds, or the fault happens "on the link"."""

    link_s = 0.0

    def _receive(self):
        received = super()._receive()
        if self.fault and self.fault["when"] == "on the link":
            suffer(self.fault)
        time.sleep(self.link_s)
        return received

    def num_received(self):
        """How many requests' keys and values have arrived and are in no cache yet."""
        return len(self.received)


def out(kind):
    """A file of this job's world: "json" is its result."""
    return Path(f"{os.environ['RANK_OUT']}.{kind}")


def send_signal(name, pid):
    """Send a signal to a rank, and note when."""
    out("struck").touch()
    os.kill(pid, getattr(signal, name))


def suffer(fault):
    """Get a signal, be late, or raise something."""
    what = fault["what"]
    if what == "wait":
        out("struck").touch()
        time.sleep(LONG_S)
    elif what == "be late":
        time.sleep(fault["seconds"])
    elif what == "be late in C":
        ctypes.PyDLL(None).sleep(fault["seconds"])  # holds Python's lock
    elif what == "raise":
        raise ArithmeticError("the model fails")
    elif what == "run out of memory":
        raise torch.OutOfMemoryError("no memory is left")
    else:
        send_signal(what, os.getpid())


def model_of(job, stage=SpoiltStage):
    """The model of a job, that of one process or of several: from `tiny`, arguments of tiny_model;
    from `random`, a GPTConfig whose weights have a seed; or from a `checkpoint`, which may be one
    for each rank."""
    if "checkpoint" in job:
        return load_checkpoint(job)

    def make(ranks):
        if "random" in job:
            config = GPTConfig(**job["random"])
            if ranks is None:
                return GPT(config, dtype=torch.float64, seed=7)
            return Shard(config, ranks, dtype=torch.float64, seed=7)
        model = tiny_model(**job["tiny"])
        return model if ranks is None else shard_of(model, ranks)

    if size(job) == 1:
        return make(None)
    ranks = Ranks(job["tp"], job["pp"], copies=job.get("copies", 1))
    if ranks.copies > 1:
        FaultyInstance.link_s = job.get("link_s", 0.0)
        stage = FaultyInstance
    return ranks.start(lambda: stage(make(ranks))).model


def size(job):
    """The number of processes."""
    return job["tp"] * job["pp"] * job.get("copies", 1)


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
