"""Keys and values on their way from the cache of rank 0 to that of another rank.

Read first: kv_cache.py, stages.py. Read next: instances.py."""

from collections.abc import Container, Sequence
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kv_cache import KVCache, slot_mapping
from parallel.ranks import IDLE_LIMIT, Ranks
from parallel.shard import Shard
from parallel.stages import Stage


def export_pages(cache: KVCache, pages: Sequence[int], tokens: int) -> Tensor:
    """A copy of the keys and values of the first `tokens` tokens of a block table, of shape
    (n_layer, 2, n_kv_head, tokens, head_dim)."""
    slots = first_slots(cache, pages, tokens)
    return cache.data.index_select(3, slots).contiguous()


def import_pages(cache: KVCache, pages: Sequence[int], kv: Tensor) -> None:
    """Write keys and values, as of export_pages, into the first slots of a block table."""
    slots = first_slots(cache, pages, tokens=kv.shape[3])
    cache.data.index_copy_(3, slots, kv)


def first_slots(cache: KVCache, pages: Sequence[int], tokens: int) -> Tensor:
    """The slots of the first `tokens` tokens of a block table."""
    slots = slot_mapping(pages, cache.page_size, 0, tokens)
    return torch.tensor(slots, device=cache.data.device)


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream on CUDA, beside those that compute; None elsewhere."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Link:
    """Sends keys and values to another rank, without waiting. On CUDA it has its own stream."""

    def __init__(self, ranks: Ranks, target: int) -> None:
        self.ranks = ranks
        self.target = target
        self.stream = stream_of(ranks.device)
        self.sending: dict[int, list[Any]] = {}  # tensors must live until they are sent

    def send(
        self,
        number: int,
        cache: KVCache,
        pages: Sequence[int],
        tokens: int,
    ) -> None:
        """Send those of the first `tokens` tokens of a block table, as transfer `number`."""
        with torch.cuda.stream(self.stream):
            header = torch.tensor([number, tokens])
            kv = export_pages(cache, pages, tokens)
            with self.ranks.unbroken():  # a header without its keys and values would be the end
                works = [dist.isend(header, self.target), dist.isend(kv, self.target)]
                self.sending[number] = [header, kv, works]

    def forget_all_but(self, numbers: Container[int]) -> None:
        """Drop the tensors of all transfers but these, as they have arrived."""
        self.sending = {n: tensors for n, tensors in self.sending.items() if n in numbers}


class Instance(Stage):
    """The methods that rank 0 calls on ranks that have a whole model each.

    Keys and values from rank 0 are received by a thread. It tells rank 0 when they are there: the
    reply to the number of a transfer is the time, on Ranks.clock. Polling would not do, as gloo
    knows that it has received something only when somebody waits for it."""

    def __init__(self, model: Shard) -> None:
        super().__init__(model)
        self.received: dict[int, Tensor] = {}  # by number of the transfer
        if model.ranks.rank > 0:
            Thread(target=self._receive_all, daemon=True).start()

    def write(self, key: int, number: int, pages: list[int]) -> None:
        """Write the keys and values of a transfer into these pages of the cache of a runner."""
        kv = self.received.pop(number, None)  # after an interrupt rank 0 may ask for it again
        if kv is not None:
            import_pages(self.runners[key].cache, pages, kv)

    def _receive_all(self) -> None:
        """Receive keys and values until rank 0 is gone. Any other failure ends this rank: rank 0
        would wait for ever for what does not come."""
        device = self.model.device
        stream = stream_of(device)
        ranks = self.model.ranks
        try:
            with torch.cuda.stream(stream):
                while True:
                    number, kv = self._receive()
                    if stream is not None:
                        stream.synchronize()
                        kv.record_stream(torch.cuda.default_stream(device))  # which will read it
                    self.received[number] = kv
                    ranks.reply(number, ranks.clock())
        except Exception as error:  # of gloo, too, when rank 0 is gone: then nobody hears it
            ranks.watch.resign_after(error)

    def _receive(self) -> tuple[int, Tensor]:
        """The number of the next transfer, and its keys and values."""
        header = torch.zeros(2, dtype=torch.int64)
        self._receive_into(header)
        number, tokens = header.tolist()
        config = self.model.config
        shape = (config.n_layer, 2, config.n_kv_head, tokens, config.head_dim)
        kv = torch.empty(shape, device=self.model.device, dtype=self.model.dtype)
        self._receive_into(kv)
        return number, kv

    def _receive_into(self, tensor: Tensor) -> None:
        work: Any = dist.irecv(tensor, src=0)
        work.wait(IDLE_LIMIT)
