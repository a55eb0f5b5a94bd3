"""Benchmarks behind ``greenroom bench``: random data, a correctness check in the same run, frozen results."""
