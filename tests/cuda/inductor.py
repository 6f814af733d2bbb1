"""The code that torch.compile generates for a GPU, without one: what it would launch, in order.

Inductor needs to know the GPU, not to run on it. `launches_of` answers its questions, lets it
generate the code for a function of pretended tensors, reads the code, and runs none of it. It takes
a process of its own, see split_k.Worker: Inductor remembers what it was told."""

import contextlib
import re
from types import SimpleNamespace
from unittest import mock

import torch

from model import Block, GPTConfig
from tests.cuda.fake_gpu import FakeDevice
from tests.cuda.split_k import pretend_driver

A100 = SimpleNamespace(
    name="a pretended A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=80 * 10**9,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=163 * 2**10,
    shared_memory_per_multiprocessor=164 * 2**10,
    L2_cache_size=40 * 2**20,
    gcnArchName="",
)
# In the generated code: a kernel of Triton's, a product of cuBLAS, any other operator of torch.
LAUNCH = re.compile(
    r"^ +(?:\w+ = )?(?:(triton)_\w+\.run|extern_kernels\.(\w+)|torch\.ops\.([.\w]+))\(",
    re.MULTILINE,
)


class CodeGenerated(Exception):  # noqa: N818
    """The code is there: Inductor need not go on."""


@contextlib.contextmanager
def generates_for_cuda(codes):
    """Let Inductor generate code for an A100, put it into `codes`, and raise CodeGenerated."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.graph import GraphLowering

    def keep_code(graph):
        code, _ = graph.codegen()
        codes.append(code.value)
        raise CodeGenerated

    pretend_driver((8, 0))
    patches = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=None: A100),
        (CudaInterface, "get_device_properties", lambda device=None: A100),
        (CudaInterface.Worker, "get_device_properties", lambda device=None: A100),
        (torch.cuda, "get_device_capability", lambda device=None: (A100.major, A100.minor)),
        (torch.cuda, "get_rng_state", torch.get_rng_state),
        (torch.cuda, "set_rng_state", lambda state: None),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "_exchange_device", lambda index: 0),
        (torch.cuda, "_maybe_exchange_device", lambda index: 0),
        (torch.accelerator, "is_available", lambda: False),  # of whose streams Dynamo asks
        # Patterns of attention and of padded products are traced on the device; none is here.
        (fuse_attention, "_sfdp_init", lambda device: None),
        (misc_patterns, "_misc_patterns_init", lambda device: None),
        (pad_mm, "_pad_mm_init", lambda device: None),
        (GraphLowering, "compile_to_module", keep_code),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def launches_of(function, *inputs):
    """The names of what a compiled function launches: "triton", or those of library functions."""
    from torch._inductor.exc import InductorError

    codes = []
    with generates_for_cuda(codes):
        try:
            torch.compile(function, dynamic=True, fullgraph=True)(*inputs)
        except InductorError as error:
            if not codes:
                raise
            assert isinstance(error.__cause__ or error.inner_exception, CodeGenerated)
    (code,) = codes
    return ["".join(names) for names in LAUNCH.findall(code)]  # one of the three is not empty


def launches_of_a_layer(family, n_kv_head):
    """What the two halves of a LLaMA-13B's layer launch for six rows, before attention and after.

    The family and the heads of keys and values may be others."""
    config = GPTConfig(
        family, n_layer=1, n_head=40, n_kv_head=n_kv_head, n_embd=5120, n_inner=13824
    )
    torch.set_default_dtype(torch.bfloat16)  # of a process of its own
    with FakeDevice(), torch.inference_mode(), torch.device("cuda"):
        block = Block(config)
        x = torch.empty(6, config.n_embd)
        y = torch.empty(6, config.n_head, config.head_dim)
        rope = torch.empty(6, 2, 1, config.head_dim, dtype=torch.float32)
        before = (x, rope) if family == "llama" else (x,)
        return [launches_of(block.project, *before), launches_of(block.finish, x, y)]
