"""What goes where, whether it fits, and how fast it will be: from a model's configuration alone. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

from greenroom.config import OffloadConfig
from greenroom.engine.demand import Demand, WorkingMemory, working_memory
from greenroom.engine.model_shape import ModelShape
from greenroom.engine.speed import Crossing, Rates, assumed_hit_rate, pass_time
from greenroom.errors import ConfigError
from greenroom.experts.sizing import MemoryPlan, explain_misfit, lay_out
from greenroom.weights.config import WeightOffloadConfig
from greenroom.weights.select import Selection, select


@dataclass(frozen=True)
class Machine:
    """device_bytes: of GPU memory that may be used; None without a GPU. host_bytes: of host memory."""

    device_bytes: int | None
    host_bytes: int


@dataclass(frozen=True)
class ModelPlan:
    """
    Attributes:
        problem: None if it fits, otherwise what is too much and what to change.
        memory: weights, expert cache and miss buffers.
        working: KV cache and the like.
        selection: weights other than experts that stay in host memory.
        hit_rate: of decode with one sequence, assumed or given.
        decode_one, decode_all, prefill: tokens a second of one sequence, of all together, and of a prompt.
    """

    shape: ModelShape
    machine: Machine
    demand: Demand
    rates: Rates
    prompt_tokens: int
    problem: str | None
    memory: MemoryPlan
    working: WorkingMemory
    selection: Selection
    hit_rate: float
    hit_rate_from: str
    decode_one: float
    decode_all: float
    prefill: float

    @property
    def device_parts(self) -> dict[str, int]:
        """Bytes on the GPU, by what they are for; empty without one."""
        if self.machine.device_bytes is None:
            return {}
        return {
            "weights": self.memory.other_bytes - self.selection.device_bytes,
            "weight_buffers": self.selection.device_bytes,
            "expert_cache": self.memory.cache_bytes,
            "miss_buffers": self.memory.buffer_bytes,
            **_working_parts(self.working),
        }

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes in host memory, by what they are for."""
        store = sum(layer.num_experts * layer.format.block_bytes for layer in self.shape.spec.layers)
        parts = {"experts": store, "offloaded_weights": self.selection.host_bytes}
        if self.demand.kv_offload_bytes:
            parts["kv_offload"] = self.demand.kv_offload_bytes
        if self.machine.device_bytes is None:
            parts |= {"weights": self.memory.other_bytes, "expert_cache": self.memory.cache_bytes}
            parts |= _working_parts(self.working)
        return parts

    def to_dict(self) -> dict[str, Any]:
        """The object of ``greenroom plan --json``; docs/plan.md lists its fields."""
        layers = self.shape.spec.layers
        device, host = self.device_parts, self.host_parts
        return {
            "fits": self.problem is None,
            "problem": self.problem,
            "device": "cpu" if self.machine.device_bytes is None else "cuda",
            "cache_expert_num": max(self.memory.num_slots),
            "device_bytes": device | {"total": sum(device.values()), "available": self.machine.device_bytes or 0},
            "host_bytes": host | {"total": sum(host.values()), "available": self.machine.host_bytes},
            "kv_bytes_per_sequence": self.shape.kv_bytes(self.demand.context),
            "context": self.demand.context,
            "concurrency": self.demand.concurrency,
            "expert_layers": len(layers),
            "experts": max(layer.num_experts for layer in layers),
            "top_k": max(self.shape.top_k),
            "expert_bytes": max(layer.format.block_bytes for layer in layers),
            "weights_offload": str(self.selection),
            "hit_rate": self.hit_rate,
            "hit_rate_from": self.hit_rate_from,
            "rates": asdict(self.rates),
            "decode_tok_s": self.decode_one,
            "decode_all_tok_s": self.decode_all,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tok_s": self.prefill,
        }


def plan_model(
    shape: ModelShape,
    config: OffloadConfig,
    weights: WeightOffloadConfig,
    demand: Demand,
    machine: Machine,
    rates: Rates,
    *,
    prompt_tokens: int = 512,
    hit_rate: float | None = None,
) -> ModelPlan:
    """
    Args:
        prompt_tokens: for which prefill is predicted.
        hit_rate: of decode with one sequence; None assumes one from the share of experts that is cached.

    Raises:
        ConfigError: numbers out of range, or weights that cannot be offloaded so.
        MemoryLimitError: ``config.vram`` does not hold the miss buffers.
    """
    if hit_rate is not None and not 0 <= hit_rate <= 1:
        raise ConfigError(f"the hit rate is a share from 0 to 1, not {hit_rate}")
    if prompt_tokens < 1:
        raise ConfigError(f"prompt_tokens must be at least 1, not {prompt_tokens}")
    on_gpu = machine.device_bytes is not None
    if on_gpu != (rates.pcie_gb_s is not None):
        raise ConfigError("a plan with a GPU needs the bandwidth of PCIe, and one without a GPU has none")
    layers = shape.spec.layers
    selection = select(shape.spec.weights, shape.spec.decoder, weights)
    working = working_memory(shape, demand, on_gpu, config)
    memory = lay_out(
        config,
        [layer.format for layer in layers],
        [layer.num_experts for layer in layers],
        shape.spec.other_bytes - selection.weight_bytes + selection.device_bytes,
        machine.device_bytes,
        selection.host_bytes,
        working.total,
        demand.kv_offload_bytes,
    )
    problem = explain_misfit(memory, machine.device_bytes, machine.host_bytes)
    slots = memory.num_slots
    share = sum(slots) / sum(layer.num_experts for layer in layers) if on_gpu else 0.0
    assumed = assumed_hit_rate(share) if hit_rate is None else hit_rate

    def speed(tokens: int, sequences: int) -> float:
        return tokens / pass_time(shape, slots, rates, tokens, sequences, hit_rate, Crossing.of(selection)).total

    return ModelPlan(
        shape=shape,
        machine=machine,
        demand=demand,
        rates=rates,
        prompt_tokens=prompt_tokens,
        problem=problem,
        memory=memory,
        working=working,
        selection=selection,
        hit_rate=assumed if on_gpu else 0.0,
        hit_rate_from="given" if hit_rate is not None else f"assumed for {share:.0%} of the experts cached",
        decode_one=speed(1, 1),
        decode_all=speed(demand.concurrency, demand.concurrency),
        prefill=speed(prompt_tokens, 1),
    )


def _working_parts(working: WorkingMemory) -> dict[str, int]:
    return {
        "kv_cache": working.kv_bytes,
        "decode_buffers": working.decode_bytes,
        "activations": working.activation_bytes,
        "libraries": working.fixed_bytes,
    }
