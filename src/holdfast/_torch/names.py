"""Different names of the same parameter: wrappers, base-model prefixes and old spellings.

A wrapped model calls its parameters ``module.x`` (DDP) or ``_orig_mod.x`` (torch.compile); a
``BertModel`` checkpoint says ``encoder.…`` where ``BertForSequenceClassification`` says
``bert.encoder.…``; BERT's first checkpoints say ``LayerNorm.gamma``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OLD_SPELLINGS = {"gamma": "weight", "beta": "bias"}  # in modules called LayerNorm


def plain_name(name: str) -> str:
    """The name in the unwrapped model, in today's spelling.

    >>> plain_name("module._orig_mod.layer.0.LayerNorm.gamma")
    'layer.0.LayerNorm.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    # DDP's "module" is stripped only at the front: further inside it is an ordinary name.
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    if len(parts) > 1 and parts[-2] == "LayerNorm":
        parts[-1] = _OLD_SPELLINGS.get(parts[-1], parts[-1])
    return ".".join(parts)


@dataclass(frozen=True)
class Alignment:
    """A translation of names into names of anchors, by removing a prefix on one side."""

    anchors: dict[str, str]  # plain name → the anchor's own name
    ours: str = ""  # the prefix of our names
    theirs: str = ""  # the prefix of the anchors' names

    def __call__(self, name: str) -> str | None:
        plain = plain_name(name)
        if not plain.startswith(self.ours):
            return None
        return self.anchors.get(self.theirs + plain[len(self.ours) :])


def align(names: Iterable[str], anchor_names: Iterable[str]) -> Alignment:
    """Find the prefix under which most names agree.

    Names that agree without a prefix have precedence if they are half of the smaller side. A prefix
    must match as many, and at least two, so that a single ``weight`` in common is not enough.

    >>> alignment = align(["bert.a.weight", "bert.a.bias", "head.weight"], ["a.weight", "a.bias"])
    >>> alignment("bert.a.bias")
    'a.bias'
    """
    ours, theirs = _by_plain_name(names), _by_plain_name(anchor_names)
    enough = min(len(ours), len(theirs)) / 2
    if sum(name in theirs for name in ours) >= enough:
        return Alignment(theirs)

    votes: Counter[tuple[str, str]] = Counter()
    for name in ours:
        votes.update((prefix, "") for prefix, rest in _cuts(name) if rest in theirs)
    for name in theirs:
        votes.update(("", prefix) for prefix, rest in _cuts(name) if rest in ours)
    most = max(votes.values(), default=0)
    only = len(ours) == len(theirs) == 1
    if most < enough or (most < 2 and not only):
        return Alignment(theirs)
    best = sorted(prefix for prefix, count in votes.items() if count == most)
    if len(best) > 1:
        fits = " and ".join(repr(a or b) for a, b in best[:4])
        raise ValueError(
            f"the prefixes {fits} match the anchors' names equally well; "
            "pass a mapping that uses the parameters' own names"
        )
    return Alignment(theirs, *best[0])


def shorten(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The first items of a list, and the number of the others."""
    rest = len(items) - most
    return separator.join(items[:most]) + (f" … and {rest} more" if rest > 0 else "")


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    plain: dict[str, str] = {}
    for name in names:
        key = plain_name(name)
        if key in plain:
            raise ValueError(f"duplicate parameter name: {plain[key]!r} and {name!r} are the same")
        plain[key] = name
    return plain


def _cuts(name: str) -> Iterable[tuple[str, str]]:
    """Every way to split a name into a dotted prefix and the rest."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]) + ".", ".".join(parts[i:])
