"""load: from a model id or a folder to a model whose experts wait in host memory."""

import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from greenroom import hardware
from greenroom.config import OffloadConfig
from greenroom.engine.attach import attach_manager, detach
from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.expert_keys import ExpertPlacements, place_experts
from greenroom.engine.expert_reader import read_experts
from greenroom.engine.progress import Progress, loading_bar
from greenroom.engine.skeleton import describe, load_without_experts, read_config, resolve_dtype
from greenroom.engine.spec import ModelSpec
from greenroom.errors import CheckpointError, ConfigError
from greenroom.experts.counters import OffloadStats
from greenroom.experts.cpu import CpuExperts, Isa
from greenroom.experts.cuda_tier import CudaTier
from greenroom.experts.host_tier import HostTier
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import Policy, make_policy
from greenroom.experts.sizing import MemoryPlan, plan_memory
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_greenroom"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


@dataclass(frozen=True)
class Offload:
    """What ``load`` built behind a model."""

    spec: ModelSpec
    config: OffloadConfig
    plan: MemoryPlan
    engine: CpuExperts
    manager: OffloadManager
    device: torch.device
    load_seconds: float

    def stats(self) -> OffloadStats:
        """What is active and what it has done."""
        return OffloadStats(
            policy=self.config.policy,
            device=str(self.device),
            isa=self.engine.isa.label,
            threads=self.engine.threads,
            cache_expert_num=max(self.plan.num_slots),
            host_bytes=self.manager.store.nbytes,
            device_bytes=self.manager.tier.device_bytes,
            page_locked=self.manager.store.locked,
            load_seconds=self.load_seconds,
            layers=self.manager.counters.layers(),
            total=self.manager.counters.total(),
        )

    def close(self) -> None:
        """Frees memory, then ends the threads. Idempotent."""
        self.manager.close()
        self.engine.close()


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    progress: bool | Progress = True,
    config: OffloadConfig | None = None,
    **knobs: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a Mixture-of-Experts model with its routed experts in host memory.

    The model is an ordinary transformers model: ``generate`` and everything else works.

    Args:
        model: a Hugging Face id, or a folder with config.json and safetensors.
        dtype: of all weights; "auto" is the checkpoint's.
        progress: a bar on the terminal, none, or a function of (done, total) bytes.
        config: the knobs, or give them one by one as ``knobs``.

    Raises:
        GreenroomError: a subclass that says what is wrong; nothing stays allocated.
    """
    started = time.perf_counter()
    config = _make_config(config, knobs)
    policy = make_policy(config.policy, config.profile)
    isa = Isa.parse(config.isa)
    device = choose_device(config.device)
    folder = find_model(model)
    hf_config = read_config(folder)
    torch_dtype = resolve_dtype(dtype, hf_config)
    spec = describe(hf_config, torch_dtype)
    plan = _plan(config, spec, device)
    with Checkpoint.open(folder) as checkpoint:
        placements = place_experts(checkpoint.tensors, spec)
        tokenizer = _load_tokenizer(folder)
        network = load_without_experts(folder, torch_dtype).to(device)
        engine = _start_engine(config, isa, device)
        try:
            store = _fill_store(config, spec, checkpoint, placements, device, progress)
            manager = _make_manager(config, policy, plan, store, engine, device)
        except BaseException:
            engine.close()
            raise
    attach_manager(network, spec.layers, manager)
    network.eval()
    offload = Offload(spec, config, plan, engine, manager, device, time.perf_counter() - started)
    setattr(network, _ATTRIBUTE, offload)
    _compare_with_plan(offload)
    return network, tokenizer


def stats(model: PreTrainedModel) -> OffloadStats:
    """Counters and settings of a model that ``load`` returned."""
    return offload_of(model).stats()


def reset_stats(model: PreTrainedModel) -> None:
    """Sets every counter to 0; what is cached stays."""
    offload_of(model).manager.counters.reset()


def close(model: PreTrainedModel) -> None:
    """Ends the threads and frees the memory behind a model, which cannot run afterwards. Idempotent."""
    offload = offload_of(model)
    detach(model, offload.spec.layers)
    offload.close()


def offload_of(model: PreTrainedModel) -> Offload:
    """What ``load`` built behind ``model``.

    Raises:
        ConfigError: the model did not come from ``load``.
    """
    offload = getattr(model, _ATTRIBUTE, None)
    if not isinstance(offload, Offload):
        raise ConfigError(f"this {type(model).__name__} was not loaded by greenroom.load")
    return offload


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


def find_model(model: str | Path) -> Path:
    """The model's folder, downloaded first if ``model`` is a Hugging Face id.

    Raises:
        CheckpointError: neither a folder nor an id that can be downloaded.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"'{model}' is a file; give the folder that holds config.json and safetensors")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(model)) or str(model).startswith("."):
        raise CheckpointError(f"there is no folder '{model}'")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"'{model}' is no folder here and cannot be downloaded as a model id: {reason}"
        ) from error


