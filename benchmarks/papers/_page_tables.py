"""The tables of docs/results.md on vision, language and what predicts forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from _pages import number, table
from _summary import Point, Results, Table, kept_at, spearman

#: What rows are called; those of a point on WiSE-FT's way end in @α.
VISION = {
    "probe": "pretrained body, new head (linear probe)",
    "standard": "plain fine-tuning, SGD",
    "standard@0.5": "– WiSE-FT, α .5",
    "standard-0.2lr": "– at a fifth of the rate",
    "standard-frozen-bn": "– BatchNorm's statistics frozen",
    "l2-sp": "L2-SP, SGD",
    "l2-sp-strong": "– ten times as strong",
    "flow": "FLOW, SGD",
    "flow@0.5": "– WiSE-FT, α .5",
    "flow-normalized": "– weights scaled to a mean of 1",
    "flow+l2-sp": "FLOW + L2-SP, SGD",
    "standard-adamw": "plain fine-tuning, AdamW",
    "standard-adamw@0.5": "– WiSE-FT, α .5",
    "standard-adamw-0.2lr": "– at a fifth of the rate",
    "standard-adamw-0.1lr": "– at a tenth",
    "standard-adamw-frozen-bn": "– BatchNorm's statistics frozen",
    "l2-sp-adamw": "L2-SP, AdamW",
    "l2-sp-adamw@0.5": "– WiSE-FT, α .5",
    "ewc-adamw": "EWC, AdamW",
    "hft-adamw": "HFT, AdamW",
    "flow-adamw": "FLOW, AdamW",
    "mofo": "MoFO",
    "mofo@0.5": "– WiSE-FT, α .5",
    "mofo+flow": "MoFO + FLOW",
    "recadam-25-02": "RecAdam, t0 .25, width .02",
    "recadam-30-10": "RecAdam, t0 .3, width .1",
    "recadam-30-10@0.5": "– WiSE-FT, α .5",
    "recadam-50-06": "RecAdam, t0 .5, width .06",
    "recadam-50-15": "RecAdam, t0 .5, width .15",
    "recadam-50-15-frozen-bn": "– BatchNorm's statistics frozen",
    "recadam-50-30": "RecAdam, t0 .5, width .3",
    "recadam+flow-50-06": "RecAdam + FLOW, t0 .5, width .06",
    "recadam+flow-50-15": "RecAdam + FLOW, t0 .5, width .15",
}
LANGUAGE = {
    "pretrained": "pretrained",
    "standard": "plain fine-tuning",
    "standard@0.7": "– WiSE-FT, α .7",
    "standard@0.5": "– WiSE-FT, α .5",
    "standard-0.5lr": "– at half the learning rate",
    "standard-0.2lr": "– at a fifth",
    "standard-0.2lr@0.7": "– at a fifth, WiSE-FT, α .7",
    "standard-0.1lr": "– at a tenth",
    "flow": "FLOW",
    "flow-token": "FLOW, by token",
    "l2-sp": "L2-SP",
    "l2-sp-0.5lr": "– at half the learning rate",
    "l2-sp-weak": "– a fifth as strong",
    "flow+l2-sp": "FLOW + L2-SP",
    "ewc": "EWC",
    "mofo": "MoFO",
    "mofo+flow": "MoFO + FLOW",
    "hft": "HFT",
    "hft+flow": "HFT + FLOW",
    "lora": "LoRA",
    "lora@0.7": "– WiSE-FT, α .7",
    "lora-low": "– at a third of its rate",
    "lora-high": "– at three times its rate",
    "lora+flow": "LoRA + FLOW",
    "recadam-0.25-0.02": "RecAdam, t0 .25, width .02",
    "recadam-0.3-0.1": "RecAdam, t0 .3, width .1",
    "recadam-0.3-0.1@0.7": "– WiSE-FT, α .7",
    "recadam-0.5-0.15": "RecAdam, t0 .5, width .15",
    "recadam-0.5-0.15-0.2lr": "– at a fifth of the rate",
    "recadam-0.5-0.3": "RecAdam, t0 .5, width .3",
    "recadam-0.5-0.6": "RecAdam, t0 .5, width .6",
    "recadam-0.5-0.15+flow": "RecAdam + FLOW, t0 .5, width .15",
    "recadam-0.5-0.3+flow": "RecAdam + FLOW, t0 .5, width .3",
}
TESTS = {
    "piqa": "PIQA", "arc_easy": "ARC-e", "arc_challenge": "ARC-c", "boolq": "BoolQ",
    "winogrande": "WinoGrande", "lambada": "LAMBADA", "mmlu": "MMLU",
}  # fmt: skip
NAMES = {"mobilenet-v2": "MobileNetV2", "efficientnet-lite0": "EfficientNet-Lite0"}
#: What recipes are compared at, set after the runs; on images two standard errors or more above the
#: linear probe.
TARGETS = {"mobilenet-v2": 92.5, "efficientnet-lite0": 91.5, "language": 0.65}


def of_vision(results: Results, model: str) -> Table:
    return Table(results.where(model=model), "alpha")


def of_language(results: Results) -> Table:
    return Table(results.runs, "points")


def known(found: Table, titles: Mapping[str, str]) -> list[str]:
    """The rows of what was run, in the order of the titles."""
    if unknown := [recipe for recipe in found.recipes if recipe not in titles]:
        raise KeyError(f"no titles for {', '.join(unknown)}")
    return [row for row in titles if row.split("@")[0] in found.recipes]


def point_of(found: Table, row: str) -> Point:
    recipe, _, alpha = row.partition("@")
    return found.point(recipe, float(alpha or 1))


def full_title(titles: Mapping[str, str], recipe: str) -> str:
    """A title that stands alone, where the table's goes on from a row above."""
    head = ""
    for name, title in titles.items():
        head = head if title.startswith("– ") else title
        if name == recipe:
            return title.replace("–", head, 1)
    raise KeyError(recipe)


