"""Recording: a user's forward as a straight list of events, and the running of its slices."""

from hybridpipe.model.recording.events import (
    CallsBackward,
    Constant,
    Diverged,
    Event,
    LossReadsForward,
    SetsWeights,
    Unsplittable,
    Value,
    ValueInfo,
    Weight,
    call_arguments,
)
from hybridpipe.model.recording.forward import record
from hybridpipe.model.recording.record import Record, RecordedLayer
from hybridpipe.model.recording.records import Records
from hybridpipe.model.recording.slices import Lookup, ModelLookup, Slice
from hybridpipe.model.recording.under_way import is_recording

__all__ = [
    "CallsBackward",
    "Constant",
    "Diverged",
    "Event",
    "Lookup",
    "LossReadsForward",
    "ModelLookup",
    "Record",
    "RecordedLayer",
    "Records",
    "SetsWeights",
    "Slice",
    "Unsplittable",
    "Value",
    "ValueInfo",
    "Weight",
    "call_arguments",
    "is_recording",
    "record",
]
