"""Request: what a model is to be offloaded with, checked and planned before anything is allocated."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from greenroom import hardware
from greenroom.config import OffloadConfig
from greenroom.engine.held_memory import DeviceMemory
from greenroom.engine.spec import ModelSpec
from greenroom.errors import ConfigError
from greenroom.experts.native import Isa
from greenroom.experts.policies import Policy, Static, make_policy
from greenroom.experts.sizing import MemoryPlan, plan_memory
from greenroom.weights.base import WeightOffloader
from greenroom.weights.config import WeightOffloadConfig
from greenroom.weights.make import make_weight_offloader
from greenroom.weights.select import Selection, select, weights_of


@dataclass(frozen=True)
class Request:
    """What was asked for, checked before anything is allocated. ``check`` makes one.

    before: the device's memory then; None without a GPU.
    """

    config: OffloadConfig
    policy: Policy
    isa: Isa
    device: torch.device
    weights: WeightOffloadConfig
    before: DeviceMemory | None

    @classmethod
    def check(cls, config: OffloadConfig) -> "Request":
        """
        Raises:
            ConfigError: an unknown policy or instruction set, a device that is not there, or options of weight offload
                that contradict each other.
        """
        policy = make_policy(config.policy, config.profile)
        isa, device, weights = Isa.parse(config.isa), choose_device(config.device), weights_config(config)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches kernels on the thread's current device
        return cls(config, policy, isa, device, weights, DeviceMemory.read(device))

    def plan(self, spec: ModelSpec, reserved_bytes: int = 0, kv_offload_bytes: int = 0) -> MemoryPlan:
        """
        Args:
            reserved_bytes: that KV cache and activations will need, as far as that is known.
            kv_offload_bytes: of host memory, for KV blocks.

        Raises:
            ConfigError: the weights to offload cannot be chosen so, or the profile is another model's.
            MemoryLimitError: it does not fit.
        """
        if isinstance(self.policy, Static):
            self.policy.check(len(spec.layers), max(layer.num_experts for layer in spec.layers))
        selection = self.select(spec)
        return plan_memory(
            self.config,
            [layer.format for layer in spec.layers],
            [layer.num_experts for layer in spec.layers],
            spec.other_bytes - selection.weight_bytes + selection.device_bytes,
            device_free=None if self.before is None else self.before.available,
            host_free=hardware.available_host_bytes(),
            offloaded_bytes=selection.host_bytes,
            reserved_bytes=reserved_bytes,
            kv_offload_bytes=kv_offload_bytes,
        )

    def select(self, spec: ModelSpec) -> Selection:
        """Which weights that are not experts stay in host memory, by what is known before loading."""
        return select(spec.weights, spec.decoder, self.weights)

    def take_weights(self, model: PreTrainedModel, spec: ModelSpec) -> WeightOffloader:
        """Takes those weights out of ``model``, which can then be moved to the device.

        Raises:
            ConfigError: the device has no such backend.
            MemoryLimitError: no host memory for them, or it cannot be page-locked.
        """
        # What is loaded may have other dtypes than the configuration lets expect.
        selection = select(weights_of(model), spec.decoder, self.weights)
        weights = make_weight_offloader(selection, self.device, self.config.pin_memory)
        weights.take(model)
        return weights


def weights_config(config: OffloadConfig) -> WeightOffloadConfig:
    """The part of ``config`` that is about other weights than experts.

    Raises:
        ConfigError: options that contradict each other.
    """
    return WeightOffloadConfig.choose(
        config.weights_offload_backend,
        config.weights_offload_group_size,
        config.weights_offload_num_in_group,
        config.weights_offload_prefetch_step,
        config.weights_offload_params,
    )


def choose_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is the first GPU, or the CPU without one.

    Raises:
        ConfigError: a GPU that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device '{name}' is not there: torch sees {count} CUDA devices; choose cpu or auto")
        device = torch.device("cuda", device.index or 0)
    return device
