"""Tensor and pipeline parallelism over torch.distributed: see README.md."""
