"""Batches of several sequences over a KV cache made of blocks."""