def fields_of(where: str) -> tuple[str, str, str]:
    """Of a table: its start, what is learned, what is kept."""
    if where == "language":
        return "pretrained", "gsm8k_nll", "wikitext_nll"
    return "probe", "target", "imagenet"


def matched(
    found: Table, recipe: str, where: str, kept: str = "", at: float | None = None
) -> float | None:
    """What is kept at the target that recipes are compared at, or at another one."""
    start, target, field = fields_of(where)
    path = [*found.path(recipe), found.point(start)]
    wanted = TARGETS[where] if at is None else at
    return None if recipe == start else kept_at(path, target, wanted, kept or field)


def kept_beside(found: Table, alone: str, both: str, where: str) -> float:
    """What WiSE-FT on a recipe keeps, taken back to another recipe's target."""
    start, target, kept = fields_of(where)
    path = [*found.path(alone), found.point(start)]
    value = kept_at(path, target, found.point(both)[target], kept)
    if value is None:
        raise ValueError(f"{alone} nowhere has the target of {both}")
    return value


def diverged(found: Table, recipe: str) -> bool:
    """Whether a model of images learned nothing, and lost what its new head had."""
    return found.point(recipe)["target"] < found.point("probe")["target"] / 2


def vision(results: Results, model: str) -> str:
    found = of_vision(results, model)
    rows = []
    for name in known(found, VISION):
        point = point_of(found, name)
        cells = [number(point[f], 1) for f in ("imagenet", "imagenet_tuned_bn", "target")]
        cells.append(number((point["imagenet"] + point["target"]) / 2, 1))
        for kept in ("imagenet", "imagenet_tuned_bn"):
            cells.append("" if "@" in name else number(matched(found, name, model, kept), 1))
        title = VISION[name] + (", diverged" if diverged(found, point.recipe) else "")
        rows.append([title, *cells, number(point["distance"], 2), str(point.seeds)])
    at = f"ImageNet at Flowers102 {TARGETS[model]:g}"
    head = [NAMES[model], "ImageNet", "– own statistics", "Flowers102", "average", at]
    return table([*head, "– own statistics", "‖θ−θ*‖", "seeds"], rows)


def language(results: Results) -> str:
    """What is learned and kept, in losses."""
    found = of_language(results)
    rows = []
    for name in known(found, LANGUAGE):
        point = point_of(found, name)
        match = point.figures.get("gsm8k_match")
        cells = [number(point["gsm8k_nll"], 3), "" if match is None else number(100 * match, 1)]
        cells += [number(point[f], 3) for f in ("wikitext_nll", "mbpp_nll", "lambada_nll")]
        cells.append(number(100 * point["retained_accuracy"], 1))
        cells.append("" if "@" in name else number(matched(found, name, "language"), 3))
        cells.append(number(point["distance"], 0))
        rows.append([LANGUAGE[name], *cells, str(point.seeds)])
    head = ["", "GSM8K", "– exact, %", "WikiText-2", "MBPP", "LAMBADA", "seven tests, %"]
    at = f"WikiText-2 at GSM8K {TARGETS['language']:g}"
    return table([*head, at, "‖θ−θ*‖", "seeds"], rows)


def accuracies(results: Results) -> str:
    """The seven tests one by one."""
    found = of_language(results)
    rows = []
    for name in known(found, LANGUAGE):
        point = point_of(found, name)
        rows.append([LANGUAGE[name], *(number(100 * point[test], 1) for test in TESTS)])
    return "Accuracy in %, one by one:\n\n" + table(["", *TESTS.values()], rows)


