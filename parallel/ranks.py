"""The processes that serve one model: rank 0 decides, all ranks carry out its commands.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and wait for
commands: the name of a method of stages.Stage, and its arguments. Activations and sums go through
NCCL on CUDA, through gloo on a CPU. Commands and replies go through gloo everywhere, and threads
wait for them. So three faults are noticed whatever the main threads do. Then all ranks end, and one
line names a rank. Who ends kills its peers on the same node, as they may be stopped:

- A rank ends. Its connections close, which the others notice at once.
- A rank is silent: its process is stopped, or its machine, or the network. Each rank sends
  heartbeats, from a thread; the others give it up after SILENCE_LIMIT_S. Code in C that holds
  Python's lock for as long looks the same.
- A rank is stuck in a kernel or in a loop, while its heartbeats go on. It ends by itself: after
  COMPUTE_LIMIT in a command, LOAD_LIMIT in `start`. A rank that waits for it may be named instead.

Read next: shard.py."""

import atexit
import os
import pickle
import queue
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from threading import Condition, Event, Lock, Thread
from traceback import extract_tb
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hardware.torchrun import find_meeting, find_place
from parallel.meeting import device_of, meet, wait_for_port

T = TypeVar("T")
LOAD_LIMIT = timedelta(hours=2)  # to load the model
COMPUTE_LIMIT = timedelta(minutes=10)  # for a command, and to wait for a tensor of another rank
IDLE_LIMIT = timedelta(days=1000)  # to wait for a message: heartbeats come all the time
BEAT_S = 2  # between two heartbeats
SILENCE_LIMIT_S = 20  # a rank that sends no message for so long is lost
GRACE_S = 3  # an exception waits so long for the news that the loss of another rank is its cause
MOST_IN_FLIGHT = 999  # messages that are kept alive while they are sent
STARTED = -1  # the number of a rank's first reply: it has loaded its part


class Process(NamedTuple):
    """The process of a rank."""

    host: str
    launcher: int  # the process that has started it: torchrun
    pid: int


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
    """Why a rank ends, sent to rank 0."""

    reason: str


class Heartbeat(NamedTuple):
    """A message to say that a rank is alive."""


