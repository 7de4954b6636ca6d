"""Texts of the base model with its predictions: drawn once, or the user's own.

Text i is a function of the weights, the settings and i. A killed draw therefore continues with the
finished blocks, and a larger pool begins with the texts of a smaller one. Drawn texts may contain
memorized text: delete the directory :attr:`Pool.path` to remove them.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import unwrapped, without_peft
from holdfast._torch.batch import evaluating
from holdfast._torch.checks import natural_number, whole_number
from holdfast._torch.fingerprint import content_fingerprint, model_fingerprint
from holdfast._torch.layout import is_sharded
from holdfast.io.encoding import pieces, tokenize
from holdfast.io.models import Loaded, Loader
from holdfast.io.rows import open_rows, text_columns
from holdfast.scoring.blocks import Block, BlockMaker, BlockStore
from holdfast.scoring.draw import (
    Drawer,
    Drawn,
    OnTokens,
    drawn_tokens,
    end_tokens,
    kept_tokens,
    noise_on,
    vocabulary_size,
)
from holdfast.scoring.likelihood import Runner

Cache = bool | str | os.PathLike[str]

BLOCK = 64  # texts per file; blocks are always drawn in full
_FORMAT = 2  # of the files, and of how texts are drawn: part of the key
_TENSORS = ("tokens", "lengths", "starts", "ids", "log_probs", "own")
_MARK = "holdfastusertext"  # stands for what a user writes


class Start(NamedTuple):
    """How some of the texts start.

    Attributes:
        tokens: their first tokens.
        share: the share of the texts.
        ends: the number of end tokens after which a text is over. A chat ends with the answer, and
            in most chats the user's message has an end token too.
    """

    tokens: Sequence[int]
    share: float
    ends: int = 1


class PoolBatch(NamedTuple):
    """Some texts, ready for a forward pass.

    Attributes:
        input_ids: texts × longest, int64, padded on the right with 0.
        attention_mask: 1 for tokens, 0 for padding, int64.
        where: the positions that count, a mask of the same shape on the CPU: those that predict a
            token which was drawn. Position p predicts token p + 1.
        ids: tokens at the positions that count, in the order of ``where.flatten()``, positions × k,
            int64: the base's likeliest, then ``drawn`` others.
        log_probs: their log-probabilities under the base, float32.
        targets: the tokens that were drawn at these positions, int64.
        own: their log-probabilities under the base, float32.
    """

    input_ids: Tensor
    attention_mask: Tensor
    where: Tensor
    ids: Tensor
    log_probs: Tensor
    targets: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """Texts with the predictions of the base model, on the CPU.

    The predictions that count are those of the drawn tokens, an end token included. Entries beyond
    the end of a text are 0.

    Attributes:
        tokens: texts × longest, int32.
        lengths: the tokens of each text, its start included, int32.
        starts: the tokens of each text's start, which was not drawn, int32.
        ids: the tokens that are kept per drawn token, texts × drawn tokens × k, int32: the base's
            likeliest, then a few that are drawn from the others.
        log_probs: their log-probabilities, float16.
        own: the log-probability of each drawn token, float32.
        path: the directory of the cached files; None if there is none.
        about: what the texts and predictions depend on.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    ids: Tensor
    log_probs: Tensor
    own: Tensor
    path: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        where = f", in {self.path}" if self.path else ""
        return f"Pool({len(self)} texts, {int(self.counts.sum())} predictions{where})"

    @property
    def counts(self) -> Tensor:
        """The number of positions that count, per text."""
        return self.lengths - self.starts

    @property
    def drawn(self) -> int:
        """How many of the kept tokens, the last ones, are drawn from those that are not likeliest.

        0 if all tokens of the vocabulary are kept.
        """
        return int(self.about["drawn"])

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _TENSORS)

    def split(self, n: int) -> tuple["Pool", "Pool"]:
        """Split off the last n texts: (texts to train on, held-out texts)."""
        if not 0 < n < len(self):
            raise ValueError(
                f"{n} of {len(self)} texts cannot be held out: hold out at least 1, and leave 1"
            )
        return self._rows(slice(0, len(self) - n)), self._rows(slice(len(self) - n, None))

    def texts(self) -> list[list[int]]:
        """The tokens of each text, its start included."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]

    def batch(self, rows: Sequence[int] | Tensor, device: torch.device | str) -> PoolBatch:
        """Return the tensors of some texts on a device. A row may be given more than once."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        lengths, starts = self.lengths[rows, None], self.starts[rows, None]
        longest = int(lengths.max())
        tokens, at = self.tokens[rows, :longest].long(), torch.arange(longest)
        where = (at >= starts - 1) & (at < lengths - 1)
        drawn = torch.arange(self.own.shape[1]) < lengths - starts
        found = PoolBatch(
            input_ids=tokens,
            attention_mask=(at < lengths).long(),
            where=where,
            ids=self.ids[rows][drawn].long(),
            log_probs=self.log_probs[rows][drawn].float(),
            targets=tokens[:, 1:][where[:, :-1]],
            own=self.own[rows][drawn],
        )
        moved = PoolBatch(*(tensor.to(device, non_blocking=True) for tensor in found))
        # On the CPU, so that the number of positions is known without waiting for the device.
        return moved._replace(where=where)

    def _rows(self, rows: slice) -> "Pool":
        return replace(self, **{name: getattr(self, name)[rows] for name in _TENSORS})


