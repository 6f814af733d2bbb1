"""How processes become ranks: they wait for each other at an address, and each takes its device.

Read next: ranks.py."""

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from runtime.torchrun import Place

MEETING_LIMIT = timedelta(minutes=2)  # to wait for a rank to come at all
CONNECT_S = 3  # for one attempt


def meet(place: Place, host: str, port: int, timeout: timedelta) -> Any:
    """The torch.distributed.Store of all ranks, once they are there. Its timeout is for what comes
    after. Raises ConnectionError or RuntimeError if a rank has not come in MEETING_LIMIT."""
    store, _, _ = next(rendezvous("env://", timeout=MEETING_LIMIT))
    store.set(f"rank {place.rank}", "is here")
    for rank in range(place.world_size):
        try:
            store.wait([f"rank {rank}"], MEETING_LIMIT)
        except dist.DistStoreError:
            limit_s = MEETING_LIMIT.total_seconds()
            message = f"rank {rank} has not come to {host}:{port} in {limit_s:.0f} s"
            raise ConnectionError(message) from None
    store.set_timeout(timeout)
    return store


def wait_for_port(host: str, port: int) -> None:
    """Wait until somebody listens there. Raises ConnectionError after MEETING_LIMIT. torch would
    wait as well, but a Ctrl-C with it, and print its own stack."""
    limit_s = MEETING_LIMIT.total_seconds()
    end = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                message = f"nobody listens at {host}:{port} in {limit_s:.0f} s: {error}"
                raise ConnectionError(message) from None
        time.sleep(0.1)


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
