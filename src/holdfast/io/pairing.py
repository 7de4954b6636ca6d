"""Match the tensors of a base model with those of a tuned model."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from holdfast._torch.names import align, plain_name, shorten
from holdfast._torch.slices import slices
from holdfast._torch.vocabulary import TokenRows, is_token_embedding, token_rows
from holdfast.io.tokens import token_change
from holdfast.io.weights import Spec, Weights

_EMBEDDING = re.compile(r"embed|wte|tok|shared")
#: Tensors that are computed, not learned; some versions of transformers do not save them.
_BUFFER = re.compile(
    r"(ids|inde(x|ices)|mask(ed_bias)?|tracked|inv_freq|coords_table|(attn|attention)\.bias)$"
)
_LAYER = re.compile(r"(^|\.)\d+\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|decoder|output|output_layer)\.weight$")


@dataclass(frozen=True)
class Pair:
    """A tensor that both models have: its name without prefixes, and its name in each model.

    The first ``size`` weights are those of both models. A tensor with a row per token has more of
    them in the model that has more tokens.
    """

    name: str
    base: str
    tuned: str
    size: int
    again: bool = False  # another name for the tensor of another pair (tied embeddings)


@dataclass(frozen=True)
class Pairing:
    """The tensors of both models, and those that only one has or that differ in shape.

    ``resized`` also has the tensors with a row per token if the rows are those of other tokens.
    ``token_rows`` are the numbers of rows per token, if the models differ in them, and
    ``new_tokens`` the names of the tokens that only the tuned model has, as far as they are known.
    """

    pairs: tuple[Pair, ...]
    only_base: tuple[str, ...]
    only_tuned: tuple[str, ...]
    resized: tuple[str, ...]
    token_rows: TokenRows | None = None
    new_tokens: tuple[str, ...] = ()


def pair(base: Weights, tuned: Weights) -> Pairing:
    """Find the pairs despite prefixes and tied weights; refuse different architectures."""
    check_not_packed(base)
    check_not_packed(tuned)
    named = align(tuned, base)
    partner = {name: own for name in tuned if (own := named(name)) is not None}
    if not partner:
        raise ValueError(
            f"{base.label} and {tuned.label} are different architectures: they share no tensor "
            f"name ({shorten(list(base), most=2)}; {shorten(list(tuned), most=2)})"
        )
    shapes = ((name, base[own].shape, tuned[name].shape) for name, own in partner.items())
    sizes = token_rows(shapes)
    tokens = token_change(base.path, tuned.path)
    if not tokens.same_ids:
        sizes = None
    resized = {
        name: f"{name} ({_shape(base, own)} → {_shape(tuned, name)})"
        for name, own in partner.items()
        if not _same_rows(base[own], tuned[name], sizes)
    }
    if len(resized) > len(partner) / 2:
        raise ValueError(
            f"{base.label} and {tuned.label} are different architectures: {len(resized)} of "
            f"{len(partner)} shared tensors differ in shape: {shorten([*resized.values()], most=3)}"
        )
    if not tokens.same_ids:  # the same row is another token
        by_token = (n for n in _rows_per_token(base, partner) if n not in resized)
        resized |= {name: f"{name} (rows of other tokens)" for name in by_token}

    def paired(name: str, of_base: str, of_tuned: str, *, again: bool = False) -> Pair:
        size = min(base[of_base].size, tuned[of_tuned].size)
        return Pair(plain_name(name), of_base, of_tuned, size, again)

    pairs = {
        name: paired(name, own, name, again=_tied_alike(base, own, tuned, name, partner))
        for name, own in partner.items()
        if name not in resized
    }
    for name in tuned:
        if name not in partner:
            if (first := _twin(tuned, name, pairs)) is not None:
                pairs[name] = paired(name, pairs[first].base, name, again=True)
            elif tokens.same_ids and (own := _untied_from(base, tuned, name, sizes)) is not None:
                pairs[name] = paired(name, own, name)
    of_base = set(partner.values())
    left = [n for n in base if n not in of_base and _twin(base, n, of_base) is None]
    back = None if sizes is None else TokenRows(sizes.tuned, sizes.base)
    heads = {
        n: own
        for n in left
        if tokens.same_ids and (own := _untied_from(tuned, base, n, back)) is not None
    }
    return Pairing(
        pairs=(*pairs.values(), *(paired(n, n, own) for n, own in heads.items())),
        only_base=tuple(name for name in left if name not in heads),
        only_tuned=tuple(name for name in tuned if name not in pairs and name not in resized),
        resized=tuple(resized.values()),
        token_rows=sizes,
        new_tokens=tokens.new,
    )


def _rows_per_token(base: Weights, partner: dict[str, str]) -> list[str]:
    """The names of token embeddings, and of output layers and biases with as many rows."""
    embeddings = [name for name in partner if is_token_embedding(name)]
    tokens = {base[partner[name]].shape[0] for name in embeddings}
    heads = [
        name
        for name, own in partner.items()
        if not _LAYER.search(name) and base[own].shape[:1] and base[own].shape[0] in tokens
    ]
    return list(dict.fromkeys([*embeddings, *heads]))


def _same_rows(one: Spec, other: Spec, sizes: TokenRows | None) -> bool:
    """Whether two tensors have the same shape, or differ only in their rows per token."""
    return one.shape == other.shape or (sizes is not None and sizes.explain(one.shape, other.shape))


def _tied_alike(
    base: Weights, own: str, tuned: Weights, name: str, partner: dict[str, str]
) -> bool:
    """Whether a tensor is tied to the same other tensor in both models."""
    if not _HEAD.search(name):
        return False
    first = _twin(tuned, name, partner)
    return first is not None and _twin(base, own, [partner[first]]) is not None


def _twin(weights: Weights, name: str, among: Iterable[str]) -> str | None:
    """Return the embedding that equals a matrix value by value."""
    spec = weights[name]
    for other in among:
        if other == name or weights[other] != spec or len(spec.shape) < 2:
            continue
        if _EMBEDDING.search(other) and all(
            torch.equal(weights.read(name, *part), weights.read(other, *part))
            for part in slices(spec.size)
        ):
            return other
    return None


def _untied_from(
    without: Weights, other: Weights, head: str, sizes: TokenRows | None
) -> str | None:
    """Return the embedding that a model without its own head uses as its head."""
    if not _HEAD.search(head) or not _ties(without, other):
        return None
    fits = (n for n, spec in without.items() if _same_rows(spec, other[head], sizes))
    return next((name for name in fits if _EMBEDDING.search(name)), None)


def _ties(weights: Weights, other: Weights) -> bool:
    """Whether a model's embedding is its head.

    A configuration may omit the default. Then a model of the same architecture decides: if it has a
    head, the head is tied here.
    """
    ties = weights.config.get("tie_word_embeddings")
    own, others = (w.config.get("architectures") for w in (weights, other))
    return bool(own) and own == others if ties is None else bool(ties)


def _shape(weights: Weights, name: str) -> str:
    return "×".join(map(str, weights[name].shape)) or "a number"


def check_not_packed(weights: Weights) -> None:
    """Refuse quantized weights: their values mean something only with their scales."""
    packed = {name: spec for name, spec in weights.items() if _is_packed(name, spec)}
    if packed:
        dtypes = ", ".join(sorted({str(s.dtype).removeprefix("torch.") for s in packed.values()}))
        raise ValueError(
            f"{weights.label} holds {len(packed)} quantized tensors ({dtypes}), which cannot be "
            "compared or merged: use the checkpoint before quantization, or dequantize and save "
            f"it: {shorten(list(packed), most=3)}"
        )


def _is_packed(name: str, spec: Spec) -> bool:
    if spec.dtype.is_floating_point:
        return spec.dtype.itemsize == 1
    if spec.dtype == torch.bool or _BUFFER.search(name):
        return False
    return "weight" in name.rpartition(".")[2] or len(spec.shape) > 1


def check_complete(base: Weights, tuned: Weights, pairing: Pairing) -> None:
    """Refuse a tuned model without weights that the base has, other than those of an old head."""
    lost = [name for name in pairing.only_base if not _BUFFER.search(name)]
    other_head = base.config.get("architectures") != tuned.config.get("architectures")
    if other_head:  # the body's layers are numbered, a head is not
        lost = [name for name in lost if _LAYER.search(name)]
    if lost:
        raise ValueError(
            f"{tuned.label} lacks {len(lost)} tensors of {base.label}, so it is not a complete "
            f"model: {shorten(lost, most=3)}"
        )
