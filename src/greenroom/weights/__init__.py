"""Weights that are not experts, kept in host memory: prefetched layer by layer, or read where they lie."""
