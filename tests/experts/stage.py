"""A CPU engine with mailboxes and a device that posts to them, for tests."""

import math
from dataclasses import replace

import torch

from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.native import Isa
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64
from tests.reference.posting_device import PostingDevice

SILU = Activation(ActivationKind.SILU)
SMALL = ExpertFormat(33, 17, torch.bfloat16, SILU)
WIDE = ExpertFormat(512, 256, torch.bfloat16, SILU)
SLOW = ExpertFormat(1024, 512, torch.float32, SILU)
EXPERTS = 5

AGES = 1e12
"""A throttle under which no work ends before the throttle is changed."""


def filled(store: HostStore) -> HostStore:
    generator = torch.Generator().manual_seed(1)
    for layer, fmt in enumerate(store.formats):
        views = store.views(layer)
        for part, width in ((views.up, fmt.hidden), (views.down, fmt.inter), (views.up_bias, 4), (views.down_bias, 4)):
            if part is not None:
                part.copy_(torch.randn(part.shape, generator=generator) * width**-0.5)
    return store


class Stage:
    """An engine, a store of ``formats``, mailboxes and the device that posts to them."""

    def __init__(
        self,
        formats: list[ExpertFormat],
        threads: int = 2,
        isa: Isa = Isa.AUTO,
        max_tokens: int = 4,
        top_k: int = 3,
        store: HostStore | None = None,
    ) -> None:
        self.store = filled(store or HostStore(formats, [EXPERTS] * len(formats)))
        self.engine = CpuExperts(threads, isa=isa)
        self.boxes = Mailboxes(self.engine, self.store, max_tokens, top_k, pin_memory=False)
        self.device = PostingDevice(self.boxes)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.store.close()

    def batch(self, layer: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden rows, ids (some of them sentinels) and weights."""
        fmt, generator = self.store.formats[layer], torch.Generator().manual_seed(seed)
        choices = (rows, self.boxes.cpu_ids.shape[2])
        return (
            torch.randn(rows, fmt.hidden, generator=generator).to(fmt.dtype),
            torch.randint(-1, EXPERTS + 1, choices, generator=generator, dtype=torch.int32),
            torch.rand(choices, generator=generator) + 0.1,
        )

    def submitted(
        self,
        layer: int,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        divided: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The same batch as an ordinary job: the same result to the bit."""
        out = torch.full(batch[0].shape, math.nan, dtype=torch.float32)
        self.engine.run(self.store.formats[layer], self.store.addresses(layer), *batch, out, divided)
        return out

    def expected(
        self,
        layer: int,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        divided: tuple[int, int] = (-1, 0),
    ) -> torch.Tensor:
        """In float64. What the device computes of a divided expert meets columns of zeros."""
        views, (expert, first) = self.store.views(layer), divided
        if expert >= 0:
            views = replace(views, down=views.down.clone())
            views.down[expert, :, :first] = 0
        return moe_float64(*batch, views, self.store.formats[layer])

    def post(self, layer: int, rows: int = 1, seed: int = 0) -> None:
        self.device.write(layer, *self.batch(layer, rows, seed))
        self.device.request(layer, rows)

    def slow_down(self, layer: int, seconds: float) -> None:
        """Throttles the engine so that a one-row job of ``layer`` takes ``seconds`` or more."""
        self.boxes.arm()
        times = []
        for _ in range(20):
            self.post(layer)
            self.device.wait(layer)
            times.append(int(self.boxes.busy_ns[layer, 0]))
        self.boxes.disarm()
        self.engine.throttle(seconds / (min(times) / 1e9))
