"""What a model holds of the device and of the host, to be compared with what was planned."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at one moment. free: bytes, whoever uses the rest. allocated: through torch, by this process."""

    free: int
    allocated: int

    @classmethod
    def read(cls, device: torch.device) -> "DeviceMemory | None":
        """None for a device that is no GPU. Makes the process's context, which so counts as used."""
        if device.type != "cuda":
            return None
        free = torch.cuda.mem_get_info(device)[0]
        return cls(free, torch.cuda.memory_allocated(device))


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that a model holds, and those that were planned for it and what it was to run; see ``Offload.memory``.

    device: by which the GPU's free memory has shrunk since loading began, libraries and kernels included; None without
    a GPU. host: of experts and offloaded weights; without a GPU also of all other weights and cache slots.
    """

    device: int | None
    device_planned: int | None
    host: int
    host_planned: int
