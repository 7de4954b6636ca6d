"""How far the predictions moved: KL(base‖tuned), on given inputs or on none.

RL's Razor (https://arxiv.org/abs/2509.04259) finds that this divergence on the inputs of the new
task predicts forgetting, where the distance of the weights does not. Without any data it can be
taken on texts that the base model writes itself, from its BOS token on
(https://arxiv.org/abs/2505.13811).

One model is in memory at a time: what the base predicts waits on disk for the tuned model.
"""

from __future__ import annotations

import itertools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast._torch.progress import progress_bar
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.report import Divergence
from holdfast.evaluate.stats import Samples, estimate
from holdfast.io.models import Loaded
from holdfast.scoring.likelihood import Runner
from holdfast.scoring.masked import masked_log_probs

__all__ = ["KL", "ClassKL", "ContextFreeKL", "MaskedKL", "TokenKL", "kl_divergence"]

#: What the base's predictions may take on disk.
DISK = 4 << 30


def kl_divergence(base: Tensor, tuned: Tensor) -> Tensor:
    """KL(base‖tuned) of each row of log-probabilities, in float64.

    >>> half, third = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> round(kl_divergence(half, third).item(), 4)       # ½ log(½/¼) + ½ log(½/¾)
    0.1438
    """
    base, tuned = base.double(), tuned.double()
    p = base.exp()
    return torch.where(p == 0, 0.0, p * (base - tuned)).sum(-1)  # 0 log 0 = 0


class KL(ABC):
    """KL(base‖tuned) on some inputs: first :meth:`remember` the base, then :meth:`compare`.

    A subclass says what is predicted: :meth:`log_probs`, one table for each sequence.
    """

    per = "token"
    how = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequences = 0
        self._folder = Path()

    @abstractmethod
    def log_probs(self, loaded: Loaded) -> Iterator[Tensor]:
        """The log-probabilities of all predictions in a sequence, a row each."""

    def remember(self, loaded: Loaded, folder: Path, *, progress: bool) -> None:
        """Keep what the base model predicts, in a directory that outlives :meth:`compare`."""
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        used = 0
        bar = progress_bar(None, f"KL on {self.name}, base", shown=progress)
        for log_probs in self.log_probs(loaded):
            table = log_probs.float().cpu().numpy()
            if used + table.nbytes > DISK and self.sequences:
                self.how += f"; the first {self.sequences} sequences only, for want of disk space"
                break
            np.save(self._file(self.sequences), table)
            self.sequences, used = self.sequences + 1, used + table.nbytes
            bar.update(1)
        bar.close()
        if not self.sequences:
            raise ValueError(f"{self.name} holds nothing to predict")

    def compare(self, loaded: Loaded, *, progress: bool) -> Divergence:
        """Compare with what the tuned model predicts."""
        sums, counts = [], []
        bar = progress_bar(self.sequences, f"KL on {self.name}, tuned", shown=progress)
        for number, tuned in enumerate(self.log_probs(loaded)):
            if number == self.sequences:
                break
            base = torch.from_numpy(np.load(self._file(number))).to(tuned.device)
            if base.shape != tuned.shape:
                raise ValueError(
                    f"the models predict other things on {self.name}: {base.shape[-1]} and "
                    f"{tuned.shape[-1]} classes or tokens, {len(base)} and {len(tuned)} times"
                )
            parts = [kl_divergence(*pair).sum() for pair in _pieces(base, tuned)]
            sums.append(float(torch.stack(parts).sum()))
            counts.append(len(base))
            bar.update(1)
        bar.close()
        found = estimate(Samples(sums, counts))
        return Divergence(self.name, found, sum(counts), self.per, self.how)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npy"


