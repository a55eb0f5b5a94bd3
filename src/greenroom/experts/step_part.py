"""StepPart: the rows of decode steps that go through one path, as the host sees them."""

import numpy as np

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.landing import Offers
from greenroom.experts.mailbox import LANDED_WORD
from greenroom.experts.residency import ABSENT


class StepPart:
    """A path with its mailboxes. Parts of one step may be under way at once; each has memory of its own.

    Attributes:
        rows: of the last step that are no padding.
        ids: int32 [layers, most rows, K]. weights: float32 [layers, most rows, K]. lanes: int32 [layers, 5], see
            ``Mailboxes.request``. landed: int32 [layers, places], the same. busy_ns: int64 [layers]. spans: int64
            [layers, 8]. All views of what the device and the CPU engine write.
    """

    def __init__(self, path: DecodePath) -> None:
        self.path = path
        self.rows = 0
        # Made once: a view costs more than the copy of what it shows, and the device idles meanwhile.
        boxes = path.mailboxes
        self.ids = boxes.ids.numpy()
        self.weights = boxes.weights.numpy()
        self.lanes = boxes.request.numpy()[:, 1:6]
        self.landed = boxes.request.numpy()[:, LANDED_WORD : LANDED_WORD + path.places]
        self.busy_ns = boxes.busy_ns.numpy()[:, 0]
        self.spans = path.lane_spans.numpy()

    def begin(self, rows: int, stream_parts: np.ndarray, offers: Offers | None = None) -> None:
        """See ``DecodePath.begin_step``; from here on the CPU engine looks for requests, if any can come."""
        self.rows = rows
        # Also of layers that the step leaves out.
        self.landed[:] = ABSENT
        self.path.begin_step(rows, stream_parts, offers)
        if self.path.may_miss:
            self.path.mailboxes.arm()

    def failure(self) -> EngineError | None:
        """The first one since the last call, and no longer."""
        try:
            self.path.mailboxes.raise_failure()
        except EngineError as error:
            return error
        return None


def busy_s(begin_ns: np.ndarray, end_ns: np.ndarray) -> float:
    """Seconds in which at least one of some intervals was open.

    Args:
        begin_ns, end_ns: int64 [n].
    """
    if len(begin_ns) == 0:
        return 0.0
    order = np.argsort(begin_ns)
    begin, end = begin_ns[order], end_ns[order]
    covered = np.concatenate([begin[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(begin, covered), 0).sum()) / 1e9
