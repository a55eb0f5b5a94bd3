"""load: from a model id or a folder to a model whose experts wait in host memory."""

import logging
import re
import time
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from greenroom.config import OffloadConfig
from greenroom.engine.checkpoint import Checkpoint
from greenroom.engine.demand import Demand, working_memory
from greenroom.engine.expert_keys import place_experts
from greenroom.engine.expert_reader import read_experts
from greenroom.engine.model_shape import probe_shape
from greenroom.engine.offload import offload_experts
from greenroom.engine.progress import Progress, loading_bar
from greenroom.engine.request import Request
from greenroom.engine.skeleton import describe, load_without_experts, read_config, resolve_dtype
from greenroom.errors import CheckpointError, ConfigError, UnsupportedModelError
from greenroom.experts.store import HostStore

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_CONFIGURATION = ("config.json",)


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    progress: bool | Progress = True,
    config: OffloadConfig | None = None,
    demand: Demand | None = None,
    **knobs: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a Mixture-of-Experts model with its routed experts in host memory.

    The model is an ordinary transformers model: ``generate`` and everything else works.

    Args:
        model: a Hugging Face id, or a folder with config.json and safetensors.
        dtype: of all weights; "auto" is the checkpoint's.
        progress: a bar on the terminal, none, or a function of (done, total) bytes.
        config: the knobs, or give them one by one as ``knobs``.
        demand: what will run at once, of which no sequence is longer than the model's context. Memory for it is then
            kept, and loading refused if there is none.

    Raises:
        GreenroomError: a subclass that says what is wrong; nothing stays allocated.
    """
    started = time.perf_counter()
    request = Request.check(_make_config(config, knobs))
    folder = find_model(model)
    hf_config = read_config(folder)
    torch_dtype = resolve_dtype(dtype, hf_config)
    spec = describe(hf_config, torch_dtype)
    kv_offload_bytes = 0 if demand is None else demand.kv_offload_bytes
    plan = request.plan(spec, _reserved_bytes(hf_config, torch_dtype, demand, request), kv_offload_bytes)
    with Checkpoint.open(folder) as checkpoint:
        placements = place_experts(checkpoint.tensors, spec)
        tokenizer = _load_tokenizer(folder)
        network = load_without_experts(folder, torch_dtype)

        def fill(store: HostStore) -> None:
            with loading_bar(progress) as report:
                read_experts(checkpoint, placements, spec, store, report)

        weights = request.take_weights(network, spec)
        try:
            network.to(request.device)
            offload_experts(network, request, spec, plan, fill, started, weights)
        except BaseException:
            weights.close()
            raise
    return network, tokenizer


def find_model(model: str | Path, *, weights: bool = True) -> Path:
    """The model's folder, downloaded first if ``model`` is a Hugging Face id; without ``weights`` only config.json.

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
    try:
        return Path(snapshot_download(str(model), allow_patterns=list(_DOWNLOADED if weights else _CONFIGURATION)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"'{model}' is no folder here and cannot be downloaded as a model id: {reason}"
        ) from error


def _reserved_bytes(hf_config: PretrainedConfig, dtype: torch.dtype, demand: Demand | None, request: Request) -> int:
    if demand is None:
        return 0
    try:
        shape = probe_shape(hf_config, dtype)
    except UnsupportedModelError as error:
        logger.warning("no memory is kept for KV cache and activations: %s", error)
        return 0
    demand = replace(demand, context=min(demand.context, shape.max_context or demand.context))
    return working_memory(shape, demand, request.device.type == "cuda", request.config).total


def _make_config(config: OffloadConfig | None, knobs: dict[str, object]) -> OffloadConfig:
    if config is not None and knobs:
        raise ConfigError(f"give config or {', '.join(sorted(knobs))}, not both")
    unknown = sorted(set(knobs) - set(OffloadConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(OffloadConfig.__dataclass_fields__)
        raise ConfigError(f"unknown option '{unknown[0]}'; choose among {known}")
    return config or OffloadConfig(**knobs)  # type: ignore[arg-type]


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    # Without any of these files transformers makes up an empty tokenizer for some families.
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(f"'{folder}' has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"'{folder}' has no tokenizer that transformers can read: {error}") from error
    return tokenizer