def _pieces(base: Tensor, tuned: Tensor, rows: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(base.split(rows), tuned.float().split(rows), strict=True)


class TokenKL(KL):
    """A causal model's next tokens, after each token of given sequences."""

    def __init__(self, name: str, sequences: Sequence[Sequence[int]], how: str) -> None:
        super().__init__(name)
        self.ids: list[list[int]] = [list(s) for s in sequences if len(s)]
        self.how = how

    @torch.inference_mode()
    def log_probs(self, loaded: Loaded) -> Iterator[Tensor]:
        """A row for each token: what comes next."""
        run = Runner(loaded)
        left = [ids[: loaded.limit] for ids in self.ids]
        while left:
            # So many that what the body makes of them can wait until it is their turn.
            room = run.room(left[0])
            some = left[: max(1, sum(end <= room for end in itertools.accumulate(map(len, left))))]
            found = {
                number: (predictions, place)
                for numbers, predictions in run(some)
                for place, number in enumerate(numbers)
            }
            for number, ids in enumerate(some):
                predictions, place = found.pop(number)
                yield predictions.log_probs(place, len(ids))
            left = left[len(some) :]


class ContextFreeKL(TokenKL):
    """On texts that the base model writes: no data, no tokenizer.

    Each text is drawn token by token from the base's own distribution. The divergence of two
    distributions over texts is the expectation, over the base's texts, of the summed divergences
    of their next tokens; each of those is taken over the whole vocabulary, so that only the choice
    of texts is random. The figure is that sum over the number of tokens drawn.

    Args:
        texts: how many.
        tokens: how long at most; a text may end before.
        start: the token to begin with; None takes BOS, else EOS.
        seed: of the drawing.
    """

    def __init__(
        self, texts: int = 64, tokens: int = 64, start: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(
            "context-free", [], f"{texts} texts of at most {tokens} tokens, drawn from the base"
        )
        self.texts, self.tokens, self.start, self.seed = texts, tokens, start, seed

    def remember(self, loaded: Loaded, folder: Path, *, progress: bool) -> None:
        """Have the base write its texts, and keep what it predicted."""
        self.ids = self.draw(loaded)
        super().remember(loaded, folder, progress=progress)

    @torch.inference_mode()
    def draw(self, loaded: Loaded) -> list[list[int]]:
        """Texts from the base, without their last token: nothing is predicted after it."""
        model: Any = loaded.model
        start = loaded.first_token() if self.start is None else self.start
        ends = _end_tokens(loaded)
        devices = [loaded.device] if loaded.device.type == "cuda" else []
        tokens = min(self.tokens, loaded.limit - 1)
        drawn = torch.full((self.texts, 1), start, device=loaded.device)
        ended = torch.zeros(self.texts, dtype=torch.bool, device=loaded.device)
        lengths = torch.zeros(self.texts, dtype=torch.long, device=loaded.device)
        cache: Any = None
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.seed)
            for _ in range(tokens):
                seen = drawn if cache is None else drawn[:, -1:]
                out = model(
                    input_ids=seen,
                    attention_mask=torch.ones_like(drawn),
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = getattr(out, "past_key_values", None)
                drawing = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
                lengths += ~ended
                drawn = torch.cat([drawn, drawing], 1)
                ended |= torch.isin(drawing[:, 0], ends)
                if bool(ended.all()):
                    break
        rows = zip(drawn.tolist(), lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]


class MaskedKL(KL):
    """A masked model's predictions for 15 % of the tokens of texts."""

    per = "masked token"
    how = "15 % of the tokens masked, the same for both models"

    def __init__(self, name: str, texts: Sequence[str], windows: int | None = None) -> None:
        super().__init__(name)
        self.texts, self.windows = texts, windows

    def log_probs(self, loaded: Loaded) -> Iterator[Tensor]:
        """A row for each masked token."""
        found = (table for text in self.texts for table, _ in masked_log_probs(loaded, text))
        yield from itertools.islice(found, self.windows)


class ClassKL(KL):
    """A classifier's predictions."""

    per = "sample"
    how = "over the classes of each sample"

    def __init__(self, task: Classification) -> None:
        super().__init__(task.name)
        self.task = task

    def log_probs(self, loaded: Loaded) -> Iterator[Tensor]:
        """A row for each sample."""
        for logits in self.task.logits(loaded):
            yield logits.float().log_softmax(-1)[None]


def _end_tokens(loaded: Loaded) -> Tensor:
    config = getattr(loaded.model, "generation_config", None) or loaded.model.config
    end = getattr(config, "eos_token_id", None)
    ends = end if isinstance(end, list) else [] if end is None else [end]
    return torch.tensor(ends, dtype=torch.long, device=loaded.device)
