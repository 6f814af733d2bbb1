"""The pretended GPU sees what it is there to see: waits, memory, mixed devices, wrong arguments."""

import pytest
import torch

pytestmark = pytest.mark.cuda_build


def on_gpu(*shape):
    """A tensor of the pretended GPU."""
    return torch.empty(shape, device="cuda")


WAITS = {  # what waits for the device
    "copy from pageable memory": lambda: torch.ones(3).to("cuda", non_blocking=True),
    "copy that blocks": lambda: torch.tensor([1], pin_memory=True).to("cuda"),
    "new tensor with numbers": lambda: torch.tensor([1], device="cuda"),
    "fill from pageable memory": lambda: on_gpu(3).copy_(torch.ones(3)),
    "copy back": lambda: on_gpu(3).cpu(),
    "copy back to fill": lambda: torch.empty(3).copy_(on_gpu(3)),
    "read a list": lambda: on_gpu(2, 3).tolist(),
    "index by the host": lambda: on_gpu(3)[torch.tensor([0])],
    "index by a list": lambda: on_gpu(3)[[0, 2]],
    "write by the host": lambda: on_gpu(3).__setitem__(torch.tensor([0]), 1.0),
    "wait for the stream": lambda: torch.cuda.current_stream().synchronize(),
}
NUMBERS = {  # what needs a number that a pretended device does not have
    "read a number": lambda: on_gpu().item(),
    "decide on a number": lambda: bool(on_gpu(3).sum() > 0),
    "look for nonzero": lambda: on_gpu(3).nonzero(),
    "select by mask": lambda: on_gpu(3)[on_gpu(3) > 0],
}


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "plain"])
@pytest.mark.parametrize("name", WAITS | NUMBERS)
def test_each_kind_of_wait_is_seen(gpu, name, inference):
    """Where torch shows operators that are made of others whole, and where it does not."""
    with torch.inference_mode(inference):
        if name in WAITS:
            WAITS[name]()
        else:
            with pytest.raises(RuntimeError):
                NUMBERS[name]()
    (wait,) = gpu.waits
    assert wait.place.startswith("test_fake_gpu.py:")


def test_what_does_not_wait_is_not_taken_for_a_wait(gpu):
    x = torch.tensor([1, 2], pin_memory=True).to("cuda", non_blocking=True)
    x = x[:1].expand(5).float().softmax(dim=-1)
    x[x.argsort()] = 2.0
    x[1:3] = 0
    x.copy_(torch.ones(5, device="cuda"))
    torch.ones(3).tolist()
    assert gpu.waits == []


def test_a_graph_is_one_launch_and_must_not_wait(gpu):
    x = on_gpu(3)
    graph = torch.cuda.CUDAGraph()
    gpu.kernels.clear()
    with torch.cuda.graph(graph):
        x.add_(1).mul_(2)
    assert gpu.kernels.total() == 0
    assert graph.kernels == {"add_": 1, "mul_": 1}
    graph.replay()
    assert gpu.kernels == {"cuda_graph": 1}
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
        x.tolist()
