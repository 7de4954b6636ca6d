r"""Self-replay: a language model rehearses texts sampled from itself before training.

Texts x are drawn once from the pretrained model p*, and the predictions on them are kept while the
model p learns the new task:

    Loss_T + strength · mean over replayed tokens of KL(p*(·|x_<t) ‖ p(·|x_<t))

No old data is needed, because a language model can generate samples of what it knows: Yang et al.,
*Context-Free Synthetic Data Mitigates Forgetting*, https://arxiv.org/abs/2505.13811; with the KL
divergence, *Self-Generated Replay*, https://arxiv.org/abs/2605.26097. The divergence from the
pretrained model, measured on the right inputs, predicts how much is forgotten: Shenfeld et al.,
*RL's Razor*, https://arxiv.org/abs/2509.04259.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from holdfast._torch.adapters import base_name, without_peft
from holdfast._torch.batch import evaluating
from holdfast._torch.checks import (
    above_zero,
    at_least_zero,
    file_name,
    natural_number,
    whole_number,
)
from holdfast._torch.fingerprint import fingerprint
from holdfast._torch.head_loss import divergence_beside, replay_divergence, teacher_of
from holdfast._torch.layers import within
from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.rng import generator_of
from holdfast._torch.teachers import AllTokens, KeptTokens
from holdfast.io.heads import model_kind
from holdfast.methods._base_model import BaseModel, base_model_of, precision
from holdfast.methods._budget import (
    BudgetController,
    Estimate,
    WayBack,
    check_that_all_can_return,
    estimate,
    keep_within,
    scale_learning_rate,
)
from holdfast.reference import Reference
from holdfast.scoring.draw import BLOCK
from holdfast.scoring.pool import Pool, draw_pool, pool_of_texts
from holdfast.scoring.predictions import kept_bytes
from holdfast.scoring.starts import default_starts, describe_starts, loaded
from holdfast.stages import (
    Checks,
    Cost,
    MedianLoss,
    Penalty,
    Planned,
    Recall,
    RecallTerm,
    Run,
    SearchRange,
    SearchSpace,
)

logger = logging.getLogger(__name__)

MOST_TOKENS = 4096 * 128  # of the texts to train on
HELD_OUT = 256  # texts at most to measure the divergence on, if there is a budget
_OBSERVED = 32  # of them per observation
_AT_A_TIME = 16  # of them at most in one call of the model
_OBSERVATIONS = 50  # per run, at most


@dataclass(frozen=True)
class SelfReplay(Recall):
    """Preserve the predictions on texts sampled from the pretrained model itself.

    The texts are drawn once, before training, and cached on disk with the pretrained model's
    probabilities of some tokens per position, so that no second model is in memory. Drawn texts may
    contain text that the model has memorized; the log says where they are stored.

    Args:
        strength: the weight of the divergence; 0 turns it off.
        share: texts per sample of the new task.
        fewest: the least number of texts per update, over all ranks. With fewer texts the gradient
            of the divergence is noisy, and the target gets worse.
        length: the maximum length of a text in tokens. A text ends at EOS, a chat after
            the first answer.
        top: the number of tokens whose probabilities are kept per position: three quarters are
            the likeliest ones, and the rest is sampled from the others, which gives an unbiased
            estimate of the divergence. If None, the whole vocabulary is compared: with adapters,
            the base is the same model with its adapters off; otherwise a frozen copy of the model
            stays in memory.
        texts: a file of your own texts to use instead of drawn ones. Needs a tokenizer.
        start: the id of the token with which drawn texts start. If None, BOS, else EOS; with the
            tokenizer of a chat model, half of the texts start where a user's first message begins.
        budget: the most that the model may forget: KL(base ‖ tuned) in nats per token, on texts of
            the base that are not trained on. The strength rises and the learning rate falls where
            necessary, and in the end the weights are moved toward the pretrained ones as far as
            necessary. If None, there is no limit.

    Example:
        >>> from holdfast import Recipe, SelfReplay
        >>> Recipe(recall=SelfReplay(share=1.0)).name
        'self-replay'
    """

    checks: ClassVar[Checks] = {
        "strength": at_least_zero,
        "share": above_zero,
        "fewest": partial(whole_number, least=1),
        "length": partial(whole_number, least=2),
        "budget": above_zero,
        "top": lambda name, top: None if top is None else whole_number(name, top, 2),
        "start": natural_number,
        "texts": file_name,
    }
    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}
    uses_base: ClassVar[bool] = True
    plotted: ClassVar[tuple[str, ...]] = ("kl",)

    strength: float = 1.0
    share: float = 0.5
    fewest: int = 8
    length: int = 128
    top: int | None = 64
    texts: str | None = None
    start: int | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and self.strength == 0:
            raise ValueError("a budget needs a strength above 0: leave out strength=0, or budget=")

    @property
    def interpolates(self) -> bool:
        """True with a budget."""
        return self.budget is not None

    @property
    def needs_reference(self) -> bool:
        """True with a budget: the weights may move toward θ*."""
        return self.interpolates

    @property
    def trains_on_drawn_texts(self) -> bool:
        """True unless it is off, or uses other texts."""
        return self.strength > 0 and self.texts is None

    @property
    def reads_data(self) -> bool:
        """False: the texts come from the model."""
        return False

    @property
    def changes_loss(self) -> bool:
        """False: the divergence is a term beside any loss."""
        return False

    def texts_per_update(self, samples: int) -> int:
        """The number of texts beside the samples of an update, over all ranks."""
        return max(self.fewest, round(self.share * samples))

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.1, 10.0, 1.0)}

    def log(self, run: Run) -> dict[str, float]:
        return run.recall.log() if isinstance(run.recall, ReplayTerm) else {}

    def prepare(self, run: Run) -> RecallTerm:
        if self.strength == 0:
            return RecallTerm()
        if self.budget is not None:
            check_that_all_can_return(run.model, run.anchors)
        with precision(run.model, run.autocast):
            pool = self._pool(run)
        base = base_model_of(run, _predictions) if self.top is None else None
        if self.budget is None:
            return ReplayTerm(self, pool, run, base)
        held_out = min(HELD_OUT, len(pool) // (2 if self.texts is None else 5))
        if not held_out:
            raise ValueError(
                f"{self.texts} has {len(pool)} texts of at most {self.length} tokens, but budget= "
                "needs at least 5, because a fifth of them is held out: pass more texts as texts=, "
                "or set a smaller length="
            )
        return BudgetedReplay(self, *pool.split(held_out), run, base)

    def cost(self, planned: Planned) -> Cost:
        """Texts beside the samples of each update, and a pool that is drawn and predicted before.

        Without kept predictions, a base model predicts the texts of each update.
        """
        if self.strength == 0:
            return Cost()
        replayed = self.texts_per_update(planned.samples) * self.length
        visits = planned.samples * planned.updates
        texts = self._counts(visits, planned.samples, planned.length)[1]
        texts += 0 if self.budget is None else min(HELD_OUT, texts)
        drawn = texts * self.length
        kept = 0 if self.top is None else kept_bytes(self.top, planned.outputs)
        cost = Cost(
            on_cpu=texts * (4 * self.length + 8 + kept * (self.length - 1)),
            trained=replayed,
            before_predicted=drawn,
            before_drawn=drawn if self.texts is None else 0,
        )
        if self.top is not None:
            return cost
        return replace(cost, copies=0 if planned.keeps_base else 1, predicted=replayed)

    def _count(self, run: Run) -> int:
        """The number of texts to train on."""
        data = run.data.dataset if isinstance(run.data, DataLoader) else run.data
        visits = run.visits
        if visits is None:
            visits = len(data) if hasattr(data, "__len__") else MOST_TOKENS // self.length
        used, count = self._counts(visits, run.update_size, _mean_length(data))
        if count < used:
            _warn_once(
                f"drawing {used} texts would take longer than the training: "
                f"{count} are drawn, and each is replayed several times"
            )
        return count

    def _counts(self, visits: int, update_size: int | None, mean_length: float) -> tuple[int, int]:
        """The number of texts that a run will use, and of those to train on; at least a block.

        A text takes about as long to draw as one of its length to train on. No more are drawn than
        training takes; texts of the user need no drawing.
        """
        most = MOST_TOKENS // self.length
        updates = visits / update_size if update_size else 0
        used = min(most, math.ceil(max(self.share * visits, updates * self.fewest)))
        affordable = max(BLOCK, visits * mean_length / self.length)
        if self.texts is not None:
            affordable = math.inf
        return used, max(BLOCK, math.ceil(min(used, affordable)))

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        if self.strength == 0 or model_kind(model) == "causal_lm":
            return None
        return (
            "SelfReplay draws texts from the model, so it needs a causal language model, got "
            f"{type(without_peft(model)).__name__}"
        )

    def _pool(self, run: Run) -> Pool:
        """The texts of the run.

        The seed of the run does not matter, so that all seeds share one cached pool.
        """
        if getattr(getattr(run.model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "SelfReplay needs predictions for the tokens of a text only, but prompt learning "
                "adds tokens to each text: use LoRA or other adapters, or another recall"
            )
        _refuse_new_head(run)
        if (limit := loaded(run.model, self.length).limit) < self.length:
            _warn_once(
                f"self-replay's texts have at most {limit} tokens, as many as the model accepts, "
                f"not length={self.length}"
            )
        count = self._count(run)
        count += 0 if self.budget is None else min(HELD_OUT, count)
        options: dict[str, Any] = {
            "length": self.length, "top": self.top, "cache": run.cache, "progress": run.progress,
        }  # fmt: skip
        if self.texts is not None:
            options |= {"tokenizer": run.tokenizer, "start": self.start, "count": count}
            return pool_of_texts(run.model, self.texts, **options)
        starts = default_starts(run.model, run.tokenizer, start=self.start, length=self.length)
        logger.info(describe_starts(starts, run.tokenizer))
        pool = draw_pool(run.model, count, starts=starts, **options)
        if pool.path is not None and rank_and_world()[0] == 0:
            _warn_once(
                f"texts of the pretrained model are stored in {pool.path}; they may contain "
                "memorized text. Delete the directory to remove them"
            )
        return pool


def _mean_length(data: Any) -> float:
    """The mean number of tokens of the first samples; infinite if this is not known."""
    try:
        some = [len(data[i]["input_ids"]) for i in range(min(64, len(data)))]
        return sum(some) / len(some)
    except (AttributeError, KeyError, IndexError, TypeError, ZeroDivisionError):
        return math.inf


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _refuse_new_head(run: Run) -> None:
    """Raise ValueError if the model would write its texts with random weights."""
    head = without_peft(run.model).get_output_embeddings()
    written = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    for name, p in run.model.named_parameters():
        if within(base_name(name), run.new) and id(p) in written:
            raise ValueError(
                f"SelfReplay draws texts from the pretrained model, but {base_name(name)} is new "
                "and predicts at random: use another recall, or leave out new="
            )


def _predictions(base: nn.Module, batch: Mapping[str, Tensor]) -> AllTokens:
    """The predictions of the base at the positions ``where`` of a batch."""
    inputs = {name: value for name, value in batch.items() if name != "where"}
    return teacher_of(base, inputs, batch["where"])


class ReplayTerm(RecallTerm):
    """The divergence on the texts of a pool. The texts of an update depend on its number only."""

    def __init__(self, settings: SelfReplay, pool: Pool, run: Run, base: BaseModel | None) -> None:
        self.settings, self.pool, self.base = settings, pool, base
        self.seed, self.autocast = run.seed, run.autocast
        self._last: list[Tensor] = []  # the divergences of the last update, per micro-batch
        self._update, self._tokens, self._scale = 0, 1, 0.0  # of the last update
        self._shares: deque[tuple[Tensor, ...]] = deque()  # its texts, with their weights

    @property
    def strength(self) -> float:
        return self.settings.strength

    def plan(self, model: nn.Module, update: int, samples: int, micro_batches: int) -> None:
        if self._shares and update == self._update + 1:
            raise RuntimeError(
                f"{len(self._shares)} micro-batches of update {self._update} did not replay their "
                "texts: pass the number of micro-batches to recall.plan, and compute the loss of "
                "each within recall.beside"
            )
        texts = self.settings.texts_per_update(samples)
        chosen = self.texts_of(update, texts)
        self._last, self._tokens = [], int(self.pool.counts[chosen].sum())
        rank, world = rank_and_world()
        mine = chosen[rank::world]
        # All ranks run equally many texts. One without a text of its own runs one with weight 0.
        missing = -(-texts // world) - len(mine)
        weights = torch.tensor([1.0] * len(mine) + [0.0] * missing)
        mine = torch.cat([mine, chosen[:1].repeat(missing)])
        parts = mine.tensor_split(micro_batches), weights.tensor_split(micro_batches)
        self._update, self._shares = update, deque(zip(*parts, strict=True))
        self._scale = self.strength * world / self._tokens

    @contextmanager
    def beside(self, model: nn.Module) -> Iterator[Callable[[], Tensor | float]]:
        if not self._update:
            raise RuntimeError("call run.recall.plan(...) before each update")
        rows, weights = self._shares.popleft() if self._shares else (torch.empty(0),) * 2
        if not len(rows):
            yield lambda: 0.0
            return
        with divergence_beside(model, **self._texts(model, self.pool, rows, weights)) as divergence:

            def recalled() -> Tensor:
                kl = divergence()
                self._last.append(kl.detach())
                return self._scale * kl

            yield recalled

    def divergence(self, model: nn.Module, pool: Pool, rows: Tensor) -> Tensor:
        """Σ KL(base ‖ model) over the tokens of some texts of a pool."""
        return replay_divergence(model, **self._texts(model, pool, rows))

    def _texts(
        self, model: nn.Module, pool: Pool, rows: Tensor, weights: Tensor | None = None
    ) -> dict[str, Any]:
        """Some texts and what the base predicts there, as arguments of a divergence."""
        device = next(model.parameters()).device
        batch = pool.batch(rows, device)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if self.base is None:
            teacher: Any = KeptTokens(batch.ids, batch.log_probs, batch.rest, pool.sampled)
        else:
            teacher = self.base(model, {**inputs, "where": batch.where})
        per_position = None
        if weights is not None and not bool((weights == 1).all()):
            per_position = weights.repeat_interleave(pool.counts[rows]).to(device)
        return {
            "inputs": inputs, "where": batch.where, "teacher": teacher, "weights": per_position
        }  # fmt: skip

    def texts_of(self, update: int, texts: int) -> Tensor:
        """The texts of an update: each text of the pool once before any is repeated."""
        size = len(self.pool)
        round_, first = divmod((update - 1) * texts, size)
        rounds = range(round_, round_ + -(-(first + texts) // size))
        orders = [
            torch.randperm(size, generator=generator_of("replay", self.seed, r)) for r in rounds
        ]
        return torch.cat(orders)[first : first + texts]

    def identity(self) -> dict[str, Any]:
        pool = self.pool
        return {"texts": len(pool), "pool": fingerprint([pool.tokens, pool.log_probs])}

    def log(self) -> dict[str, float]:
        """The divergence of the last update on this rank, in nats per token, and its term."""
        if not self._last:
            return {}
        _, world = rank_and_world()
        kl = float(torch.stack(self._last).sum()) * world / self._tokens
        return {"kl": kl, "recall": self.strength * kl}


class BudgetedReplay(ReplayTerm):
    """Self-replay whose divergence on held-out texts stays within a budget.

    Attributes:
        observed: the last measured divergence on held-out texts.
        alpha: the share of the way from θ* that was left in the end; 1 before.
    """

    def __init__(
        self, settings: SelfReplay, pool: Pool, held_out: Pool, run: Run, base: BaseModel | None
    ) -> None:
        super().__init__(settings, pool, run, base)
        self.held_out, self.controller = held_out, BudgetController(cast(float, settings.budget))
        self.observed, self.alpha = math.nan, 1.0
        self._every, self._peak = 1, 0.0
        self._optimizer: Optimizer | None = None

    @property
    def strength(self) -> float:
        return self.settings.strength * self.controller.strength_factor

    def attach(self, run: Run) -> None:
        self._optimizer = optimizer = cast(Optimizer, run.optimizer)
        self._every = max(1, math.ceil(run.total_updates / _OBSERVATIONS))
        self._peak = max(group["lr"] for group in optimizer.param_groups)
        controller = self.controller
        scale_learning_rate(optimizer, lambda: controller.lr_factor)

    @property
    def penalties(self) -> tuple[Penalty, ...]:
        """The way back to θ* where the divergence is too large."""
        return (WayBack(self.controller),)

    def plan(self, model: nn.Module, update: int, samples: int, micro_batches: int) -> None:
        self.controller.way_back = 0.0
        if update > 1 and (update - 1) % self._every == 0:
            self._observe(model, (update - 1) // self._every)
        super().plan(model, update, samples, micro_batches)

    def _observe(self, model: nn.Module, number: int) -> None:
        first = number * _OBSERVED % len(self.held_out)
        some = torch.arange(first, min(first + _OBSERVED, len(self.held_out)))
        self.observed = self.measure(model, some).value
        groups = cast(Optimizer, self._optimizer).param_groups
        lr = max(float(group["lr"]) for group in groups)
        self.controller.observe(self.observed, lr / self._peak if self._peak else 0.0)

    @torch.no_grad()
    def measure(self, model: nn.Module, some: Tensor, groups_at_least: int = 1) -> Estimate:
        """KL(base ‖ model) on held-out texts, in nats per token. Each rank runs some of them.

        The error is that of groups of texts, so it needs some groups.
        """
        rank, world = rank_and_world()
        groups = some.split(min(_AT_A_TIME, math.ceil(len(some) / groups_at_least)))
        # All ranks run equally many. One without a group of its own runs the last one again.
        mine = [min(n + rank, len(groups) - 1) for n in range(0, len(groups), world)]
        with evaluating(model), precision(model, self.autocast):
            sums = [self.divergence(model, self.held_out, groups[number]) for number in mine]
        found = gathered(torch.stack(sums).double().cpu())
        counts = torch.stack([self.held_out.counts[group].sum() for group in groups])
        # Rank r has the groups r, r + world, …
        return estimate(torch.stack(found, 1).flatten()[: len(groups)], counts.double())

    def on_merged(self, model: nn.Module, reference: Reference | None) -> None:
        everything = torch.arange(len(self.held_out))
        self.alpha, self.observed = keep_within(
            self.controller.budget, model, reference, lambda now: self.measure(now, everything, 8)
        )

    def log(self) -> dict[str, float]:
        controller = self.controller
        found = {"strength": self.strength, "lr_factor": controller.lr_factor}
        if not math.isnan(self.observed):
            found["held_out_kl"] = self.observed
        return super().log() | found

    def state_dict(self) -> dict[str, Any]:
        return {"u": self.controller.u, "observed": self.observed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.u, self.observed = state["u"], state["observed"]
