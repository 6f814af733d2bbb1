"""The CUDA path without a GPU: see README.md in the folder above."""
