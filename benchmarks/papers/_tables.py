"""The tables of docs/results-papers.md, one function per table; benchmarks/pages.py calls them."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import _epochs
import _sizes
import numpy as np
from _markdown import SPEC, number, signed, table
from _summary import (
    CONTEXT_FREE,
    MODELS,
    TARGETS,
    Medians,
    Run,
    comparison,
    goals,
    kept_at,
    mean_points,
    over_tasks,
    read,
    runs_of,
)
from scipy import stats

SEEDS = 5
GLUE = {"cola": "CoLA", "stsb": "STS-B", "mrpc": "MRPC", "rte": "RTE", "sst2": "SST-2"}
TESTS = {
    "piqa": "PIQA", "arc_easy": "ARC-e", "arc_challenge": "ARC-c", "boolq": "BoolQ",
    "winogrande": "WinoGrande", "lambada": "LAMBADA", "mmlu": "MMLU",
}  # fmt: skip
ENCODER_FIELDS = ("target", "kept")
ByTask = dict[str, list[Run]]


def _glue_runs(**wanted: Any) -> ByTask:
    return {task: runs_of("glue", task=task, **wanted) for task in GLUE}


def _glue_row(name: str, by_task: ByTask, field: str, largest: bool = False) -> list[str]:
    """Medians per task and their mean; (n) marks a cell with another number of seeds."""
    medians = [statistics.median(run[field] for run in runs) for runs in by_task.values()]
    cells = []
    for runs, median in zip(by_task.values(), medians, strict=True):
        most = f" / {number(max(run[field] for run in runs), 1)}" if largest else ""
        few = f" ({len(runs)})" if len(runs) != SEEDS else ""
        cells.append(f"{number(median, 1)}{most}{few}")
    complete = all(len(runs) == SEEDS for runs in by_task.values())
    return [name, *cells, number(statistics.mean(medians), 1) if complete else "—"]


def _glue_table(rows: list[list[str]]) -> str:
    return table(["", *GLUE.values(), "mean"], rows)


def glue_chosen(by: str) -> str:
    """RecAdam at the setting chosen per task: on ``dev`` itself, or on one half of it."""
    field = {"dev": "dev", "half_a": "half_b"}[by]
    names = {"pi": "RecAdam, from θ* (PI)", "ri": "RecAdam, from random weights (RI)"}
    rows = [_glue_row("plain Adam", _glue_runs(method="vanilla"), field, by == "dev")]
    for start, name in names.items():
        choice = {task: read("glue")["protocol"]["choice"][f"{task}-{start}"][by] for task in GLUE}
        found = {
            task: runs_of("glue", task=task, method=start, k=k, t0=t0)
            for task, (k, t0) in choice.items()
        }
        rows.append(_glue_row(name, found, field, by == "dev"))
    return _glue_table(rows)


def glue_settings(field: str) -> str:
    """Settings that are the same for all tasks: ``dev`` or ``distance``."""
    found = {"plain Adam": _glue_runs(method="vanilla")}
    for part, title in ((0.5, "half"), (0.2, "one fifth of")):
        found[f"plain Adam, {title} the learning rate"] = _glue_runs(method=f"vanilla-{part:g}lr")
    for t0, width in read("glue")["protocol"]["layouts"].values():
        runs = _glue_runs(method="layout", t0=t0, width=width)
        found[f"RecAdam, t0 {t0:g}, width {width:g}"] = runs
    return _glue_table([_glue_row(name, by_task, field) for name, by_task in found.items()])


def glue_coupled() -> str:
    """The penalty inside the gradient, and decoupled from it."""
    ((k, t0),) = {(r["k"], r["t0"]) for r in runs_of("glue", method="coupled")}
    weak, _ = read("glue")["protocol"]["coupled_gammas"]
    ways = {
        "decoupled": _glue_runs(method="pi", k=k, t0=t0),
        "coupled": _glue_runs(method="coupled"),
        f"coupled, γ = {weak:g}": _glue_runs(method="coupled-weak"),
    }
    first = {task: [r for r in runs if r["seed"] == 0] for task, runs in ways["decoupled"].items()}
    rows = [_glue_row(name, by_task, "dev") for name, by_task in ways.items()]
    rows.insert(1, _glue_row("decoupled, seed 0", first, "dev"))
    rows += [_glue_row(f"‖θ − θ*‖, {n}", by_task, "distance") for n, by_task in ways.items()]
    return _glue_table(rows)


def _rows_of(found: Medians, titles: dict[str, str]) -> list[str]:
    """The rows that were run, in the order of the titles."""
    if unknown := [recipe for recipe in found.recipes if recipe not in titles]:
        raise KeyError(f"tables.yaml has no titles for {', '.join(unknown)}")
    return [row for row in titles if row.split("@")[0] in found.recipes]


def vision(model: str) -> str:
    found, rows = Medians(model), []
    for name in _rows_of(found, SPEC["vision"]):
        point = found.point(name)
        cells = [number(point[f], 1) for f in ("imagenet", "imagenet_tuned_bn", "target")]
        cells.append(number((point["imagenet"] + point["target"]) / 2, 1))
        for kept in ("imagenet", "imagenet_tuned_bn"):
            cells.append("" if "@" in name else number(found.matched(name, kept), 1))
        title = SPEC["vision"][name] + (", diverged" if found.diverged(point.recipe) else "")
        rows.append([title, *cells, number(point["distance"], 2), str(point.seeds)])
    at = f"ImageNet at Flowers102 {TARGETS[model]:g}"
    head = [MODELS[model], "ImageNet", "– own statistics", "Flowers102", "average", at]
    return table([*head, "– own statistics", "‖θ−θ*‖", "seeds"], rows)


def language() -> str:
    found, rows = Medians("language"), []
    for name in _rows_of(found, SPEC["language"]):
        point = found.point(name)
        match = point.figures.get("gsm8k_match")
        cells = [number(point["gsm8k_nll"], 3), "" if match is None else number(100 * match, 1)]
        cells += [number(point[f], 3) for f in ("wikitext_nll", "mbpp_nll", "lambada_nll")]
        cells.append(number(100 * point["retained_accuracy"], 1))
        cells.append("" if "@" in name else number(found.matched(name), 3))
        distance = number(point["distance"], 0)
        rows.append([SPEC["language"][name], *cells, distance, str(point.seeds)])
    head = ["", "GSM8K", "– exact, %", "WikiText-2", "MBPP", "LAMBADA", "seven tests, %"]
    at = f"WikiText-2 at GSM8K {TARGETS['language']:g}"
    return table([*head, at, "‖θ−θ*‖", "seeds"], rows)


def _merge_title(run: Run) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in run["settings"].items())
    title: str = SPEC["merges"][run["method"]]
    both = " of both seeds" if len(run["seeds"]) > 1 else ""
    return f"{title}{both}, {settings}" if settings else f"{title}{both}"


def _merged_runs() -> dict[str, dict[float, Run]]:
    """The runs of every merge by learning rate; of the tuned models themselves, the first seed."""
    found: dict[str, dict[float, Run]] = {}
    for run in runs_of("merges"):
        found.setdefault(_merge_title(run), {}).setdefault(run["rate"], run)
    return found


def merges() -> str:
    """Every merge of the same tuned checkpoints."""
    fields = {"gsm8k_nll": "GSM8K", "wikitext_nll": "WikiText-2", "retained_accuracy": "tests, %"}
    rates = sorted({run["rate"] for run in runs_of("merges")}, reverse=True)
    rows = []
    for title, by_rate in _merged_runs().items():
        points = [by_rate[rate]["point"] for rate in rates]
        cells = [
            number(100 * point[f], 1) if f == "retained_accuracy" else number(point[f], 3)
            for point in points
            for f in fields
        ]
        rows.append([title, *cells])
    return table(
        ["", *(f"{head}, lr {rate:g}" for rate in rates for head in fields.values())], rows
    )


def merges_at_target() -> str:
    """The lowest retained loss of each method whose target loss is low enough."""
    rates, wanted = sorted({r["rate"] for r in runs_of("merges")}, reverse=True), (0.62, 0.66)
    methods: dict[str, list[Run]] = {}
    for run in runs_of("merges"):
        both = " of both seeds" if len(run["seeds"]) > 1 else ""
        if run["seeds"] != [1]:
            methods.setdefault(f"{SPEC['merges'][run['method']]}{both}", []).append(run)
    rows = []
    for method, runs in methods.items():
        cells = []
        for rate, most in ((rate, most) for rate in rates for most in wanted):
            kept = [
                run["point"]["wikitext_nll"]
                for run in runs
                if run["rate"] == rate and run["point"]["gsm8k_nll"] <= most
            ]
            cells.append(number(min(kept), 3) if kept else "—")
        rows.append([method, *cells])
    heads = [f"lr {rate:g}, GSM8K ≤ {most:g}" for rate in rates for most in wanted]
    return table(["WikiText-2", *heads], rows)


def accuracies() -> str:
    """The seven tests of the language models one by one."""
    found = Medians("language")
    rows = [
        [SPEC["language"][name], *(number(100 * found.point(name)[test], 1) for test in TESTS)]
        for name in _rows_of(found, SPEC["language"])
    ]
    return table(["", *TESTS.values()], rows)


def flow_added(model: str) -> str:
    """How FLOW changes each method that it was run with."""
    found, digits = Medians(model), 3 if model == "language" else 1
    titles, rows = SPEC["language" if model == "language" else "vision"], []
    for alone, both in SPEC["flow_pairs"][model]:
        a, b = found.point(alone), found.point(both)
        changes = [round(b[f], digits) - round(a[f], digits) for f in (found.learned, found.kept)]
        path = [*found.path(alone), found.point(found.base)]
        reached = kept_at(path, found.learned, b[found.learned], found.kept)
        if reached is None:
            raise ValueError(f"{alone} does not reach the target of {both}")
        cells = [signed(x, digits) for x in (*changes, b[found.kept] - reached)]
        rows.append([titles[alone], *cells])
    names = ["GSM8K", "WikiText-2"] if model == "language" else ["Flowers102", "ImageNet"]
    head = "FLOW added to" + ("" if model == "language" else f" ({MODELS[model]})")
    return table([head, *names, "– compared with WiSE-FT at that target"], rows)


def predictors() -> str:
    """Spearman's ρ between what was lost and what can be measured without a test."""
    losses = [(model, field) for model in MODELS for field in ("imagenet", "imagenet_tuned_bn")]
    losses += [("language", f) for f in ("wikitext_nll", "mbpp_nll", "retained_accuracy")]
    rows = []
    for model, field in losses:
        found = Medians(model)
        trained = [r for r in found.recipes if r != found.base and not found.diverged(r)]
        points = [found.point(recipe) for recipe in trained]
        sign = 1 if field.endswith("_nll") else -1
        names = {
            "imagenet": f"{MODELS.get(model)}: ImageNet accuracy ({len(points)} recipes)",
            "imagenet_tuned_bn": f"{MODELS.get(model)}: ImageNet accuracy, own statistics",
            "wikitext_nll": f"SmolLM2: WikiText-2 loss ({len(points)} recipes)",
            "mbpp_nll": "SmolLM2: MBPP loss",
            "retained_accuracy": "SmolLM2: seven tests",
        }
        kinds = ["distance", *(["kl_gsm8k", CONTEXT_FREE] if model == "language" else ["kl"])]
        cells = []
        for kind in kinds:
            # On texts that a recipe was trained on, a divergence says nothing about other texts.
            some = [p for p in points if not (kind == CONTEXT_FREE and found.rehearses(p.recipe))]
            rho = stats.spearmanr([p[kind] for p in some], [sign * p[field] for p in some])
            few = f" ({len(some)} recipes)" if len(some) < len(points) else ""
            cells.append(f"{number(rho.statistic)}{few}")
        rows.append([names[field], *cells, *["—"] * (3 - len(cells))])
    head = ["lost", "distance ‖θ−θ*‖", "KL on the target's inputs", "context-free KL"]
    return table(head, rows)


