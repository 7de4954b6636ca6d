"""A small language model and its data, for a comparison without downloads.

The model is a Llama of two million parameters, pretrained on prose, verse and code. The data are
maths problems to fine-tune it on, and unseen text of the three kinds. README.md names the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

__all__ = ["Paths", "paths"]


@dataclass(frozen=True)
class Paths:
    """The paths of the files.

    Attributes:
        model: folder of the model and its tokenizer.
        train: problems to learn, with ``question`` and ``answer``.
        dev: problems for the test.
        retained: text of each kind that the model was pretrained on, by name.
    """

    model: Path
    train: Path
    dev: Path
    retained: dict[str, Path]


def paths() -> Paths:
    """Return the paths in the installed package.

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
