"""Triton kernels of a decode step. They know addresses and shapes, neither layers nor caches."""
