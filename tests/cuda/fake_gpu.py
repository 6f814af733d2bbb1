"""A pretended GPU: tensors on "cuda" that have shapes, types and a device, and no numbers.

    with FakeGPU(capability=(9, 0)).plugged_in() as gpu:
        model = GPT(config, device="cuda", dtype=torch.bfloat16)
        ...

Everything in it runs as on a real GPU up to the kernels, and torch refuses to mix devices.
`gpu.kernels` counts what would be launched, `gpu.compiled` what Triton would compile. `gpu.waits`
lists where the host would wait for the device. What flash attention is given is checked as its C++
checks it.

It needs the CUDA build of torch, see tests/README.md."""

import contextlib
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tests.cuda.flash import check_flash_call, flash_call

ROOT = Path(__file__).parents[2]
TOTAL_BYTES = 80 * 10**9
BLOCK_BYTES = 512  # of torch's allocator on CUDA
# These give the host a number from the device, or a shape that depends on one.
DATA_DEPENDENT = """_local_scalar_dense equal masked_select nonzero _unique2 unique_dim
    unique_consecutive bincount""".split()
# These only make another view, or take memory.
LAUNCH_NOTHING = """_reshape_alias _unsafe_view alias as_strided chunk detach device empty
    empty_like empty_permuted empty_strided expand lift_fresh new_empty permute reshape select slice
    split split_with_sizes squeeze t transpose unbind unflatten unsqueeze view""".split()


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    reason: str
    place: str  # file:line, of the code of the project that led there


class FakeDevice(FakeTensorMode):
    """Makes tensors that have no memory, on a device that does not exist."""

    @property
    def avoid_device_init(self):
        return True


class FakeGPU(TorchDispatchMode):
    """The GPU of this process, as long as the context lasts: see the top of this file."""

    def __init__(self, capability):
        super().__init__()
        self.capability = capability
        self.allocated_bytes = 0
        self.kernels = Counter()  # launched, by the name of the operator
        self.capturing = False  # a CUDA graph
        self.waits = []
        self.compiled = set()  # Triton's kernels, see Launcher
        self.storages = weakref.WeakSet()
        self.pinned = WeakIdKeyDictionary()  # tensors of the host, as a set
        self.patches = contextlib.ExitStack()

    @contextlib.contextmanager
    def plugged_in(self):
        """The context in which the device "cuda" is this one."""
        with self.patches:
            self.patch_xformers()
            self.patch_torch()
            with FakeDevice(), self:
                yield self

    # What is pretended.

    def patch(self, target, **values):
        """Replace attributes until the context ends."""
        self.patches.enter_context(mock.patch.multiple(target, **values))

    def patch_torch(self):
        """Let torch.cuda answer as if there were a driver."""
        real_tensor = torch.tensor
        stream = SimpleNamespace(
            device=torch.device("cuda", 0),
            synchronize=lambda: self.wait("synchronize"),
            wait_stream=lambda stream: None,
        )

        def tensor(*args, pin_memory=False, **kwargs):
            x = real_tensor(*args, **kwargs)
            if pin_memory:
                self.pinned[x] = True
            return x

        def tolist(x):
            if x.is_cuda:
                self.wait("tolist")
            return zeros(x)

        self.patch(
            torch.cuda,
            CUDAGraph=lambda: FakeGraph(self),
            Stream=lambda device=None: stream,
            current_device=lambda: 0,
            current_stream=lambda device=None: stream,
            device=lambda device: contextlib.nullcontext(),
            device_count=lambda: 1,
            device_of=lambda tensor: contextlib.nullcontext(),
            get_device_capability=lambda device=None: self.capability,
            graph=self.capture,
            graph_pool_handle=lambda: (0, 1),
            is_available=lambda: True,
            mem_get_info=lambda device=None: self.memory(),
            memory_allocated=lambda device=None: self.allocated_bytes,
            memory_reserved=lambda device=None: self.allocated_bytes,
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda device=None: self.wait("synchronize"),
        )
        self.patch(torch, tensor=tensor, Generator=HostGenerator)
        self.patch(FakeTensor, tolist=tolist)
        self.patch(torch.nn.Module, _apply=replace_parameters)

    def patch_xformers(self):
        """Record the launches of xformers' two Triton kernels."""
        from xformers.ops.fmha import triton_splitk
        from xformers.ops.fmha._triton import splitk_kernels

        split_k = Launcher("split_k", splitk_kernels._get_splitk_kernel(1), self)
        reduce = Launcher("split_k_reduce", splitk_kernels._splitK_reduce, self)
        self.patch(triton_splitk.FwOp, get_kernel=classmethod(lambda operator: split_k))
        self.patch(splitk_kernels, _splitK_reduce=reduce)

    def memory(self):
        """Free and total bytes, as torch.cuda.mem_get_info."""
        return TOTAL_BYTES - self.allocated_bytes, TOTAL_BYTES

    # What is recorded.

    @contextlib.contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """As torch.cuda.graph: kernels are not launched but become part of a graph."""
        launched = self.kernels
        self.kernels = graph.kernels
        self.capturing = True
        try:
            yield
        finally:
            self.kernels = launched
            self.capturing = False

    def wait(self, reason):
        """Record that the host waits for the device here. Raises RuntimeError in a capture."""
        if self.capturing:
            raise RuntimeError(f"{reason}: not permitted when the stream is capturing")
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_of_project(frame.f_code.co_filename):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.waits.append(Wait(reason, place))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_made_of_others(op):
            with self:
                return op.decompose(*args, **kwargs)
        name = op.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_cuda for x in tensors):
            self.note_waits(name, tensors, args, kwargs)
        call = flash_call(op, args, kwargs)
        if call is not None:
            check_flash_call(call)
        result = op(*args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_cuda]
        for x in results:
            self.allocate(x)
        if name in ("_to_copy", "copy_") and not any(x.is_cuda for x in tensors) and results:
            self.note_copy(name, tensors[-1], args, kwargs)  # the host's tensors alone go in
        if (results or any(x.is_cuda for x in tensors)) and name not in LAUNCH_NOTHING:
            self.kernels[name] += 1
        return result

    def note_waits(self, name, tensors, args, kwargs):
        """Record what an operator waits for that is given tensors on the device."""
        if name in DATA_DEPENDENT:
            self.wait(name)
        if name.startswith("index") and any(x.ndim and not x.is_cuda for x in tensors):
            self.wait(f"{name} with an index of the host")
        if name == "index" and any(x.is_cuda and x.dtype == torch.bool for x in tensors[1:]):
            self.wait("index with a mask")  # how many rows there are is a number on the device
        if name == "_to_copy" and torch.device(kwargs.get("device", "cuda")).type != "cuda":
            self.note_copy(name, tensors[0], args, kwargs)
        if name == "copy_" and len({x.device.type for x in tensors}) == 2:
            self.note_copy(name, tensors[-1], args, kwargs)

    def note_copy(self, name, source, args, kwargs):
        """Record a copy between host and device, unless it runs on while the host does.

        That takes non_blocking, and memory of the host that is pinned."""
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])
        if source.is_cuda or source not in self.pinned:
            self.wait(f"{name} of memory that is not pinned")
        elif not non_blocking:
            self.wait(f"{name} that blocks")

    def allocate(self, x):
        """Count the memory of a tensor, until it is freed."""
        storage = x.untyped_storage()
        if storage in self.storages:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.storages.add(storage)
        self.allocated_bytes += size
        weakref.finalize(storage, self.free, size)

    def free(self, size):
        """Count memory as free again."""
        self.allocated_bytes -= size


