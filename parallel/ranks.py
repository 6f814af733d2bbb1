"""The processes that serve one model: rank 0 decides, all ranks carry out its commands.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and wait for
commands: the name of a method of stages.Stage, and its arguments. Activations and sums go through
NCCL on CUDA, through gloo on a CPU. Commands and replies go through gloo everywhere, and threads
wait for them.

Read next: watch.py, shard.py."""

import atexit
import os
import pickle
import queue
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel.meeting import device_of, meet, wait_for_port
from parallel.watch import Failure, Heartbeat, Process, Watch
from runtime.torchrun import find_meeting, find_place

T = TypeVar("T")
LOAD_LIMIT = timedelta(hours=2)  # to load the model
COMPUTE_LIMIT = timedelta(minutes=10)  # for a command, and to wait for a tensor of another rank
IDLE_LIMIT = timedelta(days=1000)  # to wait for a message: heartbeats come all the time
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


Message = Command | Reply | Failure | Heartbeat | None  # None: all is done


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them.

    Rank r is part r % tp of stage r // tp. Raises ConnectionError if they
    do not meet; ValueError if torchrun has started another number, its variables make no sense, or
    GPUs are missing."""

    def __init__(self, tp: int, pp: int, device_type: str = "cpu") -> None:
        self.tp = tp
        self.pp = pp
        self.size = tp * pp
        self.place = find_place()
        self.rank = self.place.rank
        self.stage, self.part = divmod(self.rank, tp)
        started = self.place.world_size
        if started != self.size:
            raise ValueError(f"tp={tp}, pp={pp}: needs {self.size} processes, not {started}")
        self.device = device_of(device_type, self.place)

        self.work: Any = None  # the object whose methods are called, once `start` has made it
        self.numbers = count()  # of commands, and of other things that all ranks must tell apart
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.replies: dict[int, dict[int, Any]] = {}  # on rank 0: command -> {rank: result}
        self.reply_arrived = Condition()
        self.in_flight: deque[tuple[list[Any], list[Tensor]]] = deque(maxlen=MOST_IN_FLIGHT)
        self.send_lock = Lock()
        self.out_of_step = False  # a command was broken off on rank 0: others went on
        self.waited = 0.0  # seconds, for commands and for replies

        self.peers = range(1, self.size) if self.rank == 0 else range(1)  # they send messages
        processes = self._connect(device_type)
        self._clock_offset_s = processes[self.rank].clock_began - processes[0].clock_began
        self.watch = Watch(self.place, processes, self.peers, self._send)
        self.receivers: dict[int, Thread] = {}
        for peer in self.peers:
            self.receivers[peer] = Thread(target=self._receive_all, args=[peer], daemon=True)
            self.receivers[peer].start()
        if self.rank == 0:
            atexit.register(self.end)

    def _connect(self, device_type: str) -> list[Process]:
        """Meet the other ranks, and make the groups through which tensors are sent."""
        try:
            host, port = find_meeting()
            if self.rank > 0:
                wait_for_port(host, port)
        except (OSError, ValueError):
            sys.stderr = sys.__stderr__  # no rank 0 is there to say this, see Watch
            raise
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
                store=meet(self.place, host, port, COMPUTE_LIMIT),
                rank=self.rank,
                world_size=self.size,
                timeout=COMPUTE_LIMIT,
            )
            shape = (self.pp, self.tp)
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "tp"))
            self.tp_group = mesh["tp"].get_group()
            # one for each direction: in a common group a call takes twice as long
            commands: Any = dist.new_group(backend="gloo", timeout=COMPUTE_LIMIT)
            replies: Any = dist.new_group(backend="gloo", timeout=COMPUTE_LIMIT)
            groups = (commands, replies) if self.rank == 0 else (replies, commands)
            self.send_group, self.receive_group = groups
            this = Process(
                host=socket.gethostname(),
                launcher=os.getppid(),
                pid=os.getpid(),
                clock_began=max(time.time() - time.perf_counter() for _ in range(99)),
            )
            return self.gather(this)
        except RuntimeError as error:  # of torch
            raise ConnectionError(f"the ranks do not meet at {host}:{port}: {error}") from error

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
        with self.watch.limit(LOAD_LIMIT):
            self.work = make()
        self.wait_for_replies(STARTED, self.size - 1)
        return self.work

    def _carry_out_commands(self, make: Callable[[], object]) -> NoReturn:
        """The life of a rank other than 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        try:
            with self.watch.limit(LOAD_LIMIT):
                self.work = make()
            self.reply(STARTED, True)
            while True:
                began = time.perf_counter()
                command = self.commands.get()
                self.waited += time.perf_counter() - began
                self._carry_out(command)
        except BaseException as error:
            self.watch.resign_after(error)

    def _carry_out(self, command: Command) -> None:
        with self.watch.limit(COMPUTE_LIMIT):
            result = getattr(self.work, command.method)(*command.arguments)
        if result is not None:
            self.reply(command.number, result)

    # What rank 0 calls.

    def command(self, method: str, *arguments: Any) -> int:
        """Let all ranks call a method. Returns the command's number when rank 0 has called it."""
        command = Command(next(self.numbers), method, arguments)
        with self.unbroken():
            with self.watch.limit(COMPUTE_LIMIT):
                self._send(command)
            self._carry_out(command)
        return command.number

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Let all ranks call a method that returns something: the results, in their order."""
        return self.results(self.command(method, *arguments), self.size)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """On rank 0: what is sent here is sent whole. If an exception breaks it off, the ranks are
        out of step: then all of them end when it sends again."""
        if self.out_of_step:
            self.watch.end_all("the ranks are out of step, as rank 0 broke a command off")
        self.out_of_step = True
        yield
        self.out_of_step = False

    def wait_for_replies(self, number: int, needed: int) -> None:
        """Wait until a command has so many `replies`. There is no limit: when a rank is gone,
        silent or stuck, all end."""
        began = time.perf_counter()
        replies = self.replies.setdefault(number, {})
        with self.reply_arrived:
            self.reply_arrived.wait_for(lambda: len(replies) >= needed)
        self.waited += time.perf_counter() - began

    def results(self, number: int, needed: int) -> list[Any]:
        """The results of a command, in the order of ranks, once there are so many."""
        self.wait_for_replies(number, needed)
        replies = self.replies.pop(number)
        return [replies[rank] for rank in sorted(replies)]

    def end(self) -> None:
        """Let the other ranks end, and wait for it."""
        self.watch.has_ended.set()
        with suppress(RuntimeError):  # of gloo: they have ended
            self._send(None)
        self.watch.wait_for_end(self.receivers)

    # Messages.

    def reply(self, number: int, result: Any) -> None:
        """Let rank 0 have the result of a command. Any thread may call this."""
        if self.rank > 0:
            self._send(Reply(number, result))
        else:
            self._on_reply(0, Reply(number, result))

    def _on_reply(self, rank: int, reply: Reply) -> None:
        """On rank 0: keep the result of a rank."""
        with self.reply_arrived:
            self.replies.setdefault(reply.number, {})[rank] = reply.result
            self.reply_arrived.notify_all()

    def _send(self, message: Message) -> None:
        """Send a message to all peers, without waiting."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        parts = [torch.tensor([len(body)]), body]
        works: list[Any] = []
        self.in_flight.append((works, parts))  # the tensors must live until they are sent
        with self.send_lock:  # the parts of two threads' messages must not mix
            for rank in self.peers:
                for part in parts:
                    works.append(dist.isend(part, dst=rank, group=self.send_group))

    def _receive_all(self, peer: int) -> None:
        """Receive the messages of a peer until it is gone: a thread for each peer."""
        with suppress(RuntimeError):  # of gloo: the connection is closed
            while True:
                size = torch.zeros(1, dtype=torch.int64)
                self._receive_into(size, peer)
                body = torch.empty(int(size), dtype=torch.uint8)
                self._receive_into(body, peer)
                self._on_message(peer, pickle.loads(body.numpy().tobytes()))
        self.watch.lost(peer)

    def _receive_into(self, tensor: Tensor, peer: int) -> None:
        work: Any = dist.irecv(tensor, src=peer, group=self.receive_group)
        work.wait(IDLE_LIMIT)

    def _on_message(self, peer: int, message: Message) -> None:
        self.watch.heard_from(peer)
        match message:
            case None:
                os._exit(0)  # all is done
            case Command():
                self.commands.put(message)
            case Reply():
                self._on_reply(peer, message)
            case Failure():
                self.watch.end_all(f"rank {peer}: {message.reason}")
            case Heartbeat():
                pass
