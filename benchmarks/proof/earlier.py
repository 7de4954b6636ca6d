"""Settings that were run before the proof, in its form, until they are run by its protocol.

The runs are those of ``papers/encoders.py`` and of ``papers/vision.py --table holdfast``: plain
fine-tuning with WiSE-FT, and ``holdfast`` at the same defaults as today. Outcomes of single samples
are not recorded, so intervals use standard errors.

    python benchmarks/proof/earlier.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))

from _jobs import Record, write_runs

HERE = Path(__file__).resolve().parent
PAPERS = HERE.parent / "papers" / "results"


class Earlier(NamedTuple):
    """Where a setting comes from.

    Attributes:
        source: the file of its runs.
        part: the value that its runs have in the field ``field``.
        base: the recipe whose run has the figures of the pretrained model.
        points: the field of the runs that has a point per α.
        names: the figures of a point, in percent, by their names in the proof.
        about: what the record of the pretrained model says.
    """

    source: str
    field: str
    part: str
    base: str
    points: str
    names: Mapping[str, str]
    about: Record


def encoder(task: str, metric: str, chance: float, rows: int) -> Earlier:
    """Settings are chosen on one random half of dev, and reported on the other."""
    names = {"target_choose": "half_a", "target_report": "half_b", "stsb": "kept"}
    guess = {"target_choose": chance, "target_report": chance, "stsb": 0.0}
    counts = {"choose": -(-rows // 2), "report": rows // 2, "stsb": 1500}
    about = {"metric": metric, "chance": guess, "rows": counts}
    return Earlier("encoders", "task", task, "pretrained", "points", names, about)


def image_model(name: str) -> Earlier:
    """Settings are chosen on the images that are reported, which favors plain fine-tuning."""
    names = {"target_choose": "target", "target_report": "target", "imagenet": "imagenet"}
    guess = {"target_choose": 1 / 102, "target_report": 1 / 102, "imagenet": 1 / 1000}
    counts = {"choose": 819, "report": 819, "imagenet": 2000}
    about = {"metric": "accuracy", "chance": guess, "rows": counts}
    return Earlier("vision_holdfast", "model", name, "probe", "alpha", names, about)


SETTINGS = {
    "minilm_sst2": encoder("sst2", "accuracy", 0.5, 872),
    "minilm_cola": encoder("cola", "matthews", 0.0, 1043),
    "mobilenet-v2_flowers102": image_model("mobilenet-v2"),
    "efficientnet-lite0_flowers102": image_model("efficientnet-lite0"),
}


def converted(setting: Earlier, runs: Iterable[Record]) -> list[Record]:
    """The records of a setting, in the form of ``_stages.py``."""
    found = []
    for run in runs:
        if run.get(setting.field, setting.part) != setting.part:
            continue
        points = {alpha: figures(setting, point) for alpha, point in run[setting.points].items()}
        recipe, made = run["recipe"], {"made": run["made"]}
        if recipe == setting.base:
            (base,) = points.values()
            found.append({"plan": "pretrained", **setting.about, "points": {"base": base}, **made})
        if recipe == "pretrained":
            continue
        tuned = {"tuned": points.pop("1")}
        merged = {f"wise-ft-{alpha}": point for alpha, point in points.items()}
        plan = plan_of(recipe)
        family = "-".join(part for part in plan.split("-") if part[0].isalpha())
        found.append({
            "plan": plan, "family": family, "seed": run.get("seed", 0),
            "points": tuned | (merged if family.startswith("plain") else {}), **made,
        })  # fmt: skip
    return found


def plan_of(recipe: str) -> str:
    """The name of a recipe in the proof.

    >>> plan_of("standard-0.001-held"), plan_of("standard-1e-05"), plan_of("probe")
    ('plain-held-0.001', 'plain-1e-05', 'probe')
    """
    if not recipe.startswith("standard-"):
        return recipe
    rate = recipe.removeprefix("standard-")
    held = rate.endswith("-held")
    return f"plain-{'held-' if held else ''}{rate.removesuffix('-held')}"


def figures(setting: Earlier, point: Record) -> Record:
    """The figures of a point as shares."""
    return {
        name: round(point[field] / 100, 6)
        for name, field in setting.names.items()
        if field in point
    }


def main() -> None:
    for name, setting in SETTINGS.items():
        source = PAPERS / f"{setting.source}.json"
        record: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
        runs = converted(setting, record["runs"])
        used = sorted({run["made"] for run in runs})
        protocol = {
            "earlier": f"benchmarks/papers/results/{source.name}", **record["protocol"],
            "rules": "benchmarks/proof/PROTOCOL.md",
        }  # fmt: skip
        made = [record["made"][number] for number in used]
        runs = [run | {"made": used.index(run["made"])} for run in runs]
        write_runs(HERE / "results" / f"{name}.json", protocol, made, [], runs)


if __name__ == "__main__":
    main()
