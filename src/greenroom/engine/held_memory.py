"""What a model holds of the device and of the host, to be compared with what was planned."""

from dataclasses import dataclass

import torch

from greenroom import hardware


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at one moment, in bytes.

    free: whoever uses the rest. cached: that torch keeps for this process, and nothing lies there. allocated: through
    torch, by this process.
    """

    free: int
    cached: int
    allocated: int

    @property
    def available(self) -> int:
        """To this process."""
        return self.free + self.cached

    @classmethod
    def read(cls, device: torch.device) -> "DeviceMemory | None":
        """None for a device that is no GPU. Makes the process's context, which so counts as used."""
        if device.type != "cuda":
            return None
        free = torch.cuda.mem_get_info(device)[0]
        return cls(free, hardware.cached_device_bytes(device), torch.cuda.memory_allocated(device))

    def taken_since(self, before: "DeviceMemory") -> int:
        """Bytes of what was available before that are not free any more; what torch keeps counts among them."""
        return before.available - self.free


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that a model holds, and those that were planned for it and what it was to run; see ``Offload.memory``.

    device: of what was available when loading began, those that are not free any more, libraries and kernels included;
    None without a GPU. host: of experts and offloaded weights; without a GPU also of all other weights and cache slots.
    """

    device: int | None
    device_planned: int | None
    host: int
    host_planned: int
