"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.batches import Engines


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The model is made of tiny operations; torch's own threads would only be in the engine's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()
