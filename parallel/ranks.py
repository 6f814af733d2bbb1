"""The processes that serve one model: rank 0 decides, all ranks carry out its commands.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and wait for
commands: the name of a method of stages.Stage, and its arguments. Activations and sums go through
NCCL on CUDA, through gloo on a CPU. Commands and replies go through gloo everywhere: threads wait
for them, and notice at once when a rank has ended. Then all ranks end, and rank 0 says which it
was. Read next: shard.py."""

import atexit
import os
import pickle
import queue
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import Condition, Thread
from traceback import extract_tb
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

T = TypeVar("T")
COMPUTE_LIMIT = timedelta(minutes=10)  # to wait for a tensor of another rank
IDLE_LIMIT = timedelta(days=1000)  # to wait for a command or a reply
GRACE_S = 3  # an exception waits so long for the news that the loss of another rank is its cause
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


class Failure(NamedTuple):
    """Why a rank ends."""

    reason: str


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them.

    Rank r is part r % tp of stage r // tp. Raises ConnectionError if they do not meet, ValueError
    if GPUs are missing."""

    def __init__(self, tp: int, pp: int, device_type: str = "cpu") -> None:
        self.tp = tp
        self.pp = pp
        self.size = tp * pp
        self.device = _device_of_this_rank(device_type)
        try:
            backends = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            dist.init_process_group(backends, timeout=COMPUTE_LIMIT)
            mesh = init_device_mesh(device_type, (pp, tp), mesh_dim_names=("pp", "tp"))
            self.command_group: Any = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
            self.reply_group: Any = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
        except dist.DistError as error:
            address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            raise ConnectionError(f"the ranks do not meet at {address}: {error}") from error
        self.tp_group = mesh["tp"].get_group()
        self.rank: int = dist.get_rank()
        self.stage, self.part = divmod(self.rank, tp)

        # the nodes' monotonic clocks begin at different times
        offsets = self.gather(max(time.time() - time.perf_counter() for _ in range(99)))
        self._clock_offset_s = offsets[self.rank] - offsets[0]
        self.waited = 0.0  # seconds, for commands and for replies

        self.work: Any = None  # the object whose methods are called, once `start` has made it
        self.numbers = count()  # of commands, and of other things that all ranks must tell apart
        self.threads: list[Thread] = []
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()  # not on rank 0
        self.replies: dict[int, dict[int, Any]] = {}  # on rank 0: command -> {rank: result}
        self.reply_arrived = Condition()
        self.in_flight: deque[tuple[Any, Tensor]] = deque(maxlen=MOST_IN_FLIGHT)
        self.out_of_step = False  # a command was broken off on rank 0: others went on
        self.has_ended = False

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
        peers = range(1, self.size) if self.rank == 0 else [0]
        for peer in peers:
            thread = Thread(target=self._receive_all, args=[peer], daemon=True)
            self.threads.append(thread)
        for thread in self.threads:
            thread.start()
        if self.rank > 0:
            self._carry_out_commands(make)
        atexit.register(self.end)
        self.work = make()
        self.wait_for_replies(STARTED, self.size - 1)
        return self.work

    def _carry_out_commands(self, make: Callable[[], object]) -> NoReturn:
        """The life of a rank other than 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        try:
            self.work = self._call_patiently(make)
            self._send(Reply(STARTED, True))
            while True:
                began = time.perf_counter()
                command = self.commands.get()
                self.waited += time.perf_counter() - began
                self._carry_out(command)
        except BaseException as error:
            function = extract_tb(error.__traceback__)[-1].name
            reason = f"{type(error).__name__} in {function}(): {error}"
            self._send(Failure(reason.partition("\n")[0]))
            time.sleep(GRACE_S)
        finally:
            os._exit(1)

    def command(self, method: str, *arguments: Any) -> int:
        """Let all ranks call a method. Returns the command's number when rank 0 has called it.

        If an earlier command was broken off on rank 0, by an exception, the ranks are out of step:
        then all of them end."""
        if self.out_of_step:
            self._on_peer_lost("the ranks are out of step, as rank 0 broke an order off")
        self.out_of_step = True
        command = Command(next(self.numbers), method, arguments)
        self._call_patiently(self._send, command)
        self._carry_out(command)
        self.out_of_step = False
        return command.number

    def wait_for_replies(self, number: int, needed: int) -> dict[int, Any]:
        """The replies to a command by rank, once there are so many. They stay in `replies`."""
        began = time.perf_counter()
        replies = self.replies.setdefault(number, {})
        with self.reply_arrived:
            self.reply_arrived.wait_for(lambda: len(replies) >= needed)
        self.waited += time.perf_counter() - began
        return replies

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Let all ranks call a method that returns something: the results, in their order."""
        number = self.command(method, *arguments)
        self.wait_for_replies(number, self.size)
        replies = self.replies.pop(number)
        return [replies[rank] for rank in sorted(replies)]

    def end(self) -> None:
        """Let the other ranks end."""
        self.has_ended = True
        with suppress(RuntimeError):  # of gloo: they have ended
            self._send(None)
        for thread in self.threads:  # a rank that has ended closes its connections
            thread.join(GRACE_S)

    def _carry_out(self, command: Command) -> None:
        method = getattr(self.work, command.method)
        result = self._call_patiently(method, *command.arguments)
        if result is None:
            return
        reply = Reply(command.number, result)
        if self.rank == 0:
            self._on_reply(0, reply)
        else:
            self._send(reply)

    def _call_patiently(self, function: Callable[..., T], *arguments: Any) -> T:
        """function(*arguments). An exception is held back for GRACE_S: if the loss of another rank
        is its cause, all end before."""
        try:
            return function(*arguments)
        except Exception:
            time.sleep(GRACE_S)
            raise

    def _send(self, message: Command | Reply | Failure | None) -> None:
        """Send a message from rank 0 to all others, or from another to rank 0, without waiting.
        None is the end."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for part in (torch.tensor([len(body)]), body):
            if self.rank == 0:
                work = dist.broadcast(part, src=0, group=self.command_group, async_op=True)
            else:
                work = dist.isend(part, dst=0, group=self.reply_group)
            self.in_flight.append((work, part))  # the tensor must live until it is sent

    def _receive(self, peer: int) -> Any:
        """The next message of a peer. RuntimeError: it has closed the connection."""
        size = torch.zeros(1, dtype=torch.int64)
        self._receive_into(size, peer)
        body = torch.empty(int(size), dtype=torch.uint8)
        self._receive_into(body, peer)
        return pickle.loads(body.numpy().tobytes())

    def _receive_into(self, tensor: Tensor, peer: int) -> None:
        if self.rank == 0:
            dist.recv(tensor, src=peer, group=self.reply_group)
        else:
            dist.broadcast(tensor, src=0, group=self.command_group)

    def _receive_all(self, peer: int) -> None:
        """Receive the messages of a peer until it is gone: a thread for each peer."""
        with suppress(RuntimeError):  # of gloo: the connection is closed
            while True:
                message = self._receive(peer)
                if message is None:
                    os._exit(0)  # all is done
                if self.rank == 0:
                    self._on_reply(peer, message)
                else:
                    self.commands.put(message)
        self._on_peer_lost(f"rank {peer} is gone: killed, or not to be reached")

    def _on_reply(self, rank: int, reply: Reply | Failure) -> None:
        """On rank 0: keep the result of a rank, or end if the rank does."""
        if isinstance(reply, Failure):
            self._on_peer_lost(f"rank {rank}: {reply.reason}")
            return
        with self.reply_arrived:
            self.replies.setdefault(reply.number, {})[rank] = reply.result
            self.reply_arrived.notify_all()

    def _on_peer_lost(self, reason: str) -> None:
        """End this process, whatever it does, as nothing is left to do; on rank 0 say why. After
        `end` the loss of a peer is no loss."""
        with self.reply_arrived:  # held until the end: one reason is enough
            if self.has_ended:
                return
            if self.rank == 0:
                print(f"\nerror: {reason}", file=sys.stderr, flush=True)
            os._exit(1)


def _device_of_this_rank(device_type: str) -> torch.device:
    """The CPU, or the GPU of this process. Raises ValueError if there is not one for each."""
    if device_type != "cuda":
        return torch.device(device_type)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > torch.cuda.device_count():
        raise ValueError(f"{processes} processes on a node: must be at most one for each GPU")
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
