"""What all tests share."""

import os

import pytest
import torch
from hypothesis import settings

from tests.triton_interpreter import quicken

if not torch.cuda.is_available():
    # Before any kernel is imported: Triton's interpreter runs them on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()

settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "explore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, visibly, what needs a GPU on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
