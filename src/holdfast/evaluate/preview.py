"""What a model learns from data: the first samples with their targets, lengths, unused columns."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from holdfast._torch.checks import named_settings, natural_number
from holdfast.hosts.job import Training
from holdfast.io.encoding import TrainingData, training_samples
from holdfast.io.models import Loader
from holdfast.io.render import Kind, Reader
from holdfast.io.rows import Sources, image_column, label_of
from holdfast.losses import IGNORED
from holdfast.report.preview import show_preview

_UNLIMITED = 1 << 30  # tokens


@dataclass(frozen=True)
class Piece:
    """A piece of a sample, and whether the model learns to predict it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class PreviewedSample:
    """A sample as the model reads it; ``tokens`` are those before it is cut to length."""

    row: int
    pieces: list[Piece]
    tokens: int
    trained: int


@dataclass(frozen=True)
class Lengths:
    """The tokens per sample; longer samples than ``limit`` are cut.

    A long text is cut into several samples. Of other samples, the end is lost: ``lost`` are those
    that have no target left.
    """

    min: int
    median: float
    max: int
    limit: int
    cut: int
    lost: int


@dataclass(frozen=True)
class Preview:
    """What a model learns from data.

    ``kind`` is how the rows are read, ``head`` the new head that the model gets, ``samples`` the
    number of training samples, ``first`` the first of them. Images have no ``lengths``.
    """

    model: str
    data: str
    rows: int
    samples: int
    kind: Kind
    head: str | None
    first: list[PreviewedSample]
    lengths: Lengths | None
    unused: list[str]

    def to_terminal(self) -> None:
        """Print it: trained parts are green in a terminal, and in brackets elsewhere."""
        show_preview(self)


@named_settings
def preview(
    model: str,
    data: Sources,
    *,
    columns: Mapping[str, str] | None = None,
    head: str = "auto",
    samples: int = 3,
    loader: Loader | None = None,
) -> Preview:
    """Show what a model would learn from data, as ``holdfast data`` does. No weights are loaded.

    Args:
        model: directory or hub name of a transformers model.
        data: files of rows or text, a directory of ``datasets.save_to_disk``, a folder of images,
            or a hub dataset, as for ``holdfast finetune --data``.
        columns: a column map for rows with other columns, ``{"question": "problem"}``.
        head: ``"auto"``, ``"classification"``, ``"regression"`` or ``"none"``, as for
            :class:`holdfast.Plan`.
        samples: the number of samples to show.
        loader: the maximum length (512 by default), and whether to trust code of the model.

    Returns:
        The samples with their trained parts, lengths and unused columns; ``to_terminal`` prints it.

    Example:
        >>> from holdfast import builtin
        >>> shown = preview(str(builtin.MODEL), str(builtin.TRAIN), samples=1)
        >>> shown.kind, [piece.trained for piece in shown.first[0].pieces]
        ('completion', [False, True])
    """
    loader = loader or Loader(max_length=Training.max_length)
    task = TrainingData.open(model, data, loader, head=head, columns=columns)
    return _preview(task, natural_number("samples", samples))


def _preview(task: TrainingData, most: int) -> Preview:
    """Encode all rows as for training, and show the first samples."""
    loaded = task.loader.ready(task.loader.skeleton(task.source, task.head), task.tokenizer)
    with warnings.catch_warnings():
        # Unused columns are listed here.
        warnings.filterwarnings("ignore", ".*columns that are not used", UserWarning)
        whole = replace(loaded, limit=_UNLIMITED)
        owners, samples = training_samples(whole, task.rows, task.data)
    reader, first = Reader(task.data), task.rows[0]
    images = image_column(first) is not None
    kind: Kind = "labeled"
    if loaded.kind == "causal_lm":
        kind = reader.kind(first, "conversation", "completion", "text") or "text"
    lengths = None if images else _lengths(samples, loaded.limit)
    count = len(samples) - (lengths.lost if lengths else 0)
    if kind == "text":
        count = sum(-(-len(sample["input_ids"]) // loaded.limit) for sample in samples)
    used = [c for row in ([first] if images else task.rows) for c in reader.used(row, kind) if c]
    read = {task.columns.get(column, column) for column in used}
    shown = zip(owners[:most], (samples[i] for i in range(min(most, len(samples)))), strict=True)
    return Preview(
        task.source, task.data, len(task.rows), count, kind, str(task.head) if task.head else None,
        [_shown(task, row, sample) for row, sample in shown], lengths,
        [column for column in task.all_columns if column not in read],
    )  # fmt: skip


def _lengths(samples: Sequence[Any], limit: int) -> Lengths:
    tokens = [len(sample["input_ids"]) for sample in samples]
    lost = [
        isinstance(sample["labels"], list)
        and not any(x != IGNORED for x in sample["labels"][1:limit])
        for sample in samples
    ]
    longer = sum(n > limit for n in tokens)
    return Lengths(min(tokens), statistics.median(tokens), max(tokens), limit, longer, sum(lost))


def _shown(task: TrainingData, row: int, sample: Mapping[str, Any]) -> PreviewedSample:
    """Return a sample as text: its targets are tokens, or the label after the text or image."""
    given = task.rows[row]
    if (column := image_column(given)) is not None:
        image, size = given[column], "×".join(map(str, sample["pixel_values"].shape))
        shown = (
            f"{image}, as {size} numbers" if isinstance(image, str) else f"image, {size} numbers"
        )
        return PreviewedSample(row, [Piece(shown, False), Piece(f" {label_of(given)}", True)], 0, 1)
    ids, labels = list(sample["input_ids"]), sample["labels"]
    if not isinstance(labels, list):
        text = task.tokenizer.decode(ids)
        pieces = [Piece(text, False), Piece(f" {label_of(given)}", True)]
        return PreviewedSample(row, pieces, len(ids), 1)
    pieces, known, end = [], "", 0
    for trained, run in groupby(labels, lambda label: label != IGNORED):
        end += len(list(run))
        text = task.tokenizer.decode(ids[:end])  # with what comes before: some tokens join
        pieces.append(Piece(text[len(known) :], trained))
        known = text
    return PreviewedSample(row, pieces, len(ids), sum(label != IGNORED for label in labels))
