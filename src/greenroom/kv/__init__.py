"""Blocks of keys and values: on the device, in host memory, and between the two."""
