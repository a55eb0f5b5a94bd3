"""A model for as long as a command runs."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from greenroom.config import OffloadConfig


@contextmanager
def open_model(name: str, config: OffloadConfig, *, quiet: bool) -> Iterator[tuple[Any, Any]]:
    """Loads a model and its tokenizer, and closes the model when the block ends, however it ends.

    Progress goes to stderr; ``quiet`` drops it.

    Raises:
        GreenroomError: the model cannot be loaded.
    """
    import greenroom

    model, tokenizer = greenroom.load(name, config=config, progress=not quiet)
    try:
        yield model, tokenizer
    finally:
        greenroom.close(model)


@contextmanager
def clean_stdout(active: bool) -> Iterator[None]:
    """While ``active``, what libraries print goes to stderr, and their warnings go nowhere."""
    if not active:
        yield
        return
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
