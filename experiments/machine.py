"""The machine that the numbers depend on: what it is, how fast, and what a schedule costs on it."""

import platform
import statistics
import timeit

import torch

from experiments import measure
from kv_cache import Pages
from policies import POLICIES, make_scheduler
from scheduler import Request


def describe_machine(model, args, rows):
    """What the numbers depend on, and the limits that they are compared with, as a dict. Products
    have `rows` rows; with `ridge_tokens` of them computing takes as long as reading the weights;
    `busy` says that others used the machine meanwhile. `args` are those of options.load_model."""
    device, products = model.device, {"products": measure.bare_products(model, rows, 0)}
    time = lambda: (measure.interleaved(products, device), measure.memory_bandwidth(device))
    spread = lambda found: found[0]["products"].spread
    (timings, bandwidth), drift = measure.steadily(time, device, spread_of=spread)
    rate = measure.product_flops(model, rows, 0) / (timings["products"].ms / 1e3)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "dtype": args.dtype,
        "model": args.init_from or args.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "compiled": args.compile,
        "flops_per_s": rate,
        "bytes_per_s": bandwidth,
        "ridge_tokens": rate / bandwidth * model.dtype.itemsize / 2,
        "schedule_us": schedule_us(),
        "busy": drift > measure.BUSY,
    }


def processor_name():
    """The CPU's name, as well as it can be found."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(s.split(":", 1)[1].strip() for s in file if s.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def schedule_us(running=128, waiting=1000):
    """Microseconds of one `schedule()` with so many requests: the slowest policy's median."""
    medians, sizes = [], dict(chunk=512, max_batch=running, max_len=2048)
    for policy in POLICIES:
        scheduler = make_scheduler(policy, Pages(running, 2048), **sizes)
        for i in range(running + waiting):
            scheduler.add(Request(i, [0] * 1000, 1000, 100))
        while request := scheduler.admit():
            request.tokens.append(0)
            request.num_computed = 1000  # it decodes
        times = timeit.repeat(scheduler.schedule, number=1, repeat=200)
        medians.append(statistics.median(times) * 1e6)
    return max(medians)
