"""The tables of docs/methods/index.md: the registry, and what a method costs."""

from __future__ import annotations

from collections.abc import Callable

from _pages import ROOT, table

from holdfast import registry

#: Beside AdamW.
COSTS = {
    "linear-probe": "less: the head's gradients and moments only",
    "lp-ft": "a pass over the data before training",
    "hft": "less: no gradients or moments of the frozen half",
    "gradual-unfreezing": "less while layers are frozen",
    "lora": "less: the adapters' gradients and moments only",
    "mixout": "θ*; all linear weights mixed anew in each pass",
    "random-init": "θ*",
    "flow": "a forward pass over the data before training",
    "distill": "a forward pass over the data, or one more a batch",
    "rehearsal": "a longer epoch",
    "sgd": "less: one moment instead of two",
    "recadam": "θ*; a step like AdamW's",
    "mofo": "the moments are read twice a step",
    "l2-sp": "θ*; a pass over the weights a step",
    "l1-sp": "θ*; a pass over the weights a step",
    "ewc": "θ* and F; a pass a step; gradients of 1000 samples before",
    "mas": "θ* and Ω; a pass a step; gradients of 1000 samples before",
    "sfa": "θ*; a pass over the weights at each average",
    "wise-ft": "θ*; a pass over the weights at the end",
}


def _page(name: str) -> str | None:
    """A method's page."""
    pages = sorted((ROOT / "docs" / "methods").glob("*.md"))
    found = [p.name for p in pages if f"In a preset: `{name}`" in p.read_text(encoding="utf-8")]
    return found[0] if found else None


def of_stage(stage: registry.Stage) -> Callable[[], str]:
    """What makes the table of a stage."""

    def made() -> str:
        rows = []
        for entry in registry.methods(stage):
            page, name = _page(entry.name), f"`{entry.name}`"
            first = f"[{name}]({page})" if page else name
            paper = f"[{entry.paper}]({entry.url})" if entry.url else ""
            cost = COSTS.get(entry.name, "—")
            rows.append([f"{first}<br>`{entry.cls.__name__}`", entry.summary, cost, paper])
        return table(["name, class", "what it does", "cost, beside AdamW", "paper"], rows)

    return made
