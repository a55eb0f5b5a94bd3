"""A model for as long as a command runs, and silence where it is wanted."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from greenroom.config import OffloadConfig


@contextmanager
def open_model(
    name: str, config: OffloadConfig, *, quiet: bool, tokens: int, dtype: str = "auto"
) -> Iterator[tuple[Any, Any]]:
    """Loads a model and its tokenizer, and closes the model when the block ends, however it ends.

    Progress goes to stderr; ``quiet`` drops it. Memory is kept for a sequence of at least ``tokens``.

    Raises:
        GreenroomError: the model cannot be loaded.
    """
    import greenroom
    from greenroom.engine.demand import Demand

    model, tokenizer = greenroom.load(name, config=config, progress=not quiet, demand=Demand(tokens), dtype=dtype)
    try:
        yield model, tokenizer
    finally:
        greenroom.close(model)


@contextmanager
def silence(active: bool) -> Iterator[None]:
    """While ``active``, libraries' warnings and progress bars go nowhere."""
    if not active:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_json_object(active: bool) -> Iterator[None]:
    """While ``active``, libraries are silent, and what they print all the same goes to stderr."""
    if not active:
        yield
        return
    with silence(True), redirect_stdout(sys.stderr):
        yield