#: Recipes without FLOW and with it.
OF_TEXTS = [
    ("standard", "flow"), ("l2-sp", "flow+l2-sp"), ("mofo", "mofo+flow"), ("hft", "hft+flow"),
    ("lora", "lora+flow"), ("recadam-0.5-0.15", "recadam-0.5-0.15+flow"),
    ("recadam-0.5-0.3", "recadam-0.5-0.3+flow"),
]  # fmt: skip
OF_PICTURES = [
    ("standard", "flow"), ("l2-sp", "flow+l2-sp"), ("standard-adamw", "flow-adamw"),
    ("mofo", "mofo+flow"), ("recadam-50-06", "recadam+flow-50-06"),
    ("recadam-50-15", "recadam+flow-50-15"),
]  # fmt: skip


class Addition(NamedTuple):
    """What FLOW changes: of the target, of what is kept, and beside WiSE-FT at its target."""

    alone: str
    target: float
    kept: float
    beside: float


def additions(found: Table, pairs: Sequence[tuple[str, str]], where: str) -> list[Addition]:
    _, target, kept = fields_of(where)
    digits = 3 if where == "language" else 1
    rows = []
    for alone, both in pairs:
        a, b = found.point(alone), found.point(both)
        changes = [round(b[f], digits) - round(a[f], digits) for f in (target, kept)]
        beside = b[kept] - kept_beside(found, alone, both, where)
        rows.append(Addition(alone, changes[0], changes[1], beside))
    return rows


def additivity(of_lm: Results, of_images: Results) -> str:
    """What FLOW changes, on top of each method it was run with."""
    texts, images = of_language(of_lm), of_vision(of_images, "mobilenet-v2")
    last = "– beside WiSE-FT at that target"

    def rows(found: list[Addition], titles: Mapping[str, str], digits: int) -> list[list[str]]:
        return [[titles[row.alone], *(_signed(x, digits) for x in row[1:])] for row in found]

    first = rows(additions(texts, OF_TEXTS, "language"), LANGUAGE, 3)
    second = rows(additions(images, OF_PICTURES, "mobilenet-v2"), VISION, 1)
    return (
        table(["FLOW added to", "GSM8K", "WikiText-2", last], first)
        + "\n\n"
        + table(["FLOW added to (MobileNetV2)", "Flowers102", "ImageNet", last], second)
    )


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def lost(points: Sequence[Point], field: str, base: Point, sign: float) -> list[float]:
    return [sign * (p[field] - base[field]) for p in points]


def correlations(of_images: Results, of_lm: Results) -> dict[str, dict[str, float]]:
    """By table: Spearman's ρ of what was lost with what might tell it, trained models only."""
    found: dict[str, dict[str, float]] = {}
    for model in NAMES:
        images = of_vision(of_images, model)
        trained = [r for r in images.recipes if r != "probe" and not diverged(images, r)]
        points = [images.point(r) for r in trained]
        gone = lost(points, "imagenet", images.point("probe"), -1)
        found[f"{NAMES[model]}: ImageNet accuracy ({len(points)} recipes)"] = {
            f: spearman([p[f] for p in points], gone) for f in ("distance", "kl")
        }
        gone = lost(points, "imagenet_tuned_bn", images.point("probe"), -1)
        found[f"– with the models' own BatchNorm statistics ({NAMES[model]})"] = {
            f: spearman([p[f] for p in points], gone) for f in ("distance", "kl")
        }
    texts = of_language(of_lm)
    points = [texts.point(r) for r in texts.recipes if r != "pretrained"]
    for field, name, sign in (
        ("wikitext_nll", f"SmolLM2: WikiText-2 loss ({len(points)} recipes)", 1),
        ("mbpp_nll", "SmolLM2: MBPP loss", 1),
        ("retained_accuracy", "SmolLM2: seven tests", -1),
    ):
        gone = lost(points, field, texts.point("pretrained"), sign)
        kinds = {"distance": "distance", "kl_gsm8k": "kl", "kl_context_free": "context-free"}
        found[name] = {to: spearman([p[f] for p in points], gone) for f, to in kinds.items()}
    return found


def predictors(of_images: Results, of_lm: Results) -> str:
    found = correlations(of_images, of_lm)
    kinds = ("distance", "kl", "context-free")
    rows = [[name, *(number(row.get(kind), 2) for kind in kinds)] for name, row in found.items()]
    head = ["lost", "distance ‖θ−θ*‖", "KL on the target's inputs", "KL, context-free"]
    return table(head, rows)