def _make_config(config: OffloadConfig | None, knobs: dict[str, object]) -> OffloadConfig:
    if config is not None and knobs:
        raise ConfigError(f"give config or {', '.join(sorted(knobs))}, not both")
    unknown = sorted(set(knobs) - set(OffloadConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(OffloadConfig.__dataclass_fields__)
        raise ConfigError(f"unknown option '{unknown[0]}'; choose among {known}")
    return config or OffloadConfig(**knobs)  # type: ignore[arg-type]


def _plan(config: OffloadConfig, spec: ModelSpec, device: torch.device) -> MemoryPlan:
    return plan_memory(
        config,
        [layer.format for layer in spec.layers],
        [layer.num_experts for layer in spec.layers],
        spec.other_bytes,
        device_free=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        host_free=hardware.available_host_bytes(),
    )


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    # Without any of these files transformers makes up an empty tokenizer for some families.
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(f"'{folder}' has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"'{folder}' has no tokenizer that transformers can read: {error}") from error
    return tokenizer


def _start_engine(config: OffloadConfig, isa: Isa, device: torch.device) -> CpuExperts:
    threads, cores = hardware.engine_cores(config.context_num_threads, beside_gpu=device.type == "cuda")
    return CpuExperts(threads, cores, isa)


def _fill_store(
    config: OffloadConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    placements: ExpertPlacements,
    device: torch.device,
    progress: bool | Progress,
) -> HostStore:
    lock = device.type == "cuda" and config.pin_memory
    store = HostStore(
        [layer.format for layer in spec.layers],
        [layer.num_experts for layer in spec.layers],
        lock_pages=hardware.lock_pages if lock else None,
        unlock_pages=hardware.unlock_pages if lock else None,
    )
    try:
        with loading_bar(progress) as report:
            read_experts(checkpoint, placements, spec, store, report)
    except BaseException:
        store.close()
        raise
    return store


def _make_manager(
    config: OffloadConfig,
    policy: Policy,
    plan: MemoryPlan,
    store: HostStore,
    engine: CpuExperts,
    device: torch.device,
) -> OffloadManager:
    slots = list(plan.num_slots)
    tier: DeviceTier
    try:
        if device.type == "cuda":
            tier = CudaTier(store, slots, engine, config.miss_expert_num, device)
        else:
            tier = HostTier(store, slots, engine, config.miss_expert_num)
        return OffloadManager(store, tier, slots, policy, config.cache_topk, config.update_expert_num)
    except BaseException:
        store.close()
        raise


def _compare_with_plan(offload: Offload) -> None:
    """Says so where memory differs from what was computed before loading."""
    if offload.device.type != "cuda":
        return
    used, planned = torch.cuda.memory_allocated(offload.device), offload.plan.device_bytes
    if abs(used - planned) > 0.05 * planned:
        logger.warning("the model holds %.2f GiB of device memory, %.2f were planned", used / 2**30, planned / 2**30)
