"""The pretended GPU sees what it is there to see: waits, memory, mixed devices, wrong arguments."""

import pytest
import torch

from tests.cuda.fake_gpu import BLOCK_BYTES, FakeGPU

pytestmark = pytest.mark.cuda_build


def copy_from_pageable_memory():
    torch.ones(3).to("cuda", non_blocking=True)


def copy_that_blocks():
    torch.tensor([1], pin_memory=True).to("cuda")


def new_tensor_on_the_device():
    torch.tensor([1], device="cuda")


def fill_from_pageable_memory():
    torch.empty(3, device="cuda").copy_(torch.ones(3))


def copy_back():
    torch.empty(3, device="cuda").cpu()


def copy_back_to_fill():
    torch.empty(3).copy_(torch.empty(3, device="cuda"))


def read_a_number():
    torch.empty((), device="cuda").item()


def decide_on_a_number():
    bool(torch.empty(3, device="cuda").sum() > 0)


def read_a_list():
    torch.empty(2, 3, device="cuda").tolist()


def look_for_nonzero():
    torch.empty(3, device="cuda").nonzero()


def select_by_mask():
    x = torch.empty(3, device="cuda")
    x[x > 0]


def index_by_the_host():
    torch.empty(3, device="cuda")[torch.tensor([0])]


def index_by_a_list():
    torch.empty(3, device="cuda")[[0, 2]]


def write_by_the_host():
    torch.empty(3, device="cuda")[torch.tensor([0])] = 1.0


def wait_for_the_stream():
    torch.cuda.current_stream().synchronize()


WAITING = [
    copy_from_pageable_memory,
    copy_that_blocks,
    new_tensor_on_the_device,
    fill_from_pageable_memory,
    copy_back,
    copy_back_to_fill,
    read_a_number,
    decide_on_a_number,
    read_a_list,
    look_for_nonzero,
    select_by_mask,
    index_by_the_host,
    index_by_a_list,
    write_by_the_host,
    wait_for_the_stream,
]


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])
@pytest.mark.parametrize("wait", WAITING, ids=lambda wait: wait.__name__)
def test_each_kind_of_wait_is_seen(gpu, wait, inference):
    """Where torch shows operators that are made of others whole, and where it does not."""
    try:
        with torch.inference_mode(inference):
            wait()
    except RuntimeError:  # numbers that the host wants to know do not exist
        assert wait in (read_a_number, decide_on_a_number, look_for_nonzero, select_by_mask)
    assert len(gpu.waits) == 1
    assert gpu.waits[0].place.startswith("test_fake_gpu.py:")


def test_what_does_not_wait_is_not_taken_for_a_wait(gpu):
    x = torch.tensor([1, 2], pin_memory=True).to("cuda", non_blocking=True)
    x = x[:1].expand(5).float().softmax(dim=-1)
    x[x.argsort()] = 2.0
    x[1:3] = 0
    x.copy_(torch.ones(5, device="cuda"))
    torch.ones(3).tolist()
    assert gpu.waits == []


def test_memory_is_counted_until_it_is_freed(gpu):
    x = torch.empty(1000, 1000, device="cuda")
    blocks = -(-4_000_000 // BLOCK_BYTES) * BLOCK_BYTES
    assert gpu.allocated_bytes == blocks
    y = x[None] + 1
    view = y[0]
    assert gpu.allocated_bytes == gpu.peak_bytes == 2 * blocks
    del x, y
    assert gpu.allocated_bytes == blocks
    del view
    assert gpu.allocated_bytes == 0 and gpu.peak_bytes == 2 * blocks
    assert torch.cuda.mem_get_info() == (gpu.total_bytes, gpu.total_bytes)


def test_mixed_devices_are_refused(gpu):
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        torch.empty(3, device="cuda") + torch.ones(3)


def test_kernels_are_counted_and_views_are_not(gpu):
    x = torch.empty(4, 6, device="cuda")
    gpu.kernels.clear()
    x.view(2, 12)[:1].transpose(0, 1).unsqueeze(0)
    assert gpu.kernels.total() == 0
    torch.addmm(x[:, :1].add(1), x, x.t()[:, :1])
    assert gpu.kernels == {"add": 1, "addmm": 1}


def test_the_pretended_gpu_is_gone_after_the_context():
    functions = (torch.cuda.is_available, torch.tensor, torch.nn.Module._apply)
    with FakeGPU().plugged_in():
        assert torch.cuda.is_available() and torch.empty(1, device="cuda").is_cuda
    assert functions == (torch.cuda.is_available, torch.tensor, torch.nn.Module._apply)


def test_a_graph_is_one_launch_and_must_not_wait(gpu):
    x = torch.empty(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    gpu.kernels.clear()
    with torch.cuda.graph(graph):
        x.add_(1).mul_(2)
    assert gpu.kernels.total() == 0 and graph.kernels == {"add_": 1, "mul_": 1}
    graph.replay()
    assert gpu.kernels == {"cuda_graph": 1}
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
        x.tolist()


def test_triton_compiles_for_each_constant_and_each_kind_of_number(gpu):
    from xformers.ops.fmha import triton_splitk

    kernel = triton_splitk.FwOp.get_kernel()[(1,)]
    x = torch.empty(3, device="cuda")
    for stride, page_size in ((1, 64), (16, 64), (32, 64), (3, 64), (7, 64), (3, 128)):
        kernel(x, x, x, stride_qz=stride, PAGE_SIZE=page_size)
    assert len(gpu.compiled) == 4 and gpu.kernels["split_k"] == 6
    with pytest.raises(RuntimeError, match="Q is on cpu"):
        kernel(torch.ones(3))
