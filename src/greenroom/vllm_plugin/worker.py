"""OffloadMixin: what a worker of ours does besides vLLM's own."""

import functools
import logging
from typing import Any

import torch

from greenroom.errors import ConfigError
from greenroom.vllm_plugin.binding import Share, gpu_node
from greenroom.vllm_plugin.metrics import CounterFile
from greenroom.vllm_plugin.options import MoeOffloadOptions
from greenroom.vllm_plugin.rank import RankExperts
from greenroom.vllm_plugin.routed_experts import OffloadingLayer, offloading_layers, replace_routed_experts
from greenroom.vllm_plugin.steps import StepDriver
from greenroom.vllm_plugin.summary import describe_rank

logger = logging.getLogger("vllm.greenroom")  # below vLLM's own, which has the handlers


class OffloadMixin:
    """Mixed in before a vLLM worker class, whose attributes it uses."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    local_rank: int
    rank: int

    experts: RankExperts | None = None
    steps: StepDriver | None = None
    counter_file: CounterFile | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model, its experts into host memory; then allocates slots and buffers: memory is profiled later."""
        options = MoeOffloadOptions.from_additional_config(self.vllm_config.additional_config)
        if options is None:
            raise ConfigError("this worker class is for engines with --moe-offload; add it, or remove --worker-cls")
        replace_routed_experts()
        self.experts = RankExperts(
            options,
            torch.device(self.device),
            self._share(),
            dummy=self.vllm_config.load_config.load_format == "dummy",
        )
        try:
            with self.experts.building():
                super().load_model(**kwargs)  # type: ignore[misc]
            self._make_ready(self.experts)
        except BaseException:
            # Nobody shuts down a worker that has not come up, and what is page-locked stays so until it is unlocked.
            if self.steps is not None:
                self.steps.close()
            self.experts.close()
            raise

    def _make_ready(self, experts: RankExperts) -> None:
        model = self.model_runner.get_model()
        layers = offloading_layers(model)
        before = _allocated(experts.device)
        experts.finish()
        with experts.allocating():
            self.steps = steps = self.make_steps(experts, layers)
        for index, layer in enumerate(layers):
            if layer.offloaded is None:
                layer.offloaded = functools.partial(steps.run_layer, index)
        steps.attach(model)
        experts.device_bytes = _allocated(experts.device) - before
        self.counter_file = CounterFile(self.vllm_config.instance_id, self.rank, len(steps.manager.layers))
        logger.info(describe_rank(experts, steps.way, decides=steps.counts))

    def make_steps(self, experts: RankExperts, layers: list[OffloadingLayer]) -> StepDriver:
        """The driver of this kind of worker's steps; may give layers another way to run."""
        return StepDriver(experts)

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step of real requests; all others (profiling, warm-up, capture) touch no statistics."""
        assert self.steps is not None
        with self.steps.counted(scheduler_output.total_num_scheduled_tokens):
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self.counter_file is not None and self.steps.counts:
            self.counter_file.publish(self.steps.manager.counters)
        return output

    def moe_offload_stats(self) -> dict[str, Any]:
        """Counters of this rank, in all and a layer; for ``LLM.collective_rpc("moe_offload_stats")``."""
        assert self.steps is not None
        self.steps.settle()
        counters = self.steps.manager.counters
        return {"total": counters.total().to_dict(), "layers": [layer.to_dict() for layer in counters.layers()]}

    def sleep(self, level: int = 1) -> None:
        """Level 1 leaves the experts where they are, in host memory.

        Raises:
            ConfigError: level 2 would drop and reload weights.
        """
        if level != 1:
            raise ConfigError("--moe-offload does not support sleep level 2, which reloads weights; use level 1")
        assert self.steps is not None
        self.steps.settle()
        super().sleep(level)  # type: ignore[misc]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ConfigError: always.
        """
        raise ConfigError("--moe-offload does not support reloading weights; start the engine anew")

    def shutdown(self) -> None:
        """Ends the threads and frees host memory after vLLM has let go of the device."""
        if self.counter_file is not None:
            self.counter_file.close()
        if self.steps is not None:
            self.steps.close()
        super().shutdown()  # type: ignore[misc]
        if self.experts is not None:
            self.experts.close()

    def _share(self) -> Share:
        parallel = self.vllm_config.parallel_config
        count = max(1, parallel.local_world_size)
        index = self.local_rank % count
        if self.device.type != "cuda":
            return Share(index, count, beside_gpu=False)
        nodes = tuple(gpu_node(address) for address in _pci_addresses(count))
        return Share(index, count, beside_gpu=True, nodes=nodes)


def _pci_addresses(count: int) -> list[str]:
    """Of the first ``count`` visible GPUs."""
    found = []
    for index in range(min(count, torch.cuda.device_count())):
        properties = torch.cuda.get_device_properties(index)
        domain, bus, device = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
        found.append(f"{domain:04x}:{bus:02x}:{device:02x}.0")
    return found


def _allocated(device: torch.device) -> int:
    """Bytes of GPU memory that torch has given out."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