def language_goals() -> str:
    """What ``holdfast`` should reach on language, and what it reaches."""
    return goals(mean_points(runs_of("language")), list(TESTS))


def encoders() -> str:
    """Every recipe at α = 1, task by task: the target, and STS-B after it."""
    runs, tasks = runs_of("encoders"), read("encoders")["protocol"]["tasks"]
    by_task = [mean_points(r for r in runs if r.get("task", task) == task) for task in tasks]
    by_task.append(mean_points(over_tasks(runs, ENCODER_FIELDS)))
    rows = []
    for recipe, title in SPEC["encoders"].items():
        cells = [
            number(mean.means.get(field), 1)
            for points in by_task
            for mean in [points[recipe, "0" if recipe == "pretrained" else "1"]]
            for field in ENCODER_FIELDS
        ]
        rows.append([title, *cells])
    names = [*(GLUE[task] for task in tasks), "mean"]
    return table(["", *(head for name in names for head in (name, "– STS-B"))], rows)


def images() -> str:
    """Every recipe at α = 1, model by model, with the model's own statistics."""
    rows = []
    by_model = [mean_points(runs_of("vision_holdfast", model=m), "alpha") for m in MODELS]
    for recipe, title in SPEC["images"].items():
        cells = [
            number(points[recipe, "1"].means[field], 1)
            for points in by_model
            for field in COMPARED["vision_holdfast"][1]
        ]
        rows.append([title, *cells])
    heads = [f"{model}: {name}" for model in MODELS.values() for name in ("Flowers102", "ImageNet")]
    return table(["", *heads], rows)


