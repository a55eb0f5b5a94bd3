"""Errors that a user can act on: one sentence each, saying what is wrong and what to change."""


class GreenroomError(Exception):
    """Base of every error that greenroom raises on purpose. The CLI prints it and exits with 2."""


class ConfigError(GreenroomError):
    """A knob, or a combination of knobs, that cannot be honoured."""


class UnsupportedModelError(GreenroomError):
    """A model, activation or checkpoint format that greenroom does not run."""


class CheckpointError(GreenroomError):
    """A checkpoint that is missing, truncated, corrupt or of the wrong shape."""


class MemoryLimitError(GreenroomError):
    """Host or device memory that does not suffice, or that cannot be page-locked."""


class EngineError(GreenroomError):
    """A failure inside the native CPU engine."""


class QueueFullError(GreenroomError):
    """More requests wait than the engine may hold; later there may be room."""