@dataclass(eq=False)
class Timer:
    """A limit, and the time that has passed since: but for that in which this process is stopped.
    So all processes can be stopped and continued, as by Ctrl-Z and fg."""

    limit_s: float
    passed_s: float = 0.0

    def beat(self) -> bool:
        """Let another BEAT_S pass: whether the limit is reached."""
        self.passed_s += BEAT_S
        return self.passed_s >= self.limit_s


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them; or `copies` times
    as many, which have whole copies of the model.

    Rank r is part r % tp of stage r // tp % pp. Raises ConnectionError if they
    do not meet; ValueError if torchrun has started another number, its variables make no sense, or
    GPUs are missing."""

    def __init__(self, tp: int, pp: int, device_type: str = "cpu", copies: int = 1) -> None:
        self.tp = tp
        self.pp = pp
        self.copies = copies
        self.size = tp * pp * copies
        self.place = find_place()
        self.rank = self.place.rank
        self.stage, self.part = divmod(self.rank % (tp * pp), tp)
        if self.place.world_size != self.size:
            started = self.place.world_size
            sizes = f"tp={tp}, pp={pp}" + (f", copies={copies}" if copies > 1 else "")
            raise ValueError(f"{sizes}: needs {self.size} processes, not {started}")
        self.device = device_of(device_type, self.place)

        self.work: Any = None  # the object whose methods are called, once `start` has made it
        self.numbers = count()  # of commands, and of other things that all ranks must tell apart
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()  # on rank 0 for `tell`
        self.replies: dict[int, dict[int, Any]] = {}  # on rank 0: command -> {rank: result}
        self.reply_arrived = Condition()
        self.in_flight: deque[tuple[list[Any], list[Tensor]]] = deque(maxlen=MOST_IN_FLIGHT)
        self.send_lock = Lock()
        self.out_of_step = False  # a command was broken off on rank 0: others went on
        self.waited = 0.0  # seconds, for commands and for replies
        self.has_ended = Event()

        self.peers = range(1, self.size) if self.rank == 0 else range(1)  # they send messages
        self.silence = {peer: Timer(SILENCE_LIMIT_S) for peer in self.peers}
        self.call_times: list[Timer] = []  # of calls that have a limit
        self.own_commands: Thread | None = None  # on rank 0: carries out what it tells itself
        self._connect(device_type)
        self.receivers = {
            peer: Thread(target=self._receive_all, args=[peer], daemon=True) for peer in self.peers
        }
        self.watcher = Thread(target=self._watch, daemon=True)
        for thread in (*self.receivers.values(), self.watcher):
            thread.start()
        if self.rank == 0:
            atexit.register(self.end)

        # the nodes' monotonic clocks begin at different times
        offset = max(time.time() - time.perf_counter() for _ in range(99))
        offsets: list[Any] = self._call_patiently(COMPUTE_LIMIT, self.gather, offset)
        self._clock_offset_s = offsets[self.rank] - offsets[0]

    def _connect(self, device_type: str) -> None:
        """Meet the other ranks, and make the groups through which tensors are sent."""
        try:
            host, port = find_meeting()
            if self.rank > 0:
                wait_for_port(host, port)
        except (OSError, ValueError):
            sys.stderr = sys.__stderr__  # see `_say`: no rank 0 is there to say this
            raise
        backends = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backends,
                store=meet(self.place, host, port, COMPUTE_LIMIT),
                rank=self.rank,
                world_size=self.size,
                timeout=COMPUTE_LIMIT,
            )
            shape = (self.copies * self.pp, self.tp)
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "tp"))
            self.tp_group = mesh["tp"].get_group()
            # one for each direction: in a common group a call takes twice as long
            commands: Any = dist.new_group(backend="gloo", timeout=COMPUTE_LIMIT)
            replies: Any = dist.new_group(backend="gloo", timeout=COMPUTE_LIMIT)
            self.send_group = commands if self.rank == 0 else replies
            self.receive_group = replies if self.rank == 0 else commands
            this = Process(socket.gethostname(), os.getppid(), os.getpid())
            self.processes = self.gather(this)
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
        self.work = self._call_patiently(LOAD_LIMIT, make)
        self.wait_for_replies(STARTED, self.size - 1)
        return self.work

    def _carry_out_commands(self, make: Callable[[], object]) -> NoReturn:
        """The life of a rank other than 0."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        try:
            self.work = self._call_patiently(LOAD_LIMIT, make)
            self.reply(STARTED, True)
            while True:
                began = time.perf_counter()
                command = self.commands.get()
                self.waited += time.perf_counter() - began
                self._carry_out(command)
        except BaseException as error:
            self.resign_after(error)

    def resign_after(self, error: BaseException) -> NoReturn:
        """End, as nothing has caught this exception. Any thread of a rank may call this."""
        function = extract_tb(error.__traceback__)[-1].name
        reason = f"{type(error).__name__} in {function}(): {error}"
        self._resign(reason.partition("\n")[0])

    def command(self, method: str, *arguments: Any) -> int:
        """Let all ranks call a method. Returns the command's number when rank 0 has called it."""
        with self.unbroken():
            command = Command(next(self.numbers), method, arguments)
            self._call_patiently(COMPUTE_LIMIT, self._send, command, self.peers)
            self._carry_out(command)
        return command.number

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """On rank 0: what is sent here is sent whole. If an exception breaks it off, the ranks are
        out of step: then all of them end when it sends again."""
        if self.out_of_step:
            self._end_all("the ranks are out of step, as rank 0 broke a command off")
        self.out_of_step = True
        yield
        self.out_of_step = False

    def tell(self, rank: int, method: str, *arguments: Any) -> int:
        """Let one rank call a method. Returns the command's number, without waiting.

        Rank 0 calls it in a thread. An exception there is its reply."""
        command = Command(next(self.numbers), method, arguments)
        if rank > 0:
            with self.unbroken():
                self._call_patiently(COMPUTE_LIMIT, self._send, command, [rank])
            return command.number
        if self.own_commands is None:
            threads = torch.get_num_threads()
            self.own_commands = Thread(target=self._obey_itself, args=[threads], daemon=True)
            self.own_commands.start()
        self.commands.put(command)
        return command.number

    def _obey_itself(self, threads: int) -> None:
        """Carry out the commands that rank 0 gives to itself, on so many CPU threads."""
        torch.set_num_threads(threads)  # OpenMP's number is of each thread that calls it
        while True:
            command = self.commands.get()
            try:
                self._carry_out(command)
            except Exception as error:
                self.reply(command.number, error)

    def first_reply(self, numbers: Iterable[int], timeout_s: float) -> int | None:
        """One of these commands that has a reply; None if there is none in so many seconds."""
        numbers = list(numbers)

        def replied() -> int | None:
            return next((number for number in numbers if self.replies.get(number)), None)

        with self.reply_arrived:
            self.reply_arrived.wait_for(lambda: replied() is not None, timeout_s)
        return replied()

    def wait_for_replies(self, number: int, needed: int) -> dict[int, Any]:
        """The replies to a command by rank, once there are so many. They stay in `replies`.

        There is no limit: when a rank is gone, silent or stuck, all end."""
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
        """Let the other ranks end, and wait for it. If one does not in SILENCE_LIMIT_S, it hangs:
        then it is killed, and this process ends with an error."""
        self.has_ended.set()
        with suppress(RuntimeError):  # of gloo: they have ended
            self._send(None, self.peers)
        limit = time.monotonic() + SILENCE_LIMIT_S
        for peer, thread in self.receivers.items():  # a rank that has ended closes its connections
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                self._say(f"rank {peer} has not ended in {SILENCE_LIMIT_S} s")
                self._kill_peers()
                os._exit(1)
        self.watcher.join(GRACE_S)

    def _carry_out(self, command: Command) -> None:
        method = getattr(self.work, command.method)
        result = self._call_patiently(COMPUTE_LIMIT, method, *command.arguments)
        if result is None:
            return
        self.reply(command.number, result)

    def reply(self, number: int, result: Any) -> None:
        """Let rank 0 have the result of a command. Any thread may call this."""
        if self.rank == 0:
            self._on_reply(0, Reply(number, result))
        else:
            self._send(Reply(number, result), self.peers)

    def _call_patiently(self, limit: timedelta, function: Callable[..., T], *arguments: Any) -> T:
        """function(*arguments). All ranks end if it takes longer than the limit.

        An exception is held back for GRACE_S. If the loss of another rank is its cause, as it may
        be of torch's, all end before. If rank 0 raises the same, it says so before others do."""
        call_time = Timer(limit.total_seconds())
        self.call_times.append(call_time)
        try:
            return function(*arguments)
        except Exception as error:
            if self.rank > 0 or isinstance(error, RuntimeError):
                time.sleep(GRACE_S)
            raise
        finally:
            self.call_times.remove(call_time)

    def _watch(self) -> None:
        """Tell the peers every BEAT_S that this rank is alive, and end if a peer is silent or the
        main thread is stuck: a thread of its own."""
        while not self.has_ended.wait(BEAT_S):
            with suppress(RuntimeError):  # of gloo: a peer has ended, which its receiver notices
                self._send(Heartbeat(), self.peers)
            for peer, silence in self.silence.items():
                if silence.beat():
                    self._end_all(f"rank {peer} was silent for {SILENCE_LIMIT_S} s: it hangs")
            for call_time in list(self.call_times):
                if call_time.beat():
                    limit = f"{call_time.limit_s:.0f} s"
                    self._resign(f"a call took {limit}: it is stuck, or waits for a stuck rank")

    def _send(
        self, message: Command | Reply | Failure | Heartbeat | None, peers: Iterable[int]
    ) -> None:
        """Send a message from rank 0 to others, or from another to rank 0, without waiting. None
        is the end."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        parts = [torch.tensor([len(body)]), body]
        works: list[Any] = []
        self.in_flight.append((works, parts))  # the tensors must live until they are sent
        with self.send_lock:  # the parts of two threads' messages must not mix
            for peer in peers:
                for part in parts:
                    works.append(dist.isend(part, dst=peer, group=self.send_group))

    def _receive(self, peer: int) -> Any:
        """The next message of a peer. RuntimeError: it has closed the connection."""
        size = torch.zeros(1, dtype=torch.int64)
        self._receive_into(size, peer)
        body = torch.empty(int(size), dtype=torch.uint8)
        self._receive_into(body, peer)
        return pickle.loads(body.numpy().tobytes())

    def _receive_into(self, tensor: Tensor, peer: int) -> None:
        work: Any = dist.irecv(tensor, src=peer, group=self.receive_group)
        work.wait(IDLE_LIMIT)

    def _receive_all(self, peer: int) -> None:
        """Receive the messages of a peer until it is gone: a thread for each peer."""
        with suppress(RuntimeError):  # of gloo: the connection is closed
            while True:
                message = self._receive(peer)
                self.silence[peer] = Timer(SILENCE_LIMIT_S)
                if message is None:
                    os._exit(0)  # all is done
                if isinstance(message, Command):
                    self.commands.put(message)
                elif not isinstance(message, Heartbeat):
                    self._on_reply(peer, message)
        if self.rank > 0:
            os._exit(1)  # rank 0 has said why
        self._end_all(f"rank {peer} is gone: killed, or not to be reached")

    def _on_reply(self, rank: int, reply: Reply | Failure) -> None:
        """On rank 0: keep the result of a rank, or end if the rank does."""
        if isinstance(reply, Failure):
            self._end_all(f"rank {rank}: {reply.reason}")
            return
        with self.reply_arrived:
            self.replies.setdefault(reply.number, {})[rank] = reply.result
            self.reply_arrived.notify_all()

    def _resign(self, reason: str) -> NoReturn:
        """End, as this rank has failed. If it is not rank 0, that one says why."""
        if self.rank == 0:
            self._end_all(f"rank 0: {reason}")
        else:
            with suppress(RuntimeError):  # of gloo: rank 0 has ended
                self._send(Failure(reason), self.peers)
            time.sleep(GRACE_S)  # until it has read that
        os._exit(1)

    def _end_all(self, reason: str) -> None:
        """End this process, whatever it does, as nothing is left to do, and say why. The others end
        when it is gone. After `end` the loss of a peer is no loss."""
        with self.reply_arrived:  # held until the end: one reason is enough
            if self.has_ended.is_set():
                return
            self._say(reason)
            self._kill_peers()
            os._exit(1)

    def _kill_peers(self) -> None:
        """Kill the peers that the same torchrun has started. One that is stopped cannot end by
        itself, and torchrun would wait half a minute for that."""
        for peer, thread in self.receivers.items():
            host, launcher, pid = self.processes[peer]
            is_near = (host, launcher) == self.processes[self.rank][:2]
            if is_near and thread.is_alive():
                with suppress(ProcessLookupError):  # another rank was faster
                    os.kill(pid, signal.SIGKILL)

    def _say(self, reason: str) -> None:
        """Print why all end: on rank 0; where that hangs on rank 1, and on the first rank of each
        other node. Only the first ranks of nodes have a stderr, see cli/console.py."""
        if self.place.local_rank == 0:
            print(f"\nerror: {reason}", file=sys.stderr, flush=True)
        elif self.rank == 1:
            print(f"\nerror: {reason}", file=sys.__stderr__, flush=True)
