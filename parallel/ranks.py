"""The processes that serve one model: rank 0 decides, all ranks do what it says.

    torchrun --nproc-per-node 4 bench.py serve --tp 2 --pp 2

All run the same program up to `Ranks.start`. There rank 0 goes on; the others stay and follow its
orders: names of methods of engine.Stage, and arguments. Activations and sums go through NCCL on
CUDA, through gloo on a CPU; orders and what they return through gloo everywhere, where threads wait
for them and see at once that a rank has ended. Then all end; rank 0 says which. Next: shard.py."""

import atexit
import os
import pickle
import queue
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from itertools import count
from threading import Condition, Thread
from traceback import extract_tb

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

LIMIT, IDLE = timedelta(minutes=10), timedelta(days=1000)  # to wait while others compute; or rest
GRACE_S = 3  # that an exception waits for the news that the loss of another rank is its cause


class Ranks:
    """The tp * pp processes that torchrun has started, as one of them sees them: rank r is part
    r % tp of stage r // tp. ConnectionError if they do not meet, ValueError if GPUs are missing."""

    def __init__(self, tp, pp, device_type="cpu"):
        cuda = device_type == "cuda"
        self.device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if cuda else None)
        if cuda:
            if (here := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > torch.cuda.device_count():
                raise ValueError(f"{here} processes on a node: must be at most one for each GPU")
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=LIMIT)
            mesh = init_device_mesh(device_type, (pp, tp), mesh_dim_names=("pp", "tp"))
            self.down, self.up = (dist.new_group(backend="gloo", timeout=IDLE) for _ in range(2))
        except dist.DistError as error:
            where = "the ranks do not meet at {MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            raise ConnectionError(f"{where}: {error}") from error
        (self.stage, self.part), self.tp_group = mesh.get_coordinate(), mesh["tp"].get_group()
        self.rank, self.tp, self.pp, self.size = dist.get_rank(), tp, pp, tp * pp
        clocks = self.gather(max(time.time() - time.perf_counter() for _ in range(99)))  # of nodes
        self.clock = lambda: time.perf_counter() + clocks[self.rank] - clocks[0]  # s, on rank 0's
        self.orders, self.numbers, self.waited = queue.SimpleQueue(), count(), 0.0  # in seconds
        self.news, self.answers = Condition(), {}  # on rank 0: order -> {rank: what it returned}
        self.broken, self.ended, self.sent = False, False, deque(maxlen=999)

    def gather(self, value):
        """What each rank gives here, in their order."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def start(self, make):
        """On rank 0 what `make()` returns, an object with the methods to order, when all ranks have
        made theirs. On others this never returns: they do as they are told."""
        peers, self.work = [0] if self.rank else range(1, self.size), None
        self.threads = [Thread(target=self._listen, args=[peer], daemon=True) for peer in peers]
        for thread in self.threads:
            thread.start()
        if self.rank == 0:
            atexit.register(self.end)
            self.work = make()
            self.wait("start", self.size - 1)
            return self.work
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 may keep what it has; then all end
        try:
            self.work = self._patiently(make)
            self._tell(("start", True))
            while True:
                began, order = time.perf_counter(), self.orders.get()
                self.waited += time.perf_counter() - began
                self._do(*order)
        except BaseException as error:
            why = f"{type(error).__name__} in {extract_tb(error.__traceback__)[-1].name}(): {error}"
            self._tell(("failed", why.partition("\n")[0]))
            time.sleep(GRACE_S)
        finally:
            os._exit(1)

    def order(self, name, *args):
        """Let all ranks call this method: the order's number, when this rank has done so. All end
        if an order was broken off before: then the ranks are out of step."""
        if self.broken:
            self._lose("the ranks are out of step, as rank 0 broke an order off")
        self.broken, number = True, next(self.numbers)
        self._patiently(self._tell, (number, name, args))
        self._do(number, name, args)
        self.broken = False
        return number

    def wait(self, number, answers):
        """{rank: what it returned} for an order, once so many have. It stays in `answers`."""
        began, its = time.perf_counter(), self.answers.setdefault(number, {})
        with self.news:
            self.news.wait_for(lambda: len(its) >= answers)
        self.waited += time.perf_counter() - began
        return its

    def call(self, name, *args):
        """What all ranks return for this order, in their order."""
        self.wait(number := self.order(name, *args), self.size)
        return [its for _, its in sorted(self.answers.pop(number).items())]

    def end(self):
        """Let the other ranks end."""
        self.ended = True
        with suppress(RuntimeError):  # of gloo: they have
            self._tell(None)
        for thread in self.threads:  # who has ended closes its connections
            thread.join(GRACE_S)

    def _do(self, number, name, args):
        result = self._patiently(getattr(self.work, name), *args)
        if result is not None:
            self._tell((number, result)) if self.rank else self._hear(0, number, result)

    def _patiently(self, function, *args):
        """function(*args). What it raises comes late: another rank may be why, as is known then."""
        try:
            return function(*args)
        except Exception:
            time.sleep(GRACE_S)
            raise

    def _tell(self, message):
        """Send an object to all others, or up to rank 0, and do not wait: `sent` keeps it alive."""
        body = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        send, *how = (dist.isend, 0, self.up) if self.rank else (dist.broadcast, 0, self.down, True)
        self.sent += [(send(part, *how), part) for part in (torch.tensor([len(body)]), body)]

    def _listen(self, peer):
        """Receive what a peer sends, until it is gone."""
        receive, *how = (dist.broadcast, 0, self.down) if self.rank else (dist.recv, peer, self.up)
        with suppress(RuntimeError):  # of gloo: the connection is closed
            while True:
                receive(size := torch.zeros(1, dtype=torch.int64), *how)
                receive(body := torch.empty(int(size), dtype=torch.uint8), *how)
                message = pickle.loads(body.numpy())
                if message is None:
                    os._exit(0)  # all is done
                self.orders.put(message) if self.rank else self._hear(peer, *message)
        self._lose(f"rank {peer} is gone: killed, or not to be reached")

    def _hear(self, rank, number, result):
        """On rank 0: what a rank returned for an order, or why it ends."""
        if number == "failed":
            self._lose(f"rank {rank}: {result}")
        with self.news:
            self.answers.setdefault(number, {})[rank] = result
            self.news.notify_all()

    def _lose(self, why):
        """Without a rank there is nothing to do: rank 0 says so, and it ends, whatever it is at."""
        with self.news:  # until the end
            if self.rank == 0 and not self.ended:
                print(f"\nerror: {why}", file=sys.stderr, flush=True)
            self.ended or os._exit(1)
