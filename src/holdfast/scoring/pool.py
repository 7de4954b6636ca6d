"""Texts of the base model with its predictions: drawn once, or the user's own.

Text i is a function of the weights, the settings and i (on a GPU, also of how the batch rounds). A
killed draw therefore continues with the finished blocks, and a larger pool begins with the texts of
a smaller one. Drawn texts may contain memorized text: delete the directory :attr:`Pool.path` to
remove them.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import adapters_are_new, adapters_off, unwrapped, without_peft
from holdfast._torch.batch import evaluating
from holdfast._torch.checks import natural_number, whole_number
from holdfast._torch.fingerprint import base_fingerprint, fingerprint
from holdfast._torch.rng import generator_of
from holdfast._torch.vocabulary import check_tokens
from holdfast.io.encoding import pieces, tokenize
from holdfast.io.render import Reader
from holdfast.io.rows import open_rows
from holdfast.scoring.blocks import Block, BlockStore, all_blocks, checksum
from holdfast.scoring.draw import (
    BLOCK,
    Drawer,
    OnTokens,
    check_predictions,
    end_tokens,
    is_spread,
    noise_of,
)
from holdfast.scoring.predictions import Predictor, positions
from holdfast.scoring.starts import Start, first_token, loaded, text_tokenizer

Cache = bool | str | os.PathLike[str]

_FORMAT = 4  # of the files, and of how texts are drawn and predicted: part of the key
_TEXTS = ("tokens", "lengths", "starts")
_PREDICTIONS = ("ids", "log_probs", "rest")


class PoolBatch(NamedTuple):
    """Some texts, ready for a forward pass.

    Attributes:
        input_ids: texts × longest, int64, padded on the right with 0.
        attention_mask: 1 for tokens, 0 for padding, int64.
        where: the positions that count, a mask of the same shape on the CPU. Position p predicts
            token p + 1.
        ids: the tokens that are kept at the positions that count, in the order of
            ``where.flatten()``, positions × k, int64: the base's likeliest, then sampled ones.
        log_probs: their log-probabilities under the base, float32.
        rest: the probability of all tokens but the likeliest, float32.
    """

    input_ids: Tensor
    attention_mask: Tensor
    where: Tensor
    ids: Tensor
    log_probs: Tensor
    rest: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """Texts with the predictions of the base model, on the CPU.

    The predictions that count are those of the tokens after a text's start, an end token included.
    Entries beyond the end of a text are 0.

    Attributes:
        tokens: texts × longest, int32.
        lengths: the tokens of each text, its start included, int32.
        starts: the tokens of each text's start, which is not predicted, int32.
        ids: the tokens that are kept per prediction, texts × predictions × k, int32: the base's
            likeliest, then some that are sampled from the others.
        log_probs: their log-probabilities, float32.
        rest: the probability of all tokens but the likeliest, float32.
        sampled: how many of the kept tokens, the last ones, are sampled. 0 if all tokens of the
            vocabulary are kept.
        path: the directory of the cached files; None if there is none.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    sampled: int
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> Tensor:
        """The number of positions that count, per text."""
        return self.lengths - self.starts

    def split(self, n: int) -> tuple["Pool", "Pool"]:
        """Split off the last n texts: (texts to train on, held-out texts)."""
        if not 0 < n < len(self):
            raise ValueError(
                f"{n} of {len(self)} texts cannot be held out: hold out at least 1, and leave 1"
            )
        return self[: len(self) - n], self[len(self) - n :]

    def __getitem__(self, rows: slice) -> "Pool":
        names = (*_TEXTS, *_PREDICTIONS)
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def texts(self) -> list[list[int]]:
        """The tokens of each text, its start included."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]

    def batch(self, rows: Sequence[int] | Tensor, device: torch.device | str) -> PoolBatch:
        """Return the tensors of some texts on a device. A row may be given more than once."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        lengths, starts = self.lengths[rows], self.starts[rows]
        where = positions(lengths, starts)
        is_used = torch.arange(self.rest.shape[1]) < (lengths - starts)[:, None]
        found = PoolBatch(
            input_ids=self.tokens[rows, : where.shape[1]].long(),
            attention_mask=(torch.arange(where.shape[1]) < lengths[:, None]).long(),
            where=where,
            ids=self.ids[rows][is_used].long(),
            log_probs=self.log_probs[rows][is_used],
            rest=self.rest[rows][is_used],
        )
        moved = PoolBatch(*(tensor.to(device, non_blocking=True) for tensor in found))
        # On the CPU, so that the number of positions is known without waiting for the device.
        return moved._replace(where=where)


