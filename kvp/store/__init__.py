"""The trace store: queries, keys and values of collected sequences (`docs/formats.md`)."""

from kvp.store.reader import TraceReader
from kvp.store.schema import SequenceRecord, StorePlan, Trace, planned_bytes
from kvp.store.writer import TraceWriter

__all__ = ["SequenceRecord", "StorePlan", "Trace", "TraceReader", "TraceWriter", "planned_bytes"]
