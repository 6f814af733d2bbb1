"""The processes that serve one model: rank 0 decides, all ranks carry out its commands.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and wait for
commands: the name of a method of stages.Stage, and its arguments. Activations and sums go through
NCCL on CUDA, through gloo on a CPU. Commands and sampled tokens go through gloo everywhere.

Who waits for a rank that is gone gets a RuntimeError of torch, at once; for one that hangs, after
TIMEOUT. Then torchrun ends all others. Read next: shard.py."""

import atexit
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

T = TypeVar("T")
Command = tuple[str, tuple[Any, ...]]  # a method's name, and its arguments
TIMEOUT = timedelta(minutes=30)  # to wait for another rank: to come, to load, to compute
IDLE_TIMEOUT = timedelta(days=1000)  # to wait for a command


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them.

    Rank r is part r % tp of stage r // tp. Raises ValueError if torchrun has started another
    number, or a GPU is missing; RuntimeError if they do not meet."""

    def __init__(self, tp: int, pp: int, device_type: str = "cpu") -> None:
        self.tp = tp
        self.pp = pp
        self.size = tp * pp
        started = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.stage, self.part = divmod(self.rank, tp)
        if started != self.size:
            raise ValueError(f"tp={tp}, pp={pp}: needs {self.size} processes, not {started}")
        self.device = torch.device(device_type)
        if device_type == "cuda":
            gpus = torch.cuda.device_count()
            on_node = int(os.environ.get("LOCAL_WORLD_SIZE", started))
            if on_node > gpus:
                raise ValueError(f"LOCAL_WORLD_SIZE={on_node}: there are {gpus} GPUs")
            local_rank = int(os.environ.get("LOCAL_RANK", self.rank % on_node))
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)

        self.work: Any = None  # the object whose methods are called, once `start` has made it
        self.in_step = True  # on rank 0: no command was broken off while others went on
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
        self.tp_group, _ = dist.new_subgroups(tp)
        timeout = IDLE_TIMEOUT if self.rank else TIMEOUT
        self.command_group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: T) -> list[T]:
        """The values that all ranks give here, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def start(self, make: Callable[[], T]) -> T:
        """Let each rank make the object whose methods are called by commands.

        Rank 0 returns its own. On others this never returns: they carry out commands until rank 0
        ends."""
        if self.rank > 0:
            self._carry_out_commands(make)
            raise SystemExit
        self.work = make()
        atexit.register(self.end)
        return self.work

    @record  # torchrun reports what is raised here
    def _carry_out_commands(self, make: Callable[[], object]) -> None:
        """The life of a rank other than 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        self.work = make()
        commands: SimpleQueue[Command | None] = SimpleQueue()
        listener = Thread(target=self._listen, args=[commands], daemon=True)
        listener.start()
        for method, arguments in iter(commands.get, None):
            getattr(self.work, method)(*arguments)
        listener.join()
        self._leave()

    def _listen(self, commands: SimpleQueue[Command | None]) -> None:
        """Take each command at once, so that no rank waits until another has carried it out."""
        try:
            while command := self._broadcast(None):
                commands.put(command)
        finally:
            commands.put(None)  # all is done, or rank 0 is gone

    def _broadcast(self, command: Command | None) -> Command | None:
        """Send rank 0's command to all ranks, and return it on each."""
        message = [command]
        dist.broadcast_object_list(message, src=0, group=self.command_group)
        return message[0]

    # What rank 0 calls.

    def command(self, method: str, *arguments: Any) -> Any:
        """Let all ranks call a method of their objects. Returns what rank 0's returned."""
        with self.unbroken():
            self._broadcast((method, arguments))
            return getattr(self.work, method)(*arguments)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What is sent, computed or received here is so whole: if an exception breaks it off, the
        ranks are out of step, and no command follows."""
        self.check_in_step()
        self.in_step = False
        yield
        self.in_step = True

    def check_in_step(self) -> None:
        """Raise AssertionError if the ranks cannot go on."""
        assert self.in_step, "the ranks are out of step: a command was broken off"

    def end(self) -> None:
        """Let the other ranks end. Those that are out of step end when they lose this one."""
        if self.in_step:
            self._broadcast(None)
            self._leave()

    def _leave(self) -> None:
        """End gloo's threads: one that frees a tensor while Python ends would abort the process."""
        self.tp_group = None
        self.command_group = None
        dist.destroy_process_group()