def draw_pool(
    model: nn.Module,
    count: int,
    *,
    starts: Sequence[Start],
    length: int = 128,
    top: int | None = 64,
    seed: int = 0,
    cache: Cache = True,
    progress: bool = True,
) -> Pool:
    """Draw texts from a causal language model, and compute its predictions, or read them.

    With new PEFT adapters, texts and predictions are those of the model without them. On several
    ranks, each rank draws a share, and all ranks get the same pool.

    Args:
        model: the base model. It runs in eval mode.
        count: the number of texts.
        starts: how texts start, in turn; see :func:`holdfast.scoring.starts.default_starts`.
        length: the maximum length of a text in tokens, its start included. The model's own limit
            applies too.
        top: the number of tokens whose log-probabilities are kept per prediction: the likeliest,
            and a quarter that is sampled from the others. At least 2. If None, no predictions.
        seed: the random seed of all texts.
        cache: the cache directory. True is ``$HOLDFAST_CACHE`` or ``~/.cache/holdfast``; False
            turns the cache off.
        progress: show a progress bar.

    The predictions are computed in the precision that is active: in autocast, if the caller is.
    """
    count = whole_number("count", count, 1, 10**7)
    natural_number("seed", seed)
    limit = loaded(model, length).limit
    _check_starts(starts, model, limit)
    with _as_base(model) as base:
        drawer = Drawer(base, limit)
        about = {
            "format": _FORMAT, "weights": base_fingerprint(base), "dtype": str(drawer.dtype),
            "starts": [[list(start.tokens), start.ends] for start in starts], "length": limit,
            "ends": end_tokens(without_peft(base)).tolist(), "seed": seed,
        }  # fmt: skip
        store = BlockStore.of(cache, "pools", about)
        blocks = all_blocks(
            partial(_drawn, drawer, starts, seed),
            -(-count // BLOCK),
            store,
            # A block on a CPU is always drawn alone, so that its bits are the same each time.
            at_a_time=lambda: max(1, drawer.batches.size // BLOCK),
            together=is_spread(base),
            tokens=BLOCK * (limit - 1),
            shown="drawing texts" if progress else "",
        )
        drawer.free()
        texts = {name: torch.cat([block[name] for block in blocks]) for name in _TEXTS}
        found = _predicted(base, texts, top, store.folder, seed, progress)
        _refuse_degenerate(found, len(starts), type(without_peft(base)).__name__)
    return replace(found, path=store.path)[:count]


def pool_of_texts(
    model: nn.Module,
    texts: str | os.PathLike[str] | Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    start: int | None = None,
    count: int | None = None,
    length: int = 128,
    top: int | None = 64,
    seed: int = 0,
    cache: Cache = True,
    progress: bool = True,
) -> Pool:
    """Compute the predictions of a causal language model for given texts, in one pass.

    The texts are shuffled. Each starts with one token that is not predicted, as drawn texts do.

    Args:
        model: the base model. It runs in eval mode.
        texts: lists of token ids; or a text file, or a file of rows with a text column (JSON lines,
            for example), which needs a tokenizer. A text that is too long becomes several texts.
        tokenizer: the tokenizer for a file.
        start: the token to start with. If None, BOS, else EOS.
        count: the maximum number of texts. If None, all are used.
        length: the maximum length of a text in tokens, with the token that it starts with.
        seed: the seed of the order.
        top: as in :func:`draw_pool`, like the remaining arguments.
    """
    limit, first = loaded(model, length).limit, first_token(model, tokenizer, start)
    found = [
        [first, *piece]
        for text in _tokens(texts, text_tokenizer(tokenizer))
        for piece in pieces(text[text[:1] == [first] :], limit - 1)
    ]
    order = torch.randperm(len(found), generator=generator_of("order", seed)).tolist()
    rows = [found[i] for i in order][:count]
    if not rows:
        raise ValueError("the texts hold no tokens to predict")
    check_tokens(model, rows)
    tokens = nn.utils.rnn.pad_sequence(
        [torch.tensor(row, dtype=torch.int32) for row in rows], batch_first=True
    )
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    given = {"tokens": tokens, "lengths": lengths, "starts": torch.ones_like(lengths)}
    with _as_base(model) as base:
        about = {
            "format": _FORMAT, "weights": base_fingerprint(base),
            "texts": fingerprint([tokens, lengths]),
        }  # fmt: skip
        store = BlockStore.of(cache, "pools", about)
        pool = _predicted(base, given, top, store.folder, seed, progress)
    return replace(pool, path=store.path)


@contextlib.contextmanager
def _as_base(model: nn.Module) -> Iterator[nn.Module]:
    """The model without new adapters, in eval mode, in the precision that is active."""
    inner = unwrapped(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(inner))
        if hasattr(inner, "disable_adapter") and adapters_are_new(inner):
            stack.enter_context(adapters_off(inner))
        kind = next(inner.parameters()).device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Autocast must not keep copies of weights that were made without gradients.
        stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
        yield inner


def _drawn(
    drawer: Drawer, starts: Sequence[Start], seed: int, numbers: list[int], on_tokens: OnTokens
) -> list[Block]:
    """Draw the texts of some blocks; text i has the start i modulo their number."""
    texts = [i for number in numbers for i in range(number * BLOCK, (number + 1) * BLOCK)]
    own = [starts[i % len(starts)] for i in texts]
    noise = torch.cat([noise_of("texts", seed, number, drawer.length) for number in numbers])
    tokens, lengths = drawer(
        [start.tokens for start in own], noise, on_tokens, ends=[start.ends for start in own]
    )
    check_predictions(drawer.model, drawer.is_nan)
    tokens = tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], 0)
    given = torch.tensor([len(start.tokens) for start in own], dtype=torch.int32)
    return _in_blocks(dict(zip(_TEXTS, (tokens, lengths, given), strict=True)))


