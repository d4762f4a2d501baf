"""Operators in plain PyTorch, which is their definition, and the Triton kernels of two of them."""
