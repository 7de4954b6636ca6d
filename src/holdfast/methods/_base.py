"""What objectives share that look at the data, or at what the pretrained model says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._torch.batch import pad_id_of
from holdfast.data import Batches, Samples, as_source

if TYPE_CHECKING:
    from holdfast.run import Run


def check_head_is_fitted(run: Run, who: str, *, preset: bool = True) -> None:
    """Refuse a new head that nobody has fitted: what is predicted through it means nothing.

    ``preset`` says whether ``who`` can be named in one.
    """
    from holdfast.methods.lp_ft import LPFT

    if run.new and not isinstance(run.recipe.trainable, LPFT):
        named = f' (in a preset "lp-ft+{who.lower()}")' if preset else ""
        raise ValueError(
            f"{who} asks the pretrained model what it makes of the data, but {', '.join(run.new)} "
            "is new and its predictions are random. Fit it first: with trainable=LPFT()"
            f"{named}, or, with LoRA and others, by linear_probe(model, "
            f'"{run.new[0]}", data) before, and then without new='
        )


def source_of(run: Run, data: Any, batch_size: int = 32) -> Samples | Batches:
    """Data as one that can be read, in the way in which the model is trained on it."""
    return as_source(data, run.collate, batch_size, pad_id_of(run.model))


def samples_of(run: Run, data: Any, who: str, name: str = "data") -> Samples:
    """Data that can be read by index, or an error."""
    source = source_of(run, data)
    if isinstance(source, Samples):
        return source
    raise ValueError(
        f"{who} adds a value to each sample, so {name} must hold samples by their index, not a "
        f"stream or ready-made batches: pass a dataset as {name}= and what makes batches of its "
        "samples as collate="
    )