def draw_pool(
    model: nn.Module,
    count: int,
    *,
    prefixes: Sequence[Start],
    length: int = 128,
    top: int = 64,
    seed: int = 0,
    cache: Cache = True,
    progress: bool = True,
    base: str | None = None,
    fewer: Callable[[float], int | None] | None = None,
) -> Pool:
    """Draw texts from a causal language model, with its predictions, or read them from the cache.

    On several ranks, each rank draws a share, and all ranks get the same pool.

    Args:
        model: the base model. It runs in eval mode.
        count: the number of texts.
        prefixes: how texts start, see :func:`default_starts`.
        length: the maximum length of a text in tokens, its start included. The model's own limit
            applies too.
        top: the number of tokens whose log-probabilities are kept per drawn token: the likeliest,
            and a quarter that is drawn from the others. At least 2.
        seed: the random seed of all texts.
        cache: the cache directory. True is ``$HOLDFAST_CACHE`` or ``~/.cache/holdfast``; False
            turns the cache off.
        progress: show a progress bar.
        base: the fingerprint of the weights; computed if None.
        fewer: called after the first batch with the expected seconds of the whole draw. It may
            return a smaller number of texts to draw.
    """
    count = whole_number("count", count, 1)
    natural_number("seed", seed)
    loaded = _loaded(model, length)
    prefixes = [Start(*given) for given in prefixes]  # a pair will do
    starts, shares = _checked_starts(prefixes, model, loaded.limit)
    ends = [start.ends for start in prefixes]
    drawer = Drawer(model, loaded.limit, whole_number("top", top, 2))
    about = _about(model, base, loaded.limit, top) | {
        "starts": [starts, shares, ends],
        "seed": seed,
        "ends": end_tokens(without_peft(model)).tolist(),
        "dtype": str(drawer.dtype),
    }
    kinds = _assigned(shares, -(-count // BLOCK) * BLOCK)
    longest = loaded.limit - min(map(len, starts))

    def make(numbers: list[int], on_tokens: OnTokens) -> dict[int, Block]:
        noise = torch.cat([_noise(seed, number, longest) for number in numbers])
        kind = torch.cat([kinds[number * BLOCK :][:BLOCK] for number in numbers])
        parts, places = [], []
        for i, start in enumerate(starts):
            rows = (kind == i).nonzero().flatten()
            if len(rows):
                some = noise[rows, : loaded.limit - len(start)]
                drawn = drawer(start, some, on_tokens, ends=ends[i])
                parts.append(_block(drawn, len(start), longest))
                places.append(rows)
        back = torch.cat(places).argsort()
        found = {name: torch.cat([part[name] for part in parts])[back] for name in _TENSORS}
        return _in_blocks(found, numbers)

    # A block on a CPU is always drawn alone, so that its bits are the same each time.
    at_a_time = 1 if drawer.device.type == "cpu" else max(1, drawer.rows // BLOCK)
    tokens = int((loaded.limit - torch.tensor([len(start) for start in starts])[kinds]).sum())
    try:
        pool = _made(model, make, count, cache, about, at_a_time, tokens, progress, fewer)
    finally:
        drawer.free()
    _refuse_degenerate(pool, len(starts), model)
    return pool


def pool_of_texts(
    model: nn.Module,
    texts: str | os.PathLike[str] | Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    count: int | None = None,
    length: int = 128,
    top: int = 64,
    cache: Cache = True,
    progress: bool = True,
    base: str | None = None,
) -> Pool:
    """Compute the predictions of a causal language model for given texts, in one pass.

    All tokens of a text but the first count.

    Args:
        model: the base model. It runs in eval mode.
        texts: lists of token ids; or a text file, or a file of rows with a text column (JSON lines,
            for example), which needs a tokenizer. A text that is too long becomes several texts.
        tokenizer: the tokenizer for a file.
        count: the maximum number of texts. If None, all are used.
        length: the maximum length of a text in tokens.
        top: as in :func:`draw_pool`, like the remaining arguments.
    """
    loaded = replace(_loaded(model, length), tokenizer=tokenizer)
    rows = [piece for text in _tokens(loaded, texts) for piece in pieces(text, loaded.limit)]
    rows = [row for row in rows if len(row) > 1][:count]
    if not rows:
        raise ValueError("the texts hold no tokens to predict: each text needs at least two tokens")
    _check_tokens(rows, model)
    about = _about(model, base, loaded.limit, whole_number("top", top, 2))
    about |= {"texts": content_fingerprint(rows)}
    longest = max(map(len, rows))

    def make(numbers: list[int], on_tokens: OnTokens) -> dict[int, Block]:
        some = [row for number in numbers for row in rows[number * BLOCK :][:BLOCK]]
        noise = torch.cat([_noise(0, number, loaded.limit - 1) for number in numbers])
        drawn = _predictions(loaded, some, noise[: len(some), : longest - 1], top, on_tokens)
        return _in_blocks(_block(drawn, 1, longest - 1), numbers)

    at_a_time = 1 if loaded.device.type == "cpu" else 32
    tokens = sum(map(len, rows))
    return _made(model, make, len(rows), cache, about, at_a_time, tokens, progress)


def default_starts(
    model: nn.Module, tokenizer: Any = None, *, start: int | None = None
) -> list[Start]:
    """Return how drawn texts start: the tokens, and the share of the texts.

    Texts start at ``start`` if given, else at BOS, else at EOS. If the tokenizer has a chat
    template, half of them start where a user's first message begins, and end with the answer.
    """
    loaded = replace(_loaded(model, 2), tokenizer=tokenizer, start_token=start)
    try:
        first = loaded.first_token()
    except ValueError:
        raise ValueError(
            "the model has no BOS or EOS token that drawn texts can start with: name a token as "
            "start="
        ) from None
    turn, message_ends = _user_turn(tokenizer, end_tokens(without_peft(model)).tolist())
    if not turn or turn == [first]:
        return [Start([first], 1.0)]
    return [Start([first], 0.5), Start(turn, 0.5, ends=message_ends + 1)]


def describe_starts(starts: Sequence[Start], tokenizer: Any = None) -> str:
    """Describe how drawn texts start.

    >>> describe_starts([Start([1], 0.5), Start([1, 5, 6], 0.5)])
    '50 % of the texts start with token 1, 50 % with tokens 1 5 6'
    """

    def shown(tokens: Sequence[int]) -> str:
        if tokenizer is not None:
            return repr(tokenizer.decode(list(tokens)))
        return f"token{'s' * (len(tokens) > 1)} {' '.join(map(str, tokens))}"

    first, *others = starts
    if not others:
        return f"all texts start with {shown(first.tokens)}"
    more = "".join(f", {100 * start.share:.3g} % with {shown(start.tokens)}" for start in others)
    return f"{100 * first.share:.3g} % of the texts start with {shown(first.tokens)}{more}"


def _user_turn(tokenizer: Any, end: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of a chat before a user's first message, and the number of end tokens after it.

    No tokens if the template has no such place. Spaces at the end are left out: most tokenizers
    join them to the next word.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return [], 0
    try:
        message = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(message, tokenize=False)
        before, *after = text.split(_MARK)
        if len(after) != 1:
            return [], 0
        before, after = (
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (before.rstrip(" "), after[0])
        )
        return list(before), sum(token in end for token in after)
    except Exception:  # a template is a program
        return [], 0


def _loaded(model: nn.Module, length: int) -> Loaded:
    """A causal model with the length of its texts, which its own limit cuts."""
    inner = without_peft(model)
    loaded = Loader(max_length=whole_number("length", length, 2)).ready(inner, None)
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{type(inner).__name__} does not generate texts: drawing needs a causal language model"
        )
    return replace(loaded, model=unwrapped(model))


def _checked_starts(
    prefixes: Sequence[Start], model: nn.Module, length: int
) -> tuple[list[list[int]], list[float]]:
    starts, shares = [list(s.tokens) for s in prefixes], [float(s.share) for s in prefixes]
    if not starts or not all(starts) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            "texts need at least one start, each start at least one token and a share above 0, and "
            f"the shares must add up to 1; got {prefixes!r}"
        )
    _check_tokens(starts, model)
    if max(map(len, starts)) >= length:
        raise ValueError(
            f"a start of {max(map(len, starts))} tokens leaves nothing to draw in texts of "
            f"{length} tokens: increase length, or choose another start"
        )
    return starts, shares


def _check_tokens(rows: Sequence[Sequence[int]], model: nn.Module) -> None:
    size = vocabulary_size(model)
    for row in rows:
        if not 0 <= min(row) <= max(row) < size:
            raise ValueError(
                f"token {min(row) if min(row) < 0 else max(row)} is not in the model's vocabulary "
                f"of {size} tokens: use the tokenizer that belongs to the model"
            )


def _assigned(shares: Sequence[float], count: int) -> Tensor:
    """The start of each text, such that the shares hold in every part of the pool.

    >>> _assigned([0.5, 0.25, 0.25], 8).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    owed, found = [0.0] * len(shares), []
    for _ in range(count):
        owed = [debt + share for debt, share in zip(owed, shares, strict=True)]
        most = max(range(len(shares)), key=lambda i: round(owed[i], 9))
        owed[most] -= 1
        found.append(most)
    return torch.tensor(found)


def _noise(seed: int, number: int, tokens: int) -> Tensor:
    """The noise of one block of texts, the same on every machine."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(BLOCK, tokens, dtype=torch.float64, generator=generator)


def _about(model: nn.Module, base: str | None, length: int, top: int) -> dict[str, Any]:
    weights = base or model_fingerprint(model)
    drawn = drawn_tokens(top, vocabulary_size(model))
    return {"format": _FORMAT, "weights": weights, "length": length, "top": top, "drawn": drawn}


def _made(
    model: nn.Module,
    make: Callable[[list[int], OnTokens], dict[int, Block]],
    count: int,
    cache: Cache,
    about: dict[str, Any],
    at_a_time: int,
    tokens: int,
    progress: bool,
    fewer: Callable[[float], int | None] | None = None,
) -> Pool:
    """Make the blocks of ``count`` texts, which hold ``tokens`` tokens, and join them."""

    def checked(numbers: list[int], on_tokens: OnTokens) -> dict[int, Block]:
        with torch.inference_mode(), evaluating(model):
            made = make(numbers, on_tokens)
        if not all(block["own"].isfinite().all() for block in made.values()):
            raise ValueError(
                f"{type(without_peft(model)).__name__} predicts NaN: check its weights, or load it "
                "in bfloat16 or float32 if float16 overflows"
            )
        return made

    def fewer_blocks(seconds: float) -> int | None:
        texts = fewer(seconds) if fewer is not None else None
        return texts and -(-texts // BLOCK)

    blocks = -(-count // BLOCK)
    together = any(is_sharded(p) or hasattr(p, "ds_id") for p in model.parameters())
    store = BlockStore(cache, "pools", about)
    maker = BlockMaker(checked, store, at_a_time, tokens // blocks, together)
    # The predictions must not depend on the precision that the caller has set.
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        found = maker(blocks, progress=progress, fewer=fewer and fewer_blocks)
        joined = {name: torch.cat([block[name] for block in found])[:count] for name in _TENSORS}
    return Pool(**joined, path=store.path, about=about)


def _block(drawn: Drawn, start: int, longest: int) -> Block:
    """The tensors of a pool, 0 beyond the end of each text."""
    ended = torch.arange(drawn.tokens.shape[1]) >= drawn.lengths[:, None]
    unused = torch.arange(drawn.own.shape[1]) >= drawn.lengths[:, None] - start
    pad = longest - drawn.own.shape[1]
    return {
        "tokens": drawn.tokens.masked_fill(ended, 0),
        "lengths": drawn.lengths,
        "starts": torch.full_like(drawn.lengths, start),
        "ids": F.pad(drawn.ids.masked_fill(unused[..., None], 0), (0, 0, 0, pad)),
        "log_probs": F.pad(drawn.log_probs.masked_fill(unused[..., None], 0), (0, 0, 0, pad)),
        "own": F.pad(drawn.own.masked_fill(unused, 0), (0, pad)),
    }


def _in_blocks(found: Block, numbers: list[int]) -> dict[int, Block]:
    # Copies: pickling a view would pickle the whole tensor.
    pieces_of = {name: tensor.split(BLOCK) for name, tensor in found.items()}
    return {
        number: {name: pieces_of[name][i].clone() for name in _TENSORS}
        for i, number in enumerate(numbers)
    }


def _refuse_degenerate(pool: Pool, starts: int, model: nn.Module) -> None:
    name = type(without_peft(model)).__name__
    if int(pool.counts.max()) <= 1:
        raise ValueError(
            f"each text that {name} draws ends after one token: choose another start, or pass your "
            "own texts"
        )
    if len(pool) > starts and len(set(map(tuple, pool.texts()))) <= starts:
        raise ValueError(
            f"all texts that {name} draws are equal, so its predictions are degenerate: check its "
            "weights, or pass your own texts"
        )


def _tokens(
    loaded: Loaded, texts: str | os.PathLike[str] | Sequence[Sequence[int]]
) -> list[list[int]]:
    if not isinstance(texts, str | os.PathLike):
        return [list(map(int, text)) for text in texts]
    rows, tokenizer = open_rows(texts), loaded.need_tokenizer(str(texts))
    columns = text_columns(rows[0])
    if not columns:
        raise ValueError(f"{texts} needs a column text, but it has {', '.join(rows[0])}")
    return [tokenize(tokenizer, str(row[columns[0]])) for row in rows]


def _predictions(
    loaded: Loaded, rows: list[list[int]], noise: Tensor, top: int, on_tokens: OnTokens
) -> Drawn:
    """The model's predictions for given texts, as if it had drawn all tokens but the first.

    ``noise``, one value per predicted token, chooses the tokens to keep.
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    tokens = torch.zeros(len(rows), noise.shape[1] + 1, dtype=torch.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    own = torch.zeros(noise.shape)
    ids = log_probs = torch.empty(0)
    for numbers, predictions in Runner(loaded)(rows):
        some = tokens[numbers, : predictions.states.shape[1]].long()
        where = torch.arange(some.shape[1]) < lengths[numbers, None] - 1
        place, column = where.nonzero(as_tuple=True)
        at = torch.tensor(numbers)[place], column
        found, left = [], noise[at][:, None]
        for logits, targets in predictions.logits(where, some[place, column + 1]):
            each = logits.log_softmax(-1)
            now, left = left.split([len(each), len(left) - len(each)])
            kept = kept_tokens(each, top, noise_on(now, each.device))
            found.append([*kept, each.gather(-1, targets[:, None])[:, 0]])
        kept_ids, theirs, drawn = (torch.cat(part).cpu() for part in zip(*found, strict=True))
        if not ids.numel():
            shape = (*own.shape, kept_ids.shape[-1])
            ids, log_probs = kept_ids.new_zeros(shape), theirs.new_zeros(shape)
        ids[at], log_probs[at], own[at] = kept_ids, theirs, drawn
        on_tokens(int(lengths[numbers].sum()))
    return Drawn(tokens, lengths, ids, log_probs, own)
