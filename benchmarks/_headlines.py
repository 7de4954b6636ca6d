"""What README.md and docs/choose.md tell of docs/results.md, with the figures of its results."""

from __future__ import annotations

from _page_tables import of_language, of_vision
from _pages import number, prose, table
from _summary import Results, Table

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
    names = ("probe", "standard-adamw", "standard-adamw-0.2lr", "recadam-50-15")
    probe, plain, lower, ours = map(images.point, names)
    kept, learned = (
        {p.recipe: number(p[field], 1) for p in (probe, plain, lower, ours)}
        for field in ("imagenet", "target")
    )
    own = ", ".join(number(p["imagenet_tuned_bn"], 1) for p in (plain, lower, ours))
    seeds = sorted({images.point(recipe).seeds for recipe in images.recipes})
    return prose(
        f"""MobileNetV2 learns Flowers102; up (kept) and to the right (learned) is better. Before,
        it has {kept[probe.recipe]} % on ImageNet and, with a new head, {learned[probe.recipe]} % on
        Flowers102. Plain fine-tuning with AdamW ends at {kept[plain.recipe]} and
        {learned[plain.recipe]} %, at a fifth of the learning rate at {kept[lower.recipe]} and
        {learned[lower.recipe]} %; RecAdam as above (wide shift), at the full rate, at
        {kept[ours.recipe]} and {learned[ours.recipe]} %. In all of them a new head was fitted
        first, then came 20 epochs. ImageNet with the pretrained BatchNorm statistics put back (with
        their own: {own} %); {_span(seeds)} a point, one standard error is .7 and .9 points.
        [Every method, on images and on text](docs/results.md)."""
    )


def _span(seeds: list[int]) -> str:
    low, high = seeds[0], seeds[-1]
    return f"{low}–{high} seeds" if low < high else f"{low} seed{'s' * (low > 1)}"


def headlines() -> str:
    """A few rows of docs/results.md: two experiments side by side."""
    images, texts = _tables()

    def cells(found: Table, recipe: str | None, fields: tuple[str, str], digits: int) -> list[str]:
        if recipe is None:
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
