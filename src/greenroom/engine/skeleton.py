"""Building a transformers model without its routed experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from greenroom.engine.attach import replace_experts
from greenroom.engine.expert_keys import expert_key_patterns
from greenroom.engine.inspect import inspect_model
from greenroom.engine.spec import ModelSpec
from greenroom.errors import CheckpointError, ConfigError, UnsupportedModelError

_METHOD = "greenroom"

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        UnsupportedModelError: transformers does not know the model, or its weights are quantised.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"'{folder}' has no config.json; give a Hugging Face model id or a model's folder")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of any type: each family reads its fields in its own way
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read '{folder}': {_first_sentence(error)}"
        ) from error
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation.quant_method
        raise UnsupportedModelError(
            f"'{folder}' is quantised with '{method}'; experts in BF16, FP16 and FP32 are supported so far"
        )
    return config


def resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig) -> torch.dtype:
    """The dtype to load in; "auto" is what the configuration says.

    Raises:
        ConfigError: no such dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        return stored if isinstance(stored, torch.dtype) else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def describe(config: PretrainedConfig, dtype: torch.dtype) -> ModelSpec:
    """What the model will hold, from its configuration alone; no weight is allocated."""
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:  # of any type: each family builds itself in its own way
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} makes no text model of this '{config.model_type}' "
                f"configuration: {_first_sentence(error)}"
            ) from error
        return inspect_model(model)


def load_without_experts(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all weights but the routed experts', in host memory.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    try:
        with _without_load_report():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                quantization_config=_SkipExpertsConfig(),
                # Not every version of transformers checks; _SkipExperts does.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot load the weights in '{folder}': {error}") from error
    for name, found, expected in info.get("mismatched_keys", ()):
        raise CheckpointError(_wrong_shape(name, found, expected))
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(f"'{folder}' lacks {len(names)} of the model's tensors, the first is '{names[0]}'")
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keeps transformers from logging what becomes an error of ours, or is meant to be so."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _first_sentence(error: Exception) -> str:
    """Of a message that may have paragraphs; the type's name says what a bare value, as of a KeyError, does not."""
    said = " ".join(str(error).strip().split("\n\n")[0].split()) or "no reason given"
    return said if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {said}"


def _wrong_shape(name: str, found: torch.Size, expected: torch.Size) -> str:
    return f"tensor '{name}' has shape {list(found)} in the checkpoint, the model needs {list(expected)}"


@register_quantization_config(_METHOD)
class _SkipExpertsConfig(QuantizationConfigMixin):
    """Asks ``from_pretrained`` for ``_SkipExperts``. Nothing is quantised."""

    def __init__(self, **unused: Any) -> None:
        self.quant_method = _METHOD


@register_quantizer(_METHOD)
class _SkipExperts(HfQuantizer):
    """The hook that transformers gives to change a model while it is still on the meta device."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self, **unused: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **unused: Any) -> PreTrainedModel:
        spec = inspect_model(model)
        self._shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
        replace_experts(model, spec.layers)
        model._keys_to_ignore_on_load_unexpected.update(expert_key_patterns(spec))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **unused: Any) -> PreTrainedModel:
        for name, tensor in model.named_parameters():
            if tensor.shape != self._shapes[name]:
                raise CheckpointError(_wrong_shape(name, tensor.shape, self._shapes[name]))
        self.remove_quantization_config(model)
        model.config._is_quantized = False
        return model
