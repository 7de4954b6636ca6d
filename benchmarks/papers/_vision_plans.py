"""What is compared on images: recipes, their learning rates, and how often each is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import holdfast as hf


class Plan(NamedTuple):
    """What is trained: a recipe, the peak learning rate, the weight decay.

    If ``lr`` is None, it is the recipe's default, and with ``times`` a multiple of that.
    """

    recipe: hf.Recipe
    lr: float | None
    weight_decay: float = 0.0
    careful: bool = False  # 5 % warm-up, gradients clipped to 1
    times: float | None = None


FITTED, HELD = hf.LPFT(), hf.LPFT(hold_statistics=True)  # held: BatchNorm in its eval mode


def sgd(
    weight_decay: float = 5e-4, lr: float = 0.01, trainable: Any = FITTED, **stages: Any
) -> Plan:
    """As in the paper; decay pulls to 0, so that it is left out where something pulls to θ*."""
    recipe = hf.Recipe(trainable=trainable, update=hf.SGDUpdate(), **stages)
    return Plan(recipe, lr, weight_decay)


def adam(trainable: Any = FITTED, lr: float = 1e-3, **stages: Any) -> Plan:
    return Plan(hf.Recipe(trainable=trainable, **stages), lr)


def recadam(t0: float, width: float, **stages: Any) -> Plan:
    return adam(update=hf.RecAdamUpdate(t0=t0, width=width), **stages)


#: None is the linear probe alone. RecAdam's numbers are t0 and width in hundredths of the run.
MAIN: dict[str, Plan | None] = {
    "probe": None,
    "standard": sgd(),
    "flow": sgd(objective=hf.Flow()),
    "standard-adamw": adam(),
    "standard-adamw-0.2lr": adam(lr=2e-4),
    "l2-sp-adamw": adam(penalties=hf.L2SP()),
    "recadam-30-10": recadam(0.3, 0.1),
    "recadam-50-15": recadam(0.5, 0.15),
    "mofo": adam(update=hf.MoFOUpdate()),
}
ONCE: dict[str, Plan | None] = {
    "standard-0.2lr": sgd(lr=0.002),
    "standard-frozen-bn": sgd(trainable=HELD),
    "standard-adamw-frozen-bn": adam(trainable=HELD),
    "recadam-50-15-frozen-bn": recadam(0.5, 0.15, trainable=HELD),
    "standard-adamw-0.1lr": adam(lr=1e-4),
    "l2-sp": sgd(0.0, penalties=hf.L2SP(0.02, coupled=True)),
    "flow-normalized": sgd(objective=hf.Flow(normalize=True)),
    "recadam-50-06": recadam(0.5, 0.06),
    "recadam+flow-50-15": recadam(0.5, 0.15, objective=hf.Flow()),
}
MORE: dict[str, Plan | None] = {
    "l2-sp-strong": sgd(0.0, penalties=hf.L2SP(0.2, coupled=True)),
    "flow+l2-sp": sgd(0.0, objective=hf.Flow(), penalties=hf.L2SP(0.02, coupled=True)),
    "flow-adamw": adam(objective=hf.Flow()),
    "recadam-25-02": recadam(0.25, 0.02),
    "recadam-50-30": recadam(0.5, 0.3),
    "recadam+flow-50-06": recadam(0.5, 0.06, objective=hf.Flow()),
    "mofo+flow": adam(update=hf.MoFOUpdate(), objective=hf.Flow()),
    "hft-adamw": adam(trainable=hf.HFT()),
    "ewc-adamw": adam(penalties=hf.EWC(samples=256)),
}

RATES = (1e-4, 2e-4, 5e-4, 1e-3)


def careful(held: bool, lr: float | None, **stages: Any) -> Plan:
    """5 % warm-up and clipped gradients; BatchNorm's statistics are held, or those of batches."""
    recipe = hf.Recipe(trainable=HELD if held else FITTED, **stages)
    return Plan(recipe, lr, careful=True)


#: Plain fine-tuning with BatchNorm's statistics held and without.
PLAIN: dict[str, Plan | None] = {"probe": None} | {
    f"standard-{lr:g}{'-held' if held else ''}": careful(held, lr)
    for held in (True, False)
    for lr in RATES
}
RECALLS: dict[str, Callable[[float], Any]] = {
    "features": hf.Features,
    "old-head": partial(hf.Distill, temperature=1.0, head="old", inputs="varied"),
}
#: What the recall of ``holdfast`` is chosen from. With statistics held and 1e-3, a weaker recall
#: than the strongest one would keep even less.
CHOICES: dict[str, Plan | None] = {
    **{
        f"{name}-{strength:g}-{lr:g}": careful(False, lr, recall=recall(strength))
        for lr in (5e-4, 1e-3, 2e-3)
        for strength in (1.0, 0.3)
        for name, recall in RECALLS.items()
    },
    **{
        f"{name}-{strength:g}-{lr:g}-held": careful(True, lr, recall=recall(strength))
        for strength, lr in ((1.0, 5e-4), (0.3, 5e-4), (1.0, 1e-3))
        for name, recall in RECALLS.items()
    },
    **PLAIN,
    "standard-0.002": careful(False, 2e-3),
}
HOLDFAST: dict[str, Plan | None] = {
    "probe": None, "holdfast": Plan(hf.Recipe.preset("holdfast"), None, careful=True), **PLAIN
}  # fmt: skip
MODELS = ("mobilenet-v2", "efficientnet-lite0")
#: Of each table: what is run of each model, and with how many seeds.
TABLES = {
    "methods": [
        ("mobilenet-v2", MAIN, 3), ("efficientnet-lite0", MAIN, 2), ("mobilenet-v2", ONCE, 1),
        ("efficientnet-lite0", ONCE, 1), ("mobilenet-v2", MORE, 1),
    ],
    "holdfast": [(model, HOLDFAST, 2) for model in MODELS],
    "choose": [("mobilenet-v2", CHOICES, 1)],
}  # fmt: skip
