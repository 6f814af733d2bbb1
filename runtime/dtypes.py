"""The type of weights that this device computes fastest with. Read first: packed_linear.py."""

from functools import cache

import torch

from runtime.packed_linear import steady_rates


@cache
def cpu_rates(threads: int) -> dict[torch.dtype, float]:
    """Flops per second of a chunk's product on this CPU, with the fastest kind of layer, by type.

    Takes a third of a second. `threads` is torch's number of threads."""
    rates = steady_rates((torch.bfloat16, torch.float32))
    return {dtype: max(rate_of.values()) for dtype, rate_of in rates.items()}


def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 if this CPU multiplies it faster than float32, else float32. See cpu_rates."""
    rates = cpu_rates(torch.get_num_threads())
    return max(rates, key=lambda dtype: rates[dtype])


def fastest_gpu_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if the tensor cores of this GPU multiply it, as from Ampere on, else float16.

    Before (V100, T4) bfloat16 is emulated in float32."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