class FakeGraph:
    """Stands for a torch.cuda.CUDAGraph: each replay is one launch."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.kernels = Counter()  # that were captured

    def replay(self):
        self.gpu.kernels["cuda_graph"] += 1


class HostGenerator(torch.Generator):
    """A generator on the host, whatever its device is to be."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class Launcher:
    """Stands for a Triton kernel: counts its launches, and what would be compiled for them.

    Triton compiles a kernel for each set of constants, types, and kinds of whole numbers."""

    def __init__(self, name, kernel, gpu):
        self.name = name
        self.gpu = gpu
        while not hasattr(kernel, "params"):
            kernel = kernel.fn  # below heuristics that choose some constants
        self.names = [parameter.name for parameter in kernel.params]
        self.constants = {p.name for p in kernel.params if p.is_constexpr}

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        """Note a launch. Raises RuntimeError for a tensor that is not on the device."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        key = [self.name]
        for name, x in sorted(arguments.items()):
            if isinstance(x, Tensor):
                if not x.is_cuda:
                    raise RuntimeError(f"{self.name}: {name} is on {x.device}")
                x = x.dtype
            elif isinstance(x, int) and name not in self.constants:
                x = "1" if x == 1 else f"multiple of 16: {x % 16 == 0}"
            key.append(f"{name}={x}")
        self.gpu.kernels[self.name] += 1
        self.gpu.compiled.add(tuple(key))


def is_made_of_others(op):
    """Whether an operator only calls others on CUDA. In inference_mode it is dispatched whole."""
    if op.namespace != "aten":
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CUDA")


def is_of_project(file):
    """Whether this is code of the project, and not of the stand-in."""
    return file.startswith(str(ROOT)) and "site-packages" not in file and file != __file__


def zeros(x):
    """Nested lists of zeros in the shape of x."""
    nested = 0.0 if x.is_floating_point() else 0
    for size in reversed(x.shape):
        nested = [nested] * size
    return nested


def replace_parameters(module, fn, recurse=True):
    """nn.Module._apply by new parameters: torch's own swaps the memory of pretended ones."""
    for child in module.children():
        child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(fn(parameter), requires_grad=False)
    return module
