"""Helpers of objectives that read the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._torch.batch import pad_id_of
from holdfast.data import IndexedSource, Source, as_source

if TYPE_CHECKING:
    from holdfast.run import Run


def source_of(run: Run, data: Any, batch_size: int = 32) -> Source:
    """The source for data, with the run's collate function."""
    return as_source(data, run.collate, batch_size, pad_id_of(run.model))


def samples_of(run: Run, data: Any, who: str, name: str = "data") -> IndexedSource:
    """The source for data that is read by index; raises for a stream."""
    source = source_of(run, data)
    if isinstance(source, IndexedSource):
        return source
    raise ValueError(
        f"{who} adds a value to each sample, so {name} must be indexed samples, not a stream or "
        f"batches: pass a dataset as {name}= and its collate function as collate="
    )
