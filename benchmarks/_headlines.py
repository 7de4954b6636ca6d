"""What README.md and docs/choose.md tell of docs/results.md, with the figures of its results."""

from __future__ import annotations

from _page_tables import of_language, of_vision
from _pages import number, prose, table
from _summary import Point, Results, Table

#: Rows of the short table: what they are called, and the recipes in vision and in language.
ROWS = {
    "pretrained (images: with a new head)": ("probe", "pretrained"),
    "plain fine-tuning, AdamW": ("standard-adamw", "standard"),
    "– at a fifth of the learning rate": ("standard-adamw-0.2lr", "standard-0.2lr"),
    "L2-SP": ("l2-sp-adamw", "l2-sp"),
    "LoRA": (None, "lora"),
    "FLOW": ("flow-adamw", "flow"),
    "RecAdam": ("recadam-30-10", "recadam-0.3-0.1"),
    "RecAdam, wide shift": ("recadam-50-15", "recadam-0.5-0.15"),
    "plain fine-tuning, SGD": ("standard", None),
    "FLOW, SGD": ("flow", None),
}


def _tables() -> tuple[Table, Table]:
    return of_vision(Results("vision"), "mobilenet-v2"), of_language(Results("language"))


def frontier() -> str:
    """The caption of the picture that docs/results.md has too."""
    images, _ = _tables()
    probe, plain, ours, wide = (
        images.point(name) for name in ("probe", "standard-adamw", "recadam-30-10", "recadam-50-15")
    )
    kept = {p.recipe: number(p["imagenet"], 1) for p in (probe, plain, ours, wide)}
    seeds = sorted({images.point(recipe).seeds for recipe in images.recipes})
    return prose(
        f"""MobileNetV2, ImageNet → Flowers102; up (kept) and to the right (learned) is better. Of
        {kept[probe.recipe]} % on ImageNet plain fine-tuning with AdamW keeps {kept[plain.recipe]} %
        and RecAdam as it comes {kept[ours.recipe]} %, {_points(plain, ours)} of the target; with a
        wide shift (`t0=0.5, width=0.15`) {kept[wide.recipe]} %, {_points(plain, wide)}. With the
        pretrained BatchNorm statistics put back, {_span(seeds)} a point; every point can go on
        along its thin line by WiSE-FT.
        [Every method, on images and on text](docs/results.md)."""
    )


def _points(plain: Point, other: Point) -> str:
    gap = plain["target"] - other["target"]
    return f"for {number(gap, 1)} points" if gap > 0 else f"with {number(-gap, 1)} points more"


def _span(seeds: list[int]) -> str:
    low, high = seeds[0], seeds[-1]
    return f"{low}–{high} seeds" if low < high else f"{low} seed{'s' * (low > 1)}"


def headlines() -> str:
    """A few rows of docs/results.md: two experiments side by side."""
    images, texts = _tables()

    def cells(found: Table, recipe: str | None, fields: tuple[str, str], digits: int) -> list[str]:
        if recipe is None or recipe not in found.recipes:
            return ["—", "—"]
        return [number(found.point(recipe)[field], digits) for field in fields]

    rows = [
        [
            title,
            *cells(images, seen, ("target", "imagenet"), 1),
            *cells(texts, read, ("gsm8k_nll", "wikitext_nll"), 3),
        ]
        for title, (seen, read) in ROWS.items()
    ]
    head = ["", "learned: Flowers102, %", "kept: ImageNet, %"]
    return table([*head, "learned: GSM8K, loss", "kept: WikiText-2, loss"], rows)


def results() -> str:
    """A paragraph for docs/choose.md."""
    images, texts = _tables()
    kept = {recipe: number(images.point(recipe)["imagenet"], 1) for recipe in images.recipes}
    start = texts.point("pretrained")["wikitext_nll"]
    lost = {
        recipe: number(texts.point(recipe)["wikitext_nll"] - start, 2) for recipe in texts.recipes
    }
    return prose(
        f"""**The papers' experiments, with all methods side by side**, are on the page
        [Results](results.md); the advice above follows them. MobileNetV2 on Flowers102 with Adam
        keeps, of {kept["probe"]} % on ImageNet, {kept["standard-adamw"]} % by plain fine-tuning,
        {kept["standard-adamw-0.2lr"]} % at a fifth of the learning rate, {kept["flow-adamw"]} %
        with FLOW, {kept["l2-sp-adamw"]} % with L2-SP, {kept["recadam-30-10"]} % with RecAdam and
        {kept["recadam-50-15"]} % with its wide shift; with SGD {kept["standard"]} % by
        plain fine-tuning and {kept["flow"]} % with FLOW. SmolLM2-135M on GSM8K loses, in nats
        of WikiText-2, {lost["standard"]} by plain fine-tuning and {lost["standard-0.2lr"]} at a
        fifth of the learning rate, {lost["flow"]} with FLOW, {lost["l2-sp"]} with L2-SP,
        {lost["lora"]} with LoRA, {lost["recadam-0.3-0.1"]} with RecAdam and
        {lost["recadam-0.5-0.15"]} with its wide shift."""
    )
