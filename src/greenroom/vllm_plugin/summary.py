"""The line of vLLM's log that says what a rank offloads, and how."""

from collections.abc import Iterable

from greenroom.experts.sizing import GIB
from greenroom.vllm_plugin.rank import RankExperts


def describe_rank(experts: RankExperts, way: str, decides: bool) -> str:
    """
    Args:
        experts: finished.
        way: how its layers run.
        decides: whether steps choose what keeps a slot and what the CPU computes.
    """
    assert experts.manager is not None
    assert experts.engine is not None
    store, share = experts.manager.store, experts.share
    slots = experts.plan.slots
    who = f"Expert offloading, rank {share.index + 1} of {share.count}" if share.count > 1 else "Expert offloading"
    where = "page-locked" if store.locked else "not page-locked"
    threads = experts.engine.threads
    cores = "not pinned" if experts.cores is None else f"on cores {_ranges(experts.cores)}"
    if experts.device.type == "cuda":
        device = f"{experts.device_bytes / GIB:.2f} GiB of GPU memory for slots and buffers"
    else:
        device = f"{sum(experts.plan.slot_bytes) / GIB:.2f} GiB of host memory for slots"
    parts = [
        f"{len(store)} layers of {_span(store.num_experts)} experts, {_span(slots)} slots a layer",
        f"{store.nbytes / GIB:.2f} GiB of experts in host memory, {where}, and {device}",
        f"{threads} CPU thread{'s' if threads > 1 else ''} {cores}, {experts.engine.isa.label}",
        _policy(experts) if decides else "",
        f"model loaded in {experts.load_seconds:.1f} s",
        way,
    ]
    return f"{who}: " + "; ".join(filter(None, parts))


def _policy(experts: RankExperts) -> str:
    options, plan = experts.options, experts.plan
    if all(slots in (0, count) for slots, count in zip(plan.slots, plan.num_experts, strict=True)):
        slots = "without slots" if not any(plan.slots) else "with slots for all experts"
        return f"{slots}, policy, cache_topk and update_expert_num have no effect"
    topk = f"all {experts.top_k}" if options.cache_topk is None else options.cache_topk
    return f"policy {options.policy}, cache_topk {topk}, update_expert_num {options.update_expert_num}"


def _span(counts: Iterable[int]) -> str:
    """``"128"``, or ``"64 to 128"`` where layers differ."""
    least, most = min(counts := list(counts)), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def _ranges(cores: list[int]) -> str:
    """[0, 1, 2, 8] as ``"0-2,8"``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
