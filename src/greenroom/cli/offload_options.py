"""The flags of every command that loads a model: one for each knob of offloading."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from greenroom.cli import options
from greenroom.config import OffloadConfig


def takes_offload_config(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer shall see it: with all flags of ``_offload_config`` in place of its parameter ``config``.

    Raises, when called:
        ConfigError: a flag's value is none, before anything of the command runs.
    """
    flags = inspect.signature(_offload_config).parameters

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        config = _offload_config(**{name: values.pop(name) for name in flags})
        command(config=config, **values)

    # Typer reads a command's flags from its signature.
    own = inspect.signature(command)
    parameters = [
        parameter
        for name, given in own.parameters.items()
        for parameter in (flags.values() if name == "config" else [given])
    ]
    with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_flags


def _offload_config(
    *,
    cache_expert_num: options.CacheExpertNum = None,
    vram: options.Vram = None,
    cache_topk: options.CacheTopk = OffloadConfig.cache_topk,
    update_expert_num: options.UpdateExpertNum = OffloadConfig.update_expert_num,
    context_num_threads: options.ContextNumThreads = None,
    policy: options.Policy = OffloadConfig.policy,
    profile: options.Profile = None,
    device: options.Device = OffloadConfig.device,
    isa: options.Isa = OffloadConfig.isa,
    no_pin_memory: options.NoPinMemory = False,
    weights_offload_group_size: options.WeightsGroupSize = None,
    weights_offload_num_in_group: options.WeightsNumInGroup = None,
    weights_offload_prefetch_step: options.WeightsPrefetchStep = None,
    weights_offload_params: options.WeightsParams = None,
    weights_offload_backend: options.WeightsBackend = None,
) -> OffloadConfig:
    return OffloadConfig(
        cache_expert_num=cache_expert_num,
        vram=vram,
        cache_topk=cache_topk,
        update_expert_num=update_expert_num,
        context_num_threads=context_num_threads,
        policy=policy,
        profile=profile,
        device=device,
        isa=isa,
        pin_memory=not no_pin_memory,
        weights_offload_group_size=weights_offload_group_size,
        weights_offload_num_in_group=weights_offload_num_in_group,
        weights_offload_prefetch_step=weights_offload_prefetch_step,
        weights_offload_params=weights_offload_params,
        weights_offload_backend=weights_offload_backend,
    )
