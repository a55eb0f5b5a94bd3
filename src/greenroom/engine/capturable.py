"""Which forward passes can be CUDA graphs, whatever runs them."""

from transformers import PreTrainedModel

from greenroom.engine.offload import Offload


def why_not_readable(offload: Offload) -> str | None:
    """Of a model on a GPU: None if the GPU can read experts by itself, otherwise why not."""
    if offload.manager.store.locked:
        return None
    return "the GPU cannot read experts in memory that is not page-locked (pin_memory is off)"


def why_host_needed(model: PreTrainedModel) -> str | None:
    """None if the host has nothing to compute between layers, whatever attention does, otherwise why it has."""
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    if moving := sorted(kind for kind in kinds if "dynamic" in kind or "longrope" in kind):
        return f"the host recomputes rotary frequencies ({moving[0]}) between steps"
    if not getattr(model, "_can_compile_fullgraph", True):
        return f"the forward pass of {type(model).__name__} needs the host"
    return None
