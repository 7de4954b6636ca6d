"""Vocabularies of two sizes: which tensors have a row per token, and which rows two models share.

Token embeddings, output layers and their biases have one row per token, along their first
dimension. Added tokens and padding are rows at the end, so two models share the first rows.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from holdfast._torch.adapters import without_peft

#: Common names of the embedding of tokens, which is not that of positions or of segments.
_TOKEN_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|tok_embeddings|(word|token)_embeddings?|embed_in|embeddings|wte|shared)"
    r"(\.token_adapter)?(\.base_layer)?\.weight$"  # PEFT wraps what it trains
)

Shape = Sequence[int]


class TokenRows(NamedTuple):
    """The numbers of rows per token in two models, of which the first ones are shared."""

    base: int
    tuned: int

    @property
    def shared(self) -> int:
        return min(self)

    def explain(self, base: Shape, tuned: Shape) -> bool:
        """Whether two tensors have different shapes only because of their rows per token.

        >>> TokenRows(30, 33).explain((30, 16), (33, 16))
        True
        >>> TokenRows(30, 33).explain((2, 16), (3, 16))  # classes
        False
        """
        rows = (*base[:1], *tuned[:1])
        return base != tuned and rows == tuple(self) and tuple(base[1:]) == tuple(tuned[1:])


def token_rows(tensors: Iterable[tuple[str, Shape, Shape]]) -> TokenRows | None:
    """Compare the token embeddings of two models; None if they have equally many rows.

    ``tensors`` are the tensors of both models: a name, and the shapes in the base and in the tuned
    model.

    >>> token_rows([("model.embed_tokens.weight", (30, 16), (33, 16))])
    TokenRows(base=30, tuned=33)
    """
    for name, base, tuned in tensors:
        if is_token_embedding(name) and base and tuned:
            found = TokenRows(base[0], tuned[0])
            if found.explain(base, tuned):
                return found
    return None


def is_token_embedding(name: str) -> bool:
    """Whether a tensor is the embedding of tokens, by its name.

    >>> is_token_embedding("transformer.wte.weight"), is_token_embedding("transformer.wpe.weight")
    (True, False)
    """
    return _TOKEN_EMBEDDING.search(name) is not None


def vocabulary_size(model: nn.Module) -> int:
    embedding = without_peft(model).get_input_embeddings()
    # DeepSpeed empties the weight.
    return int(getattr(embedding, "num_embeddings", embedding.weight.shape[0]))


def check_tokens(model: nn.Module, rows: Iterable[Sequence[int]]) -> None:
    """Refuse tokens that a model has no embedding of."""
    size = vocabulary_size(model)
    for row in filter(len, rows):
        if not 0 <= min(row) <= max(row) < size:
            raise ValueError(
                f"token {min(row) if min(row) < 0 else max(row)} is not in the model's vocabulary "
                f"of {size} tokens: use the tokenizer that belongs to the model"
            )
