"""A small language model and its data, for a comparison without downloads.

A Llama of two million parameters that was pretrained on prose, verse and code; maths problems to
fine-tune it on; and text of the three kinds that it has not seen. README.md tells where all of it
comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

__all__ = ["Paths", "paths"]


@dataclass(frozen=True)
class Paths:
    """Where the files lie.

    Attributes:
        model: the folder of the model and its tokenizer.
        train: problems to learn: ``question`` and ``answer``.
        dev: problems to be tested on.
        retained: text of each kind that the model knows, by name.
    """

    model: Path
    train: Path
    dev: Path
    retained: dict[str, Path]


def paths() -> Paths:
    """The files in the installed package.

    >>> sorted(paths().retained)
    ['code', 'prose', 'verse']
    """
    folder = Path(str(files(__name__)))
    return Paths(
        model=folder / "model",
        train=folder / "gsm8k-train.jsonl.gz",
        dev=folder / "gsm8k-dev.jsonl.gz",
        retained={kind: folder / f"{kind}.txt.gz" for kind in ("prose", "verse", "code")},
    )
