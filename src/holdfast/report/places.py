"""Where in a model something is, in words: its embeddings, its layers by number, or a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from holdfast.report.words import listed, plain

_EMBEDDINGS = re.compile("embed|wte|wpe")
#: A run of more parts than these is told by its ends.
_FEW = 3


def place_of(names: Sequence[str], first: int, last: int) -> str:
    """A run of neighbours among the layers of a model, whose names are in order.

    >>> names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(9)), "model.norm"]
    >>> place_of(names, 0, 2), place_of(names, 9, 10)
    ('the embeddings and layers 0–1', 'layer 8 and norm')
    """
    stems = list(dict.fromkeys(stem for stem, _ in map(_numbered, names) if stem is not None))
    short = [name.rpartition(".")[2] for name in names]
    found = []
    for stem, group in groupby(range(first, last + 1), key=lambda i: _numbered(names[i])[0]):
        part = list(group)
        if stem is not None:
            found.append(_layers(stem, stems, [_numbered(names[i])[1] for i in part]))
            continue
        for i in part:
            called = short[i] if short.count(short[i]) == 1 else names[i]
            found.append("the embeddings" if _EMBEDDINGS.search(short[i]) else plain(called))
    found = list(dict.fromkeys(found))
    return listed(found) if len(found) <= _FEW else f"{found[0]} to {found[-1]}"


def _numbered(name: str) -> tuple[str | None, str]:
    """What comes before the number at the end of a name, if there is one, and the number."""
    match = re.fullmatch(r"(?:(.*)[._])?(\d+)", name)
    return (match[1] or "", match[2]) if match else (None, "")


def _layers(stem: str, stems: Sequence[str], numbers: Sequence[str]) -> str:
    """Layers by number; where several parts of a model have layers, with the part's name."""
    ends = numbers[0] if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    layers = f"layer {ends}" if len(numbers) == 1 else f"layers {ends}"
    if len(stems) == 1:
        return layers
    words = [set(other.split(".")) for other in stems]
    own = [word for word in stem.split(".") if not all(word in other for other in words)]
    part = plain(".".join(own) or stem)
    return f"{part}.{ends}" if part[-1].isdigit() else f"{part} {layers}"  # layer1.0 of a ResNet
