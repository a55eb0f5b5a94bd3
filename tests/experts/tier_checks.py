"""What tests of the CUDA tier share, on a real device and on a played one."""

import torch

from greenroom.experts.manager import OffloadManager
from greenroom.experts.residency import ABSENT
from tests.experts.driver import ALL_ON_CPU, ALL_STREAMED, BOTH_LANES

EXPERTS, LAYERS = 12, 3
LANES = {"cpu": ALL_ON_CPU, "streamed": ALL_STREAMED, "both": BOTH_LANES}


def check_slots(manager: OffloadManager) -> None:
    """Every mapped slot holds its expert's bytes."""
    manager.check_invariants()
    torch.cuda.synchronize()
    for layer in range(LAYERS):
        for expert, slot in enumerate(manager.cache.layer_map(layer)):
            if slot != ABSENT:
                held = manager.tier.slots[layer][slot].cpu()
                assert torch.equal(held, manager.store.blocks(layer)[expert]), f"layer {layer}, slot {slot}"
