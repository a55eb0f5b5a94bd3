"""Which of vLLM's other options expert offloading goes together with; what does not is refused, never dropped."""

from collections.abc import Iterable
from typing import Any

from greenroom.errors import ConfigError

GPU_WORKER = "greenroom.vllm_plugin.gpu_worker.OffloadGPUWorker"
CPU_WORKER = "greenroom.vllm_plugin.cpu_worker.OffloadCPUWorker"

MAX_GRAPH_TOKENS = 32
"""Tokens of a step that runs without the host; so many a CUDA graph may hold."""

_EXPERT_NAMES = frozenset("experts routed_experts w13_weight w2_weight w13_bias w2_bias".split())
_DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})


def check_arguments(args: Any) -> None:
    """Refuses options that contradict offloading. ``args``: an ``EngineArgs``.

    Raises:
        ConfigError: says which, and what to change.
    """
    if args.cpu_offload_gb > 0 and _touches_experts(args.cpu_offload_params):
        raise ConfigError(
            "--cpu-offload-gb would offload experts that --moe-offload keeps in host memory; remove it, or name "
            "other weights with --cpu-offload-params (such as self_attn)"
        )
    if args.offload_group_size > 0 and _touches_experts(args.offload_params):
        raise ConfigError(
            "--offload-group-size would prefetch experts that --moe-offload keeps in host memory; remove it, or "
            "name other weights with --offload-params (such as self_attn)"
        )
    if args.enable_eplb:
        raise ConfigError("--enable-eplb moves experts between GPUs, which --moe-offload does not support; remove one")
    if args.enable_elastic_ep:
        raise ConfigError("--enable-elastic-ep reloads experts, which --moe-offload does not support; remove one")
    if args.enable_dbo or args.ubatch_size > 1:
        raise ConfigError("--enable-dbo and --ubatch-size run two batches at once, which --moe-offload cannot")
    if args.enable_lora:
        raise ConfigError("--enable-lora replaces how experts run, which --moe-offload does not support; remove one")


def check_config(config: Any) -> None:
    """Refuses what only the finished ``VllmConfig`` shows.

    Raises:
        ConfigError: says what, and what to change.
    """
    model = config.model_config
    if not model.is_moe:
        raise ConfigError(f"--moe-offload is for models with routed experts, and {model.model} has none; remove it")
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTLESS:
        raise ConfigError(
            f"--moe-offload does not support speculative decoding by '{speculative.method}' yet; remove the "
            f"speculative configuration, or use one of {', '.join(sorted(_DRAFTLESS))}"
        )
    if config.compilation_config.mode is not None and config.compilation_config.mode.name == "STOCK_TORCH_COMPILE":
        raise ConfigError("--moe-offload does not support compilation mode 1 (stock torch.compile); use 0 or 3")
    parallel = config.parallel_config
    for name, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("data", parallel.data_parallel_size),
        ("prefill context", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(
                f"--moe-offload does not support {name} parallelism yet; use tensor parallelism, with "
                "--enable-expert-parallel if experts are not to be cut up"
            )
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    if config.compilation_config.cudagraph_mode is not None and sizes and max(sizes) > MAX_GRAPH_TOKENS:
        raise ConfigError(
            f"--moe-offload captures CUDA graphs of up to {MAX_GRAPH_TOKENS} tokens, and {max(sizes)} were asked for; "
            f"give cudagraph_capture_sizes up to {MAX_GRAPH_TOKENS}"
        )


def choose_worker(worker_cls: str) -> str:
    """The worker class that the engine is to use.

    Raises:
        ConfigError: another one was asked for, or the platform has none of ours.
    """
    from vllm.platforms import current_platform

    if worker_cls not in ("auto", GPU_WORKER, CPU_WORKER):
        raise ConfigError(f"--moe-offload has its own worker class and cannot use '{worker_cls}'; remove --worker-cls")
    if current_platform.is_cpu():
        return CPU_WORKER
    if current_platform.is_cuda():
        return GPU_WORKER
    raise ConfigError(f"--moe-offload runs on NVIDIA GPUs and on CPUs, not on '{current_platform.device_name}'")


def limit_graphs(args: Any) -> None:
    """Has vLLM capture graphs of as many tokens as a step without the host may have, unless sizes are given."""
    compilation = args.compilation_config
    given = (
        args.cudagraph_capture_sizes,
        args.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    if all(value is None for value in given):
        args.max_cudagraph_capture_size = MAX_GRAPH_TOKENS


def _touches_experts(names: Iterable[str]) -> bool:
    """Whether weights chosen by ``names`` (none: all) are plainly experts. Others are noticed while loading."""
    chosen = list(names)
    return not chosen or any(not _EXPERT_NAMES.isdisjoint(name.split(".")) for name in chosen)