def rates() -> str:
    """What the defaults of self-replay were chosen from, at α = 1."""
    points, fields = mean_points(runs_of("language_rates")), SPEC["rates_fields"]
    rows = [
        [title, *(number(points[recipe, "1"].means[f"{field}_nll"], 3) for field in fields)]
        for recipe, title in SPEC["rates"].items()
        if (recipe, "1") in points  # some runs are missing
    ]
    return table(["", *fields.values()], rows)


def epochs() -> str:
    """What the learning rate by samples and epochs was chosen from, and the choice."""
    record = read("language_epochs")
    done = {run["run"]: run for run in record["runs"]}
    (base,) = done["epochs-pretrained"]["points"].values()
    curves, rows = _epochs.losses(done), []
    root, power = _epochs.chosen(curves)
    for case, curve in curves.items():
        (task, samples, visits), cells = case, []
        for factor in _epochs.FACTORS:
            if factor not in curve:
                cells.append("—")
                continue
            (point,) = done[_epochs.name_of(case, factor)]["points"].values()
            learned = 100 * (1 + min(curve.values()) - curve[factor])
            kept = min(100 * base[test] / point[test] for test in _epochs.KEPT)
            cells.append(f"{number(learned, 1)} / {number(kept, 1)}")
        rule = _epochs.LR * _epochs.factor_of(samples, visits, root, power)
        rows.append([_CASES[task], f"{samples:,}", str(visits), *cells, f"{rule:.1e}"])
    heads = [f"{_epochs.LR * factor:g}" for factor in _epochs.FACTORS]
    others = [
        _epochs.chosen({case: curve for case, curve in curves.items() if case != left})
        for left in curves
    ]
    same = sum(pair == (root, power) for pair in others)
    text = (
        f"Columns are learning rates, cells are *learned / kept* in percent, of one seed. The rule "
        f"chose the root {root:g} and the power {power:g}. It is not very certain: without one of "
        f"the cases it chooses the same in {same} of {len(others)}, and otherwise powers from "
        f"{min(power for _, power in others):g} to {max(power for _, power in others):g}."
    )
    return f"{table(['', 'samples', 'epochs', *heads, 'chosen'], rows)}\n\n{text}"