def _predicted(
    model: nn.Module,
    texts: dict[str, Any],
    top: int | None,
    folder: Path | None,
    seed: int,
    progress: bool,
) -> Pool:
    """The pool of some texts, with the predictions of a model."""
    found: dict[str, Any]
    count, longest = texts["tokens"].shape
    width = longest - int(texts["starts"].min())
    if top is None:
        none = torch.zeros(count, width, 0)
        found = {"ids": none.int(), "log_probs": none, "rest": none.sum(-1)}
        return Pool(**texts, **found, sampled=0)
    predictor = Predictor(model, longest, whole_number("top", top, 2))
    kind = predictor.device.type
    in_autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if in_autocast else next(model.parameters()).dtype

    def make(numbers: list[int], on_tokens: OnTokens) -> list[Block]:
        rows = torch.cat([torch.arange(count)[n * BLOCK : (n + 1) * BLOCK] for n in numbers])
        noise = [noise_of("kept", seed, n, width, torch.float64) for n in numbers]
        tokens, lengths, starts = (texts[name][rows] for name in _TEXTS)
        kept = predictor(tokens, lengths, starts, torch.cat(noise)[: len(rows)], on_tokens)
        check_predictions(model, bool(kept.log_probs.isnan().any()))
        note = {"sampled": torch.tensor(predictor.sampled)}
        return [block | note for block in _in_blocks(kept._asdict())]

    blocks = all_blocks(
        make,
        -(-count // BLOCK),
        # Another process may have drawn other texts: on a GPU, batches round differently.
        BlockStore(
            folder,
            {"top": top, "dtype": str(dtype), "seed": seed},
            [checksum(block) for block in _in_blocks(texts)],
        ),
        at_a_time=lambda: max(1, predictor.batches.size // BLOCK),
        together=is_spread(model),
        tokens=int((texts["lengths"] - texts["starts"]).sum()) * BLOCK // count,
        shown="predictions on texts" if progress else "",
    )
    found = {name: torch.cat([block[name] for block in blocks]) for name in _PREDICTIONS}
    return Pool(**texts, **found, sampled=int(blocks[0]["sampled"]))


def _in_blocks(found: Block) -> list[Block]:
    # Copies: pickling a view would pickle the whole tensor.
    parts = {name: tensor.split(BLOCK) for name, tensor in found.items()}
    count = len(next(iter(parts.values())))
    return [{name: parts[name][i].clone() for name in parts} for i in range(count)]


def _check_starts(starts: Sequence[Start], model: nn.Module, length: int) -> None:
    if not starts or not all(start.tokens for start in starts):
        raise ValueError(f"texts need at least one start, each with a token; got {starts!r}")
    check_tokens(model, [start.tokens for start in starts])
    longest = max(len(start.tokens) for start in starts)
    if longest >= length:
        raise ValueError(
            f"a start of {longest} tokens leaves nothing to draw in texts of {length} tokens: "
            "increase length, or choose another start"
        )


def _refuse_degenerate(pool: Pool, starts: int, name: str) -> None:
    if int(pool.counts.max()) <= 1:
        raise ValueError(
            f"each text that {name} draws ends after one token: choose another start, or pass your "
            "own texts"
        )
    if len(pool.tokens.unique(dim=0)) <= starts:
        raise ValueError(
            f"all texts that {name} draws are equal, so its predictions are degenerate: check its "
            "weights, or pass your own texts"
        )


def _tokens(
    texts: str | os.PathLike[str] | Sequence[Sequence[int]], tokenizer: Any
) -> list[list[int]]:
    if not isinstance(texts, str | os.PathLike):
        return [list(map(int, text)) for text in texts]
    if tokenizer is None:
        raise ValueError(f"{texts} needs a tokenizer: pass the one of the model as tokenizer=")
    reader, rows = Reader(str(texts)), open_rows(texts)
    found = [tokenize(tokenizer, reader.text(row, number)) for number, row in enumerate(rows)]
    reader.warn_of_unused(rows, "text")
    return found
