"""Two names for one parameter: wrappers and base-model prefixes.

A wrapped model calls its parameters ``module.x`` (DDP) or ``_orig_mod.x`` (torch.compile); a
``BertModel`` checkpoint says ``encoder.…`` where ``BertForSequenceClassification`` says
``bert.encoder.…``. :func:`align` finds which names mean the same parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def strip_wrappers(name: str) -> str:
    """The name without the parts that wrappers put into it.

    >>> strip_wrappers("module._orig_mod.layer.0.weight")
    'layer.0.weight'
    """
    parts = name.split(".")
    parts = [p for p in parts if p not in _WRAPPERS]
    # DDP's "module" is stripped only in front: deeper down it is a name like any other.
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def align(names: Iterable[str], anchor_names: Iterable[str]) -> dict[str, str]:
    """Map each name to the anchor name that means the same parameter; names without one are absent.

    One prefix is chosen for all names: the one under which most of them agree, with no prefix
    preferred. It must explain at least half of the smaller side, so that a chance agreement of
    one ``weight`` does not anchor a model to something foreign.

    >>> align(["bert.emb.weight", "bert.emb.bias", "classifier.weight"], ["emb.weight", "emb.bias"])
    {'bert.emb.weight': 'emb.weight', 'bert.emb.bias': 'emb.bias'}
    """
    ours = _by_plain_name(names)
    theirs = _by_plain_name(anchor_names)

    # A prefix p > "" means ours = p + theirs; ("", p) the other way round.
    votes: Counter[tuple[str, str]] = Counter()
    for name in ours:
        votes.update((p, "") for p, rest in _splits(name) if rest in theirs)
    for name in theirs:
        votes.update(("", p) for p, rest in _splits(name) if p and rest in ours)
    if not votes:
        return {}

    most = max(votes.values())
    best = sorted(prefix for prefix, count in votes.items() if count == most)
    if best[0] != ("", ""):
        if 2 * most < min(len(ours), len(theirs)):
            return {ours[n]: theirs[n] for n in ours if n in theirs}
        if len(best) > 1:
            fits = " and ".join(repr(a or b) for a, b in best[:4])
            raise ValueError(
                f"the prefixes {fits} explain the anchors' names equally well; "
                "pass a mapping that uses the parameters' own names"
            )
    mine, other = best[0]
    return {
        full: theirs[other + name[len(mine) :]]
        for name, full in ours.items()
        if name.startswith(mine) and other + name[len(mine) :] in theirs
    }


def shorten(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The first items of a list, and how many more there are."""
    rest = len(items) - most
    return separator.join(items[:most]) + (f" … and {rest} more" if rest > 0 else "")


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    plain: dict[str, str] = {}
    for name in names:
        key = strip_wrappers(name)
        if key in plain:
            raise ValueError(f"duplicate parameter name: {plain[key]!r} and {name!r} are the same")
        plain[key] = name
    return plain


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Every way to cut a name into a dotted prefix (possibly empty) and the rest."""
    parts = name.split(".")
    for i in range(len(parts)):
        yield "".join(p + "." for p in parts[:i]), ".".join(parts[i:])