def sizes() -> str:
    """What the learning rate of a larger language model was chosen from, and the choice."""
    done = {run["run"]: run for run in read("language_sizes")["runs"]}
    found = {case: _sizes.figures(done, case) for case in _sizes.CASES}
    rates = sorted(_sizes.RATES)
    rows = [
        [_CASES[task], f"{samples:,}", str(visits),
         *("{:.1f} / {:.1f}".format(*found[task, samples, visits][rate]) for rate in rates)]
        for task, samples, visits in _sizes.CASES
    ]  # fmt: skip
    means = [np.mean([one[rate] for one in found.values()], axis=0) for rate in rates]
    rows.append(["mean", "", "", *("{:.1f} / {:.1f}".format(*mean) for mean in means)])
    heads = ["", "samples", "epochs", *(f"{rate:g}" for rate in rates)]
    adapters = {run["lr"]: _sizes.of_run(done, _sizes.CASES[0], name) for name, run in done.items()
                if name.startswith("sizes-lora")}  # fmt: skip
    each = ", ".join("{:.1f} / {:.1f} at {:g}".format(*adapters[lr], lr) for lr in sorted(adapters))
    text = (
        "Columns are learning rates for 3,000 samples and one epoch; those of the other cases are "
        "lower, by the rule above. Cells are *learned / kept* in percent, of one seed. Chosen: "
        f"{_sizes.chosen(found):g}. LoRA (r = 16) with self-replay on the first case, in percent "
        f"of the same gain: {each}."
    )
    return f"{table(heads, rows)}\n\n{text}"


