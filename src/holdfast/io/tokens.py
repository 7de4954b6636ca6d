"""The tokens of two checkpoints: which are new, and whether an id means the same token in both."""

import filecmp
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.builtin import located_model
from holdfast.io.untrusted import read_object

#: The smallest share of tokens with the same id, of those that both tokenizers have, with which
#: the rows of two models are compared.
_MOST = 0.99


@dataclass(frozen=True)
class TokenChange:
    """How the tokens of a tuned model differ from those of its base.

    Attributes:
        new: the tokens that only the tuned model has, by their ids.
        both: the number of tokens that both models have; 0 if a tokenizer is not known.
        moved: how many of these have other ids.
    """

    new: tuple[str, ...] = ()
    both: int = 0
    moved: int = 0

    @property
    def same_ids(self) -> bool:
        """Whether an id means the same token in both models, so that rows can be compared."""
        return self.moved <= (1 - _MOST) * self.both


def token_change(
    base: str | os.PathLike[str] | nn.Module | None,
    tuned: str | os.PathLike[str] | nn.Module | None,
) -> TokenChange:
    """Compare the files ``tokenizer.json`` of two directories or hub names.

    An adapter without a tokenizer has that of its base.
    """
    before, after = _tokenizer_file(base), _tokenizer_file(tuned)
    if before is None or after is None or filecmp.cmp(before, after, shallow=False):
        return TokenChange()
    old, new = _ids(read_object(before)), _ids(read_object(after))
    added = sorted(new.keys() - old.keys(), key=lambda token: new[token])
    both = old.keys() & new.keys() or old.keys()  # without a common token, all have changed
    return TokenChange(tuple(added), len(both), sum(old[t] != new.get(t) for t in both))


def _tokenizer_file(source: str | os.PathLike[str] | nn.Module | None) -> Path | None:
    if source is None or isinstance(source, nn.Module):
        return None
    path = Path(located_model(source))
    if path.exists():
        file = path / "tokenizer.json"
        return file if file.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(str(source), "tokenizer.json")
    except HFValidationError:  # not the name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token, from the content of a ``tokenizer.json``."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    pairs: list[Any] = []
    if isinstance(known, dict):
        pairs += known.items()
    elif isinstance(known, list):  # Unigram: pieces with their scores, by id
        pairs += ((row[0], i) for i, row in enumerate(known) if isinstance(row, list) and row)
    for row in added if isinstance(added, list) else ():
        if isinstance(row, dict):
            pairs.append((row.get("content"), row.get("id")))
    return {t: i for t, i in pairs if isinstance(t, str) and isinstance(i, int)}
