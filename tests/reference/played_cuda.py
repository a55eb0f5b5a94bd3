"""A CUDA device played on the CPU, for what the host does around one.

Streams do their work at once and in the order in which it is enqueued; events have always happened. So this says
nothing about concurrency, but all about what is copied, computed and waited for.
"""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from greenroom.experts import cuda_tier
from greenroom.experts.staging import Staging

PLAYED_WAIT_S = 1.0
"""How long the played device waits for the CPU engine before it goes on without."""


class PlayedEvent:
    def __init__(self, **_options: Any) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "PlayedEvent") -> float:
        return 1.0


class PlayedStream:
    def __init__(self, _device: object = None) -> None: ...

    def wait_event(self, _event: PlayedEvent) -> None: ...

    def wait_stream(self, _stream: "PlayedStream") -> None: ...

    def synchronize(self) -> None: ...


def _wait_until_reached(word: torch.Tensor, value: int, _device: torch.device) -> None:
    end = time.monotonic() + PLAYED_WAIT_S
    while int(word[0]) != value and time.monotonic() < end:
        time.sleep(1e-4)


def play_cuda(patch: pytest.MonkeyPatch) -> torch.device:
    """The device to give to a ``CudaTier``."""
    for name, played in {
        "Event": PlayedEvent,
        "Stream": PlayedStream,
        "current_stream": lambda _device=None: PlayedStream(),
        "stream": lambda _stream: nullcontext(),
        "synchronize": lambda _device=None: None,
    }.items():
        patch.setattr(torch.cuda, name, played)
    for name in ("zeros", "empty", "full"):
        # No driver, no page-locked memory.
        real = getattr(torch, name)
        patch.setattr(torch, name, lambda *size, real=real, pin_memory=False, **options: real(*size, **options))
    patch.setattr(Staging, "out_on_device", property(lambda staging: staging.out))
    patch.setattr(cuda_tier, "wait_until_reached", _wait_until_reached)
    return torch.device("cpu")
