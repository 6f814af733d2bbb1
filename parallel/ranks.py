"""The processes that serve one model: rank 0 decides, all ranks carry out its commands.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and wait for
commands: the name of a method of stages.Stage, and its arguments. Activations and sums go through
NCCL on CUDA, through gloo on a CPU. Commands and replies go through gloo everywhere.

Who waits for a rank that is gone gets a RuntimeError of torch, at once; for one that hangs, after
TIMEOUT. Then torchrun ends all others. Read next: shard.py."""

import atexit
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from runtime.torchrun import Place, find_place

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # to wait for another rank: to come, to load, to compute
IDLE_TIMEOUT = timedelta(days=1000)  # to wait for a command
MOST_IN_FLIGHT = 999  # messages that are kept alive while they are sent
STARTED = -1  # the number of a rank's first reply: it has loaded its part


class Command(NamedTuple):
    """A message of rank 0 to all others."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """What a method returned, sent to rank 0. A method that returns None sends nothing."""

    number: int  # of the command
    result: Any


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them.

    Rank r is part r % tp of stage r // tp. Raises ValueError if torchrun has started another
    number, its variables make no sense, or GPUs are missing; RuntimeError if they do not meet."""

    def __init__(self, tp: int, pp: int, device_type: str = "cpu") -> None:
        self.tp = tp
        self.pp = pp
        self.size = tp * pp
        place = find_place()
        self.rank = place.rank
        self.stage, self.part = divmod(self.rank, tp)
        if place.world_size != self.size:
            started = place.world_size
            raise ValueError(f"tp={tp}, pp={pp}: needs {self.size} processes, not {started}")
        self.device = device_of(device_type, place)

        self.work: Any = None  # the object whose methods are called, once `start` has made it
        self.numbers = count()  # of commands, and of other things that all ranks must tell apart
        self.replies: dict[int, dict[int, Any]] = {}  # on rank 0: command -> {rank: result}
        self.in_flight: deque[tuple[list[Any], list[Tensor]]] = deque(maxlen=MOST_IN_FLIGHT)
        self.out_of_step = False  # a command was broken off on rank 0: others went on
        self.waited = 0.0  # seconds, for commands and for replies

        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
        mesh = init_device_mesh(device_type, (pp, tp), mesh_dim_names=("pp", "tp"))
        self.tp_group = mesh["tp"].get_group()
        self.command_group: Any = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self.reply_group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        # in seconds of the epoch: clocks of nodes differ
        clocks_began = self.gather(max(time.time() - time.perf_counter() for _ in range(99)))
        self._clock_offset_s = clocks_began[self.rank] - clocks_began[0]

    def clock(self) -> float:
        """Seconds, on the clock of rank 0."""
        return time.perf_counter() + self._clock_offset_s

    def gather(self, value: T) -> list[T]:
        """The values that all ranks give here, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def start(self, make: Callable[[], T]) -> T:
        """Let each rank make the object whose methods are called by commands.

        Rank 0 returns its own when all ranks have made theirs. On others this never returns: they
        carry out commands until rank 0 ends."""
        if self.rank > 0:
            self._carry_out_commands(make)
            raise SystemExit
        self.work = make()
        atexit.register(self.end)
        self.wait_for_replies(STARTED, range(1, self.size))
        return self.work

    @record  # torchrun reports what is raised here
    def _carry_out_commands(self, make: Callable[[], object]) -> None:
        """The life of a rank other than 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        self.work = make()
        self._send(Reply(STARTED, True), [0], self.reply_group)
        while True:
            began = time.perf_counter()
            command: Command | None = self._receive(0, self.command_group)
            self.waited += time.perf_counter() - began
            if command is None:  # all is done
                return
            result = getattr(self.work, command.method)(*command.arguments)
            if result is not None:
                self._send(Reply(command.number, result), [0], self.reply_group)

    # What rank 0 calls.

    def command(self, method: str, *arguments: Any) -> int:
        """Let all ranks call a method. Returns the command's number when rank 0 has called it."""
        command = Command(next(self.numbers), method, arguments)
        with self._unbroken():
            self._send(command, range(1, self.size), self.command_group)
            result = getattr(self.work, method)(*arguments)
        if result is not None:
            self.replies.setdefault(command.number, {})[0] = result
        return command.number

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Let all ranks call a method that returns something: the results, in their order."""
        return self.results(self.command(method, *arguments), range(self.size))

    def results(self, number: int, ranks: Iterable[int]) -> list[Any]:
        """Wait for what a command returned on these ranks, and return it in their order."""
        self.wait_for_replies(number, ranks)
        replies = self.replies.pop(number)
        return [replies[rank] for rank in ranks]

    def wait_for_replies(self, number: int, ranks: Iterable[int]) -> None:
        """Wait until `replies` has those of these ranks to a command. Each rank sends its replies
        in the order of the commands."""
        began = time.perf_counter()
        for rank in ranks:
            while rank not in self.replies.setdefault(number, {}):
                with self._unbroken():
                    reply: Reply = self._receive(rank, self.reply_group)
                self.replies.setdefault(reply.number, {})[rank] = reply.result
        self.waited += time.perf_counter() - began

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """What is sent, received or computed here is so whole. If an exception breaks it off, the
        ranks are out of step: then this process ends when it comes here again."""
        if self.out_of_step:
            print("error: the ranks are out of step: a command was broken off", file=sys.stderr)
            os._exit(1)
        self.out_of_step = True
        yield
        self.out_of_step = False

    def end(self) -> None:
        """Let the other ranks end. Those that are out of step end when they lose this one."""
        if self.out_of_step:
            return
        with suppress(RuntimeError):  # of gloo: one has ended
            for work in self._send(None, range(1, self.size), self.command_group):
                work.wait(TIMEOUT)

    # Messages.

    def _send(self, message: Command | Reply | None, ranks: Iterable[int], group: Any) -> list[Any]:
        """Send a message to these ranks, without waiting. Returns what is under way."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        parts = [torch.tensor([len(body)]), body]
        works = [dist.isend(part, dst=rank, group=group) for rank in ranks for part in parts]
        self.in_flight.append((works, parts))  # the tensors must live until they are sent
        return works

    def _receive(self, rank: int, group: Any) -> Any:
        """The next message of a rank."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group)
        body = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(body, rank, group)
        return pickle.loads(body.numpy().tobytes())


def device_of(device_type: str, place: Place) -> torch.device:
    """The CPU, or the GPU of a process. Raises ValueError if there is not one for each."""
    if device_type != "cuda":
        return torch.device(device_type)
    processes = place.local_world_size
    gpus = torch.cuda.device_count()
    if processes > gpus:
        raise ValueError(f"LOCAL_WORLD_SIZE={processes}: must be at most {gpus}, as many GPUs")
    device = torch.device(device_type, place.local_rank)
    torch.cuda.set_device(device)
    return device
