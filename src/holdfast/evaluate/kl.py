"""How far the predictions moved: KL(base‖tuned) on inputs, or on texts sampled from the base.

RL's Razor (https://arxiv.org/abs/2509.04259) finds that the divergence on the inputs of the new
task predicts forgetting, while the distance of the weights does not. Without any data, the
divergence can be measured on texts that the base model generates from its BOS token
(https://arxiv.org/abs/2505.13811).
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from holdfast._torch.checks import natural_number, whole_number
from holdfast._torch.progress import progress_bar
from holdfast._torch.vocabulary import vocabulary_size
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.report import Divergence
from holdfast.evaluate.stats import Outcomes, estimate
from holdfast.io.models import Loaded
from holdfast.report.words import percent
from holdfast.scoring.draw import draw_texts
from holdfast.scoring.kl import StoredPredictions, masked_log_probs, next_token_log_probs

Tables = Iterable[Tensor]
#: Of the data-free divergence.
MOST_TEXTS = 100_000


class KL:
    """KL(base‖tuned) on some inputs: first :meth:`remember` the base, then :meth:`compare`.

    ``log_probs`` runs a model; it yields one table per sequence with one row of log-probabilities
    per prediction. ``over_tokens`` says that its columns are tokens: of two models with different
    numbers of them, the tokens of both are compared. The other arguments are those of
    :class:`Divergence`.
    """

    #: Whether the inputs are texts that the base generates.
    on_drawn_texts: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        log_probs: Callable[[Loaded], Tables],
        per: str,
        how: str,
        *,
        over_tokens: bool = True,
    ) -> None:
        self.name, self.log_probs, self.per, self.how = name, log_probs, per, how
        self.over_tokens = over_tokens
        self._stored = StoredPredictions(Path())

    def remember(self, loaded: Loaded, folder: Path, *, progress: bool) -> None:
        """Store the base model's predictions in a directory that outlives :meth:`compare`."""
        self._stored = StoredPredictions(Path(tempfile.mkdtemp(dir=folder)))
        bar = f"KL on {self.name}, base"
        if not self._stored.save(_counted(self.log_probs(loaded), None, bar, progress)):
            self.how += f"; only the first {self._stored.tables} sequences, to limit the disk space"
        if not self._stored.tables:
            raise ValueError(f"{self.name} holds no tokens or samples to predict")

    def compare(self, loaded: Loaded, *, progress: bool) -> Divergence:
        """Compare a model, which may have another number of tokens."""
        bar = f"KL on {self.name}, tuned"
        tables = _counted(self.log_probs(loaded), self._stored.tables, bar, progress)
        found = list(self._stored.compare(tables, resized=self.over_tokens))
        kl = estimate(Outcomes([one.kl for one in found], [one.rows for one in found]))
        predictions, sizes, how = sum(one.rows for one in found), found[0].columns, self.how
        if sizes.base != sizes.tuned:
            share = percent(math.fsum(one.outside for one in found) / predictions)
            larger = "base" if sizes.base > sizes.tuned else "tuned model"
            how += f"; over the {sizes.shared:,} tokens of both models"
            how += f" (the others have {share} of the {larger}'s probability)"
        return Divergence(self.name, kl, predictions, self.per, how)


def _counted(tables: Tables, total: int | None, name: str, shown: bool) -> Iterator[Tensor]:
    with progress_bar(total, name, shown=shown) as bar:
        for table in tables:
            bar.update(1)
            yield table


def token_kl(name: str, sequences: Sequence[Sequence[int]], how: str) -> KL:
    """The divergence of a causal model's next token, after each token of given sequences."""

    def log_probs(loaded: Loaded) -> Tables:
        return next_token_log_probs(loaded, sequences, keep=True)  # the answers are tested too

    return KL(name, log_probs, "token", how)


def masked_kl(name: str, text: str, windows: int | None = None) -> KL:
    """The divergence of a masked model's predictions for 15 % of the tokens of a text."""

    def log_probs(loaded: Loaded) -> Tables:
        return islice((table for table, _ in masked_log_probs(loaded, text)), windows)

    how = "15 % of the tokens masked, the same for both models"
    return KL(name, log_probs, "masked token", how)


def class_kl(task: Classification) -> KL:
    """The divergence of a classifier's predictions."""

    def log_probs(loaded: Loaded) -> Tables:
        return (logits.float().log_softmax(-1)[None] for logits in task.logits(loaded))

    how = "over the classes of each sample"
    return KL(task.name, log_probs, "sample", how, over_tokens=False)


class ContextFreeKL(KL):
    """The divergence on texts that the base model generates: no data, no tokenizer.

    The divergence of two distributions over texts is the expectation, over the base's texts, of the
    summed divergences of their next tokens. Each of these is computed over the whole vocabulary, so
    that only the choice of texts is random. The figure is that sum per drawn token. ``tokens`` is
    the maximum length of a text, ``seed`` the random seed of all texts.
    """

    on_drawn_texts: ClassVar[bool] = True

    def __init__(self, texts: int = 64, tokens: int = 64, seed: int = 0) -> None:
        whole_number("context_free", texts, 1, MOST_TEXTS)
        whole_number("tokens", tokens, 1), natural_number("seed", seed)
        how = f"{texts} texts of at most {tokens} tokens, drawn from the base"
        super().__init__("context-free", self._log_probs, "token", how)
        self.texts, self.tokens, self.seed = texts, tokens, seed
        self._ids: list[list[int]] = []

    def remember(self, loaded: Loaded, folder: Path, *, progress: bool) -> None:
        self._ids = self.draw(loaded)
        super().remember(loaded, folder, progress=progress)

    def draw(self, loaded: Loaded) -> list[list[int]]:
        """Draw texts without their last token, after which nothing is predicted."""
        length, start = min(self.tokens + 1, loaded.limit), [loaded.first_token()]
        texts = draw_texts(loaded.model, [start] * self.texts, length, seed=self.seed)
        return [text[:-1] for text in texts]

    def _log_probs(self, loaded: Loaded) -> Tables:
        known = vocabulary_size(loaded.model)
        texts = (takewhile(lambda token: token < known, text) for text in self._ids)
        return next_token_log_probs(loaded, list(map(list, texts)))
