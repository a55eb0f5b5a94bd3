"""The backend that a selection asks for."""

import logging

import torch

from greenroom.errors import ConfigError
from greenroom.weights.base import NoWeightOffload, WeightOffloader
from greenroom.weights.prefetch import PrefetchOffload
from greenroom.weights.select import Selection
from greenroom.weights.uva import UvaOffload

logger = logging.getLogger(__name__)


def make_weight_offloader(selection: Selection, device: torch.device, pin_memory: bool = True) -> WeightOffloader:
    """
    Raises:
        ConfigError: the device has no such backend, or a GPU would need memory that is not page-locked.
    """
    logger.info("weight offload: %s", selection)
    if selection.backend == "none":
        return NoWeightOffload()
    if device.type == "cuda" and not pin_memory:
        raise ConfigError(
            "offloaded weights need page-locked memory; leave out pin_memory=False (--no-pin-memory), or "
            "weights_offload_backend"
        )
    if selection.backend == "uva":
        return UvaOffload(selection, device)
    if selection.num_slots == len(selection.units):
        logger.warning(
            "weight offload saves no device memory: prefetch_step of %d has a buffer for each of %d offloaded layers",
            selection.num_slots,
            len(selection.units),
        )
    return PrefetchOffload(selection, device)
