"""Loading small models in tests: saved to disk by stock transformers, loaded by greenroom."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import greenroom
from tests.reference.families import VOCAB, make_model
from tests.reference.tokenizer import make_tokenizer

DEVICES = ["cpu", "cuda"]


def save_family(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> PreTrainedModel:
    """Writes a tiny random model of ``family`` with a tokenizer to ``folder`` and returns the stock one.

    changes: of its configuration.
    """
    model = make_model(family, dtype, **changes)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


@contextmanager
def offloaded(folder: Path, **knobs: Any) -> Iterator[PreTrainedModel]:
    """The model in ``folder``, loaded by greenroom and closed behind the block."""
    model, _ = greenroom.load(folder, progress=False, **knobs)
    try:
        yield model
    finally:
        greenroom.close(model)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """int64 [batch, length], without the ids of special tokens."""
    return torch.randint(4, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths as a tokenizer pads them."""
    ids, mask = random_ids(batch, length), torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch):
        padding = row % (length - 1)
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def saved_family(
    family: str, dtype: torch.dtype = torch.float32, **changes: int
) -> Iterator[tuple[PreTrainedModel, Path]]:
    """A stock model and the folder that it was saved to."""
    with tempfile.TemporaryDirectory() as folder:
        yield save_family(family, Path(folder), dtype, **changes), Path(folder)


class Streamer:
    """Keeps what ``generate`` streams."""

    def __init__(self) -> None:
        self.put_values: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.put_values.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ends += 1
