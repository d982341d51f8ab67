"""Which row of which cell every sequence of a run is: weights, the segments of a run, and the schedule over them.

weights    what `mixture.weights` says, as one number for every cell and phase
segments   phases and stages of a run as segments: weights, and the sequence from which they hold
blocks     how many slots of a block are of which cell; the tail of cells that get less than one
schedule   sequence n -> cell and row, a pure function of (seed, n); the limit on epochs
table      what a mixture comes to, for people and for --json
"""

from equimoe.data.mixture.schedule import MixtureSchedule, check_epochs, share_of_rows
from equimoe.data.mixture.segments import Segment, run_segments, segments_of
from equimoe.data.mixture.weights import Weights, parse_weights

__all__ = [
    "MixtureSchedule",
    "Segment",
    "Weights",
    "check_epochs",
    "parse_weights",
    "run_segments",
    "segments_of",
    "share_of_rows",
]
