"""Code that computes: the CPU engine and the GPU kernels."""
