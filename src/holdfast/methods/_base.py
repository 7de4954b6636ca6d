"""What objectives share that look at the data, or at what the pretrained model says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._torch.batch import pad_id_of
from holdfast.data import IndexedSource, Source, as_source

if TYPE_CHECKING:
    from holdfast.run import Run


def source_of(run: Run, data: Any, batch_size: int = 32) -> Source:
    """Data as one that can be read, in the way in which the model is trained on it."""
    return as_source(data, run.collate, batch_size, pad_id_of(run.model))


def samples_of(run: Run, data: Any, who: str, name: str = "data") -> IndexedSource:
    """Data that can be read by index, or an error."""
    source = source_of(run, data)
    if isinstance(source, IndexedSource):
        return source
    raise ValueError(
        f"{who} adds a value to each sample, so {name} must hold samples by their index, not a "
        f"stream or ready-made batches: pass a dataset as {name}= and what makes batches of its "
        "samples as collate="
    )
