"""Fixtures for tests of experts."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """torch's own threads would only be in the engine's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """torch begins with another seed in each process, and rounding errors have tails."""
    torch.manual_seed(0)
