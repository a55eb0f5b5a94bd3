"""Routing profiles: how often each expert was chosen, for the static policy of a later run."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from greenroom.engine.offload import offload_of
from greenroom.errors import ConfigError


def profile(model: PreTrainedModel) -> np.ndarray:
    """float64 [layers, experts]: of each pass since ``model`` was loaded the share of its tokens that chose an expert,
    added up. A prompt so weighs as much as a decoded token. Only a token's ``cache_topk`` heaviest choices count."""
    return offload_of(model).manager.admission.usage.total.copy()


def check_profile_path(path: str | Path) -> None:
    """Before the work whose profile is to be saved.

    Raises:
        ConfigError: ``path`` cannot be a file.
    """
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"the profile cannot be saved as '{path}'; give a file in a folder that exists")


def save_profile(model: PreTrainedModel, path: str | Path) -> None:
    """Writes ``profile(model)`` as a .npy file, under the very name that is given.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with Path(path).open("wb") as file:
            np.save(file, profile(model))
    except OSError as error:
        raise ConfigError(f"cannot save the profile '{path}': {error}") from error