_CASES = {"math": "MATH", "medmcqa": "MedMCQA"}


#: Of a results file: where the points of its runs are, and the fields to be better in.
COMPARED = {
    "encoders": ("points", ENCODER_FIELDS),
    "vision_holdfast": ("alpha", ("target", "imagenet_tuned_bn")),
}


def compared(name: str, part: str = "") -> str:
    """All points of WiSE-FT with their standard errors, and what is better than ``holdfast``.

    The part is a task or a model. Without one, tasks are averaged.
    """
    (key, fields), runs = COMPARED[name], runs_of(name)
    if part:
        runs = [run for run in runs if part == run.get("task", run.get("model", part))]
    elif name == "encoders":
        runs = over_tasks(runs, fields)
    points = {
        place: replace(
            mean, means={field: mean.means[field] for field in fields if field in mean.means}
        )
        for place, mean in mean_points(runs, key).items()
    }
    return comparison(points, fields)


#: Of results whose names are not those of their scripts: how the script is called.
SCRIPTS = {
    "vision_holdfast": "vision.py --table holdfast",
    "vision_choose": "vision.py --table choose",
    "encoders_choose": "encoders.py --choose",
}


def source(name: str) -> str:
    """Where the figures of a section come from."""
    record = read(name)
    machines = dict.fromkeys(
        f"{m['device']}, torch {m['versions']['torch']}, {m['date']}" for m in record["made"]
    )
    commits = [m["versions"].get("commit") for m in record["made"]]
    early = sum(commits[run["made"]] is None for run in record["runs"])
    text = (
        f"[{name}.json](../benchmarks/papers/results/{name}.json): {len(record['runs'])} runs of "
        f"`benchmarks/papers/{SCRIPTS.get(name, f'{name}.py')}`; {'; '.join(machines)}, commit "
        f"{', '.join(sorted(set(filter(None, commits))))}"
    )
    text += f" ({early} runs before commits were recorded)." if early else "."
    return text + (f" {len(record['missing'])} runs are missing." if record["missing"] else "")


def headlines() -> str:
    """A few rows for the README: images and text side by side."""
    images, texts = Medians("mobilenet-v2"), Medians("language")

    def cells(found: Medians, recipe: str | None, digits: int) -> list[str]:
        fields = (found.learned, found.kept)
        return [number(found.point(recipe)[f], digits) if recipe else "—" for f in fields]

    rows = [
        [title, *cells(images, image, 1), *cells(texts, text, 3)]
        for title, (image, text) in SPEC["headlines"].items()
    ]
    head = ["", "learned: Flowers102, %", "kept: ImageNet, %"]
    return table([*head, "learned: GSM8K, loss", "kept: WikiText-2, loss"], rows)


#: What the pages use.
TABLES = (
    glue_chosen, glue_settings, glue_coupled, vision, language, language_goals, accuracies,
    encoders, images, rates, epochs, sizes, compared, flow_added, predictors, source, headlines,
    merges, merges_at_target,
)  # fmt: skip
