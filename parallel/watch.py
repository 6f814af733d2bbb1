"""The end of all ranks when one fails: whoever is gone, silent or stuck is named in one line.

Rank 0 and each other rank watch each other, in threads. So three faults are noticed whatever the
main threads do. Who ends kills its peers on the same node, as they may be stopped:

- A rank ends. Its connections close, which the others notice at once.
- A rank is silent: its process is stopped, or its machine, or the network. Each rank sends
  heartbeats, from a thread; the others give it up after SILENCE_LIMIT_S. Code in C that holds
  Python's lock for as long looks the same.
- A rank is stuck in a kernel or in a loop, while its heartbeats go on. It ends by itself when a
  call takes longer than its limit. A rank that waits for it may be named instead.

Read first: ranks.py."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Lock, Thread
from traceback import extract_tb
from typing import Any, NamedTuple, NoReturn

from runtime.torchrun import Place

BEAT_S = 2  # between two heartbeats
SILENCE_LIMIT_S = 20  # a rank that sends no message for so long is lost
GRACE_S = 3  # an exception waits so long for the news that the loss of another rank is its cause


class Process(NamedTuple):
    """The process of a rank."""

    host: str
    launcher: int  # the process that has started it: torchrun
    pid: int
    clock_began: float  # in seconds of the epoch: monotonic clocks of nodes differ


class Heartbeat(NamedTuple):
    """A message to say that a rank is alive."""


class Failure(NamedTuple):
    """Why a rank ends, sent to rank 0."""

    reason: str


@dataclass(eq=False)
class Timer:
    """A limit, and the time that has passed since: but for that in which this process is stopped.
    So all processes can be stopped and continued, as by Ctrl-Z and fg."""

    limit_s: float
    end: Callable[[str], None]  # is called with the reason when the limit is reached
    reason: str
    passed_s: float = 0.0


class Watch:
    """Ends this rank if a peer or its own main thread fails, and says why.

    `processes` are those of all ranks, `send` sends a message to all peers."""

    def __init__(
        self,
        place: Place,
        processes: Sequence[Process],
        peers: Sequence[int],
        send: Callable[[Any], None],
    ) -> None:
        self.place = place
        self.processes = processes
        self.send = send
        self.connected = set(peers)
        self.silence: dict[int, Timer] = {}  # of each peer
        for peer in peers:
            reason = f"rank {peer} was silent for {SILENCE_LIMIT_S} s: it hangs"
            self.silence[peer] = Timer(SILENCE_LIMIT_S, self.end_all, reason)
        self.timers = list(self.silence.values())
        self.has_ended = Event()  # from then on the loss of a peer is no loss
        self.one_reason = Lock()
        self.thread = Thread(target=self._beat, daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        """Tell the peers every BEAT_S that this rank is alive, and end if a peer is silent or the
        main thread is stuck."""
        while not self.has_ended.wait(BEAT_S):
            with suppress(RuntimeError):  # of gloo: a peer has ended, which its receiver notices
                self.send(Heartbeat())
            for timer in list(self.timers):
                timer.passed_s += BEAT_S
                if timer.passed_s >= timer.limit_s:
                    timer.end(timer.reason)

    @contextmanager
    def limit(self, limit: timedelta) -> Iterator[None]:
        """All ranks end if what is done in this block takes longer than the limit.

        An exception is held back for GRACE_S. If the loss of another rank is its cause, as it may
        be of torch's, all end before. If rank 0 raises the same, it says so before others do."""
        limit_s = limit.total_seconds()
        reason = f"a call took {limit_s:.0f} s: it is stuck, or waits for a stuck rank"
        timer = Timer(limit_s, self.resign, reason)
        self.timers.append(timer)
        try:
            yield
        except Exception as error:
            if self.place.rank > 0 or isinstance(error, RuntimeError):
                time.sleep(GRACE_S)
            raise
        finally:
            self.timers.remove(timer)

    def heard_from(self, peer: int) -> None:
        """A message of this peer has come."""
        self.silence[peer].passed_s = 0.0

    def lost(self, peer: int) -> None:
        """The connection to this peer is closed: all end, if it is not time to."""
        if self.place.rank > 0:
            os._exit(1)  # rank 0 has said why
        self.end_all(f"rank {peer} is gone: killed, or not to be reached")
        self.connected.discard(peer)

    def resign_after(self, error: BaseException) -> NoReturn:
        """End, as nothing has caught this exception. Any thread of a rank may call this."""
        function = extract_tb(error.__traceback__)[-1].name
        reason = f"{type(error).__name__} in {function}(): {error}"
        self.resign(reason.partition("\n")[0])

    def resign(self, reason: str) -> NoReturn:
        """End, as this rank has failed. If it is not rank 0, that one says why."""
        if self.place.rank == 0:
            self.end_all(f"rank 0: {reason}")
        else:
            with suppress(RuntimeError):  # of gloo: rank 0 has ended
                self.send(Failure(reason))
            time.sleep(GRACE_S)  # until it has read that
        os._exit(1)

    def end_all(self, reason: str) -> None:
        """End this process, whatever it does, as nothing is left to do, and say why. The others end
        when it is gone. When all is done, the loss of a peer is no loss."""
        with self.one_reason:  # held until the end
            if not self.has_ended.is_set():
                self._give_up(reason)

    def wait_for_end(self, receivers: Mapping[int, Thread]) -> None:
        """Wait until all peers have closed their connections. If one does not in SILENCE_LIMIT_S,
        it hangs: then it is killed, and this process ends with an error."""
        limit = time.monotonic() + SILENCE_LIMIT_S
        for peer, thread in receivers.items():
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                self._give_up(f"rank {peer} has not ended in {SILENCE_LIMIT_S} s")
        self.thread.join(GRACE_S)

    def _give_up(self, reason: str) -> NoReturn:
        """Say why all end: on rank 0; where that hangs on rank 1, and on the first rank of each
        other node. Only the first ranks of nodes have a stderr, see cli/console.py."""
        if self.place.local_rank == 0:
            print(f"\nerror: {reason}", file=sys.stderr, flush=True)
        elif self.place.rank == 1:
            print(f"\nerror: {reason}", file=sys.__stderr__, flush=True)
        else:
            time.sleep(GRACE_S)  # those would not say it if rank 0 were killed first
        self._kill_peers()
        os._exit(1)

    def _kill_peers(self) -> None:
        """Kill the peers that the same torchrun has started. One that is stopped cannot end by
        itself, and torchrun would wait half a minute for that."""
        this = self.processes[self.place.rank]
        for peer in self.connected:
            process = self.processes[peer]
            if (process.host, process.launcher) == (this.host, this.launcher):
                with suppress(ProcessLookupError):  # another rank was faster
                    os.kill(process.pid, signal.SIGKILL)
