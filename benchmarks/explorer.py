"""Write docs/explorer/index.html: all committed results on one page, to see, compare and download.

python benchmarks/explorer.py [FILE]

The page holds its data and plotly.js and fetches nothing. Its code is in explorer.html.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent / of) for of in ("", "papers", "proof")]

import _epochs
import verdict
from _markdown import SPEC
from _measures import REHEARSAL, Setting, at_target
from _summary import CONTEXT_FREE, TARGETS, Medians, mean_points, over_tasks
from verdict import careful_plain_of, frugal_plain_of, opponents, ours_of, plain_of

Row = dict[str, Any]
Record = dict[str, Any]
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/explorer/index.html"
PLOTLY = HERE.parent / "src/holdfast/report/plotly"
FOLDERS = {"speed": HERE, "papers": HERE / "papers", "results": HERE / "proof"}
TITLES = SPEC["proof"]
LEARNED, KEPT = "learned, %", "kept, %"
WAYS: dict[str, Callable[[Record], Row]] = {
    "holdfast": ours_of,
    "plain, best learning rate for the target": plain_of,
    "plain, lowest that learns 99 % (choosing rows)": frugal_plain_of,
    "plain, the one that keeps most (reported rows)": careful_plain_of,
}
SCORES = ("dev", "half_b", "distance")  # of GLUE
#: The name of a table, its rows, and what differs from its description in tables.yaml. A cell is a
#: text, a number, or [value, low, high].
Table = tuple[str, list[Row], Row]


def packed(folder: str, name: str, rows: list[Row], own: Row) -> Record:
    """A table as the page reads it."""
    known = SPEC["explorer"].get(own.get("like", name), {})
    spec = {"title": name.replace("_", " "), **known, **own}
    used = (name for row in rows for name, value in row.items() if value not in (None, ""))
    names = sorted({*used}, key=[*dict.fromkeys(name for row in rows for name in row)].index)
    x, y, pick = spec.get("x", ""), spec.get("y", ""), spec.get("pick", names[0])
    shown, columns = {*spec.get("main", names), x, y, pick}, []
    for column in names:
        test, colon, kind = column.rpartition(": ")
        group = colon and {"kept": "kept per test", "figure": "figures per test"}.get(kind)
        test = re.sub(r" \(.*", "", test) if group else ""
        group = group or ("" if column in shown else "other columns")
        columns.append([title_of(column), group, test if f"{test}: kept" in names else ""])
    files = [
        one
        for one in spec.get("source", [name])
        if (FOLDERS[folder] / f"results/{one}.json").exists()
    ]
    return {
        "name": name, "title": spec["title"], "columns": columns, "log": spec.get("log", False),
        "note": spec.get("note", "").format(**SPEC["explorer"]["notes"]),
        "source": "; ".join(source_of(folder, file) for file in files),
        "rows": [[rounded(row.get(name)) for name in names] for row in rows],
        "x": title_of(x), "y": title_of(y), "pick": title_of(pick),
    }  # fmt: skip


def title_of(field: str) -> str:
    """A column's title."""
    if field in SPEC["columns"]:
        return str(SPEC["columns"][field])
    stem, loss, _ = field.partition("_nll")
    name = TITLES["tests"].get(stem) or stem.replace("_", " ")
    return str(TITLES["tests"].get(field) or f"{name}{' loss' if loss else ''}")


def rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    if isinstance(value, (bool, str)):
        return value.replace("`", "") if isinstance(value, str) else ("yes" if value else "no")
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@cache
def read(folder: str, name: str) -> Record:
    record: Record = json.loads(
        (FOLDERS[folder] / f"results/{name}.json").read_text(encoding="utf-8")
    )
    return record


def source_of(folder: str, name: str) -> str:
    """File, device, torch and date of a result file, how it was made, and missing runs."""
    record, how = read(folder, name), read(folder, name).get("protocol", "")
    made = record.get("made") or [record]
    torch = (f"torch {one['versions']['torch']}" for one in made if "versions" in one)
    where = [one[field] for field in ("device", "date") for one in made if field in one]
    said = how if isinstance(how, str) else "; ".join(f"{k}: {v}" for k, v in flat(how).items())
    said = said if len(said) < 900 else f"{said[:900]} …"
    file = (FOLDERS[folder] / f"results/{name}.json").relative_to(HERE.parent)
    parts = [str(file), *where, *torch, said]
    if isinstance(missing := record.get("missing"), list) and missing:
        parts.append(f"missing runs: {', '.join(missing)}")
    return ", ".join(filter(None, dict.fromkeys(parts)))


def flat(row: Mapping[str, Any], prefix: str = "") -> Row:
    """The numbers and texts of nested records."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name} ") if len(value) < 12 else {}
        elif not isinstance(value, list):
            found[prefix + name] = value
        elif value and len(value) <= 5 and not isinstance(value[0], (dict, list)):
            found[prefix + name] = " / ".join(map(str, value))
    return found


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row.get(key) for key in keys)].append(row)
    return found


def medians(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    """Medians over seeds of all numbers; with several seeds also the lowest and the highest."""
    made = []
    for values, some in grouped(rows, keys).items():
        row: Row = {**dict(zip(keys, values, strict=True)), "seeds": len(some)}
        for name in dict.fromkeys(name for one in some for name in one if name not in keys):
            found = [v for one in some if isinstance(v := one.get(name), (int, float))]
            if found:
                middle = statistics.median(found)
                row[name] = [middle, min(found), max(found)] if len({*found}) > 1 else middle
        made.append(row)
    return made


def accurate(point: Mapping[str, float]) -> dict[str, float]:
    """Figures without their standard errors."""
    return {name: value for name, value in point.items() if not name.endswith("_se")}


def family(recipe: str) -> str:
    """The methods of a recipe without their settings: of l2-sp-0.5lr it is l2-sp."""
    return re.sub(r"-\d[^+]*", "", recipe)


# Below, figures are put into rows; the layout is by hand.
# fmt: off


def name_of(setting: str) -> str:
    found = (TITLES[k] for k in ("settings", "saturated", "abilities") if setting in TITLES[k])
    return ", ".join(next(found)[setting][:2])


def kind_of(setting: str) -> str:
    kinds = {"minilm": "encoders", "smollm2": "language models", "qwen": "language models"}
    return kinds.get(re.split(r"[-_]", setting)[0], "image models")


def measured(row: Row) -> Row:
    """What a point of the verdict learned and kept, with intervals if it has them."""
    found: Row = {
        title: [row[field], *row.get(interval, ())] if interval in row else row[field]
        for title, field, interval in ((LEARNED, "target", "target_interval"),
                                       (KEPT, "mean_kept", "kept_interval"))
    }
    return {"seeds": row["seeds"], **found,
            "kept least": f"{title_of(row['worst'])} {row['kept'][row['worst']]:.1f}"}


def point_row(row: Row, rates: Mapping[str, float]) -> Row:
    """A point of the verdict: who, learned, kept, every test."""
    merge, _, alpha = row["merged"].rpartition("-")
    made: Row = {
        "method": TITLES["rows"].get(row["row"], ""), "run": row["plan"], "learning rate":
        rates.get(row["plan"]), "merged": f"{merge} α = {alpha}" if merge else "", **measured(row),
    }
    for field, word in (("dominates", "better"), ("is_dominated", "worse")):
        if (how := row.get(field, "no")) != "no":
            clearly = ", clearly" if how == "clearly" else ""
            made["beside holdfast"] = f"as good or {word} in both{clearly}"
    for field, word in (("target_ahead", "learned"), ("kept_ahead", "kept")):
        if any(row.get(field, ())):
            made[f"{word} more than holdfast, points"] = "{:+.1f} to {:+.1f}".format(*row[field])
    made |= {f"{title_of(test)}: kept": share for test, share in row["kept"].items()}
    return made | figures_of(row["figures"])


def figures_of(figures: Mapping[str, float]) -> Row:
    """Losses in nats per token, accuracies in percent."""
    own = {"report_nll": "target", "target_report": "target", "written": "right answers"}
    return {f"{own.get(k, title_of(k))} ({'nats' if '_nll' in k else '%'}): figure":
            value if "_nll" in k else 100 * value for k, value in accurate(figures).items()}


def setting_table(name: str, found: Record) -> Table:
    rates = {run["plan"]: run["lr"] for run in read("results", name)["runs"] if run.get("lr")}
    rows = [point_row(row, rates) for row in found["points"]]
    rows.append({"method": "pretrained"} | figures_of(found["base"]))
    more = "" if name in TITLES["settings"] else " (close to saturation, not counted)"
    return name, rows, {"like": "setting", "title": f"{name_of(name)}{more}"}


def overview(settings: Mapping[str, Record]) -> Iterable[Table]:
    """All settings: ``holdfast`` and plain fine-tuning chosen in three ways; medians; counts."""
    rows: list[Row] = []
    for (name, one), (way, of) in itertools.product(settings.items(), WAYS.items()):
        row, own = of(one), way == "holdfast"
        rates = {run["plan"]: run.get("lr") for run in read("results", name)["runs"]}
        right = [100 * some["written"] for some in (row["figures"], one["base"])
                 if "written" in some and "written" in row["figures"]]
        better = [p["dominates"] != "no" for p in opponents(one)] if own else []
        rows.append({"setting": name_of(name), "way": way, "kind": kind_of(name),
                     "was": TITLES["settings"][name][2], "learning rate": rates[row["plan"]],
                     **measured(row), "right answers in writing, %": right[0] if right else None,
                     "– of the pretrained model, %": right[1] if right else None,
                     "points of other methods": len(better) if own else None,
                     "– as good or better in both": sum(better) if own else None})
    yield "all", rows, {}
    kinds = {"all settings": [*settings], "encoders and image models":
             [name for name in settings if kind_of(name) != "language models"]}
    kinds |= {kind: [n for n in settings if kind_of(n) == kind] for kind in map(kind_of, settings)}
    rows = []
    for (kind, names), (way, of) in itertools.product(kinds.items(), WAYS.items()):
        found = [of(settings[name]) for name in names]
        both = [(one["target"], one["mean_kept"]) for one in found]
        rows.append({"settings": f"{kind} ({len(names)})", "way": way,
                     **{f"{word}, {title} %": of(pair[i] for pair in both)
                        for title, of in (("median", statistics.median), ("least", min))
                        for i, word in enumerate(("learned", "kept"))},
                     "with 99/99": sum(min(pair) >= 99 for pair in both),
                     "with one seed": sum(one["seeds"] == 1 for one in found)})
    yield "medians", rows, {}
    yield "counts", counts([*settings.values()]), {}
    yield from (setting_table(name, one) for name, one in settings.items())


def counts(every: list[Record]) -> list[Row]:
    """Counts over all settings."""
    ours, best = [*map(ours_of, every)], [*map(plain_of, every)]
    points, old = ([p for one in every for p in of(one)] for of in (opponents, verdict.rehearsals))
    equal = [(kept, own["mean_kept"]) for one, own in zip(every, ours, strict=True)
             for row, kept in one["equal_target"].items() if row != REHEARSAL]
    both = [(a["figures"], b["figures"]) for a, b in zip(ours, best, strict=True)]
    tests = [[x < 99 for row in rows for x in row["kept"].values()] for rows in (ours, best)]
    at_99 = [[min(p["target"], p["mean_kept"]) >= 99 for p in opponents(one)] for one in every]
    better = [[p["dominates"] != "no" for p in opponents(one)] for one in every]
    plain = [[of(one)["mean_kept"] >= ours_of(one)["mean_kept"] for one in every]
             for of in (frugal_plain_of, careful_plain_of)]
    found: dict[str, list[bool]] = {
        "settings: holdfast learns and keeps 99 %": [s["reached"]["99"] != "no" for s in every],
        "– in every single test": [s["reached"]["99"] == "strictly" for s in every],
        "– certain by the 95 % intervals":
            [min(p["target_interval"][0], p["kept_interval"][0]) >= 99 for p in ours],
        "settings: holdfast learns and keeps 98 %": [s["reached"]["98"] != "no" for s in every],
        "settings: holdfast learns 97 %": [row["target"] >= 97 for row in ours],
        "settings: a point of another method learns and keeps 99 %": [*map(any, at_99)],
        "settings: a point of another method is as good or better in both": [*map(any, better)],
        "settings: plain at the lowest rate that learns 99 % keeps as much or more": plain[0],
        "settings: plain at the rate that keeps most keeps as much or more": plain[1],
        "settings: fewer right answers in writing than after the best of plain":
            [a["written"] < b["written"] for a, b in both if "written" in {*a} & {*b}],
        "points of other methods that learn and keep 99 %": [*itertools.chain(*at_99)],
        "– as good or better in both": [*itertools.chain(*better)],
        "– clearly better": [p["dominates"] == "clearly" for p in points],
        "– as good or worse in both": [p["is_dominated"] != "no" for p in points],
        "– clearly worse": [p["is_dominated"] == "clearly" for p in points],
        "points of rehearsal, as good or better in both": [p["dominates"] != "no" for p in old],
        "cases: a method reaches the target of holdfast": [kept is not None for kept, _ in equal],
        "– and keeps less there": [kept < own for kept, own in equal if kept is not None],
        "single tests: holdfast keeps less than 99 %": tests[0],
        "single tests: the best of plain keeps less than 99 %": tests[1],
    }
    return [{"what": what, "count": sum(some), "of": len(some)} for what, some in found.items()]


def further(whole: Record) -> Iterable[Table]:
    """What stands beside the 14 settings."""
    for name, one in whole["saturated"].items():
        yield setting_table(name, one)
    for name, one in whole["abilities"].items():
        rows = []
        for p, (test, figure) in itertools.product(one["points"], one["base"].items()):
            if test in p["kept"]:
                scale = 1 if test.endswith("_nll") else 100
                rows.append({"test": title_of(test), "method": p["plan"], LEARNED: p["target"],
                             KEPT: [p["kept"][test], *p["kept_intervals"][test]],
                             "pretrained": scale * figure, "figure": scale * p["figures"][test],
                             "chance": scale * one["chance"].get(test, math.nan),
                             "kept, mean of all %": p["mean_kept"]})
        out = ", ".join(f"{title_of(t)} ({100 * one['base'][t]:.1f} %)" for t in one["left_out"])
        title = name_of(name)
        yield name, rows, {"like": "abilities", "title": f"Abilities after {title}",
                           "note": f"{{abilities}} {out}."}
        rows = [{"test": title_of(test), "model": plan, "part":
                 TITLES["parts"][part] + (", bare" if test.endswith("_bare") else ""),
                 "right answers, %": 100 * share} for plan, tests in one["shares"].items()
                for test, parts in tests.items() for part, share in parts.items()]
        yield f"{name}_parts", rows, {"like": "parts", "source": [name],
                                      "title": f"Formats and refusals after {title}"}
    rows = [{"setting": name_of(name), **point_row(row, {}), "learning rate":
             row["plan"].replace("holdfast", "rate-x1")[5:].replace("x", "× ")}
            for name, some in whole["rates"].items() for row in some]
    yield "rates", rows, {}
    changed = {plan: {"changed": factor, "value": value} for factor, values in
               TITLES["ablations"].items() for value, plan in values.items()}
    rows = [{**changed.get(r["plan"], {}), **point_row(r, {})} for r in whole["ablations"]]
    yield "ablations", rows, {}
    rows = [{"method": p["plan"], "after": f"{i}. {stage['task']}", "seeds": p["seeds"],
             KEPT: stage["mean_kept"], "kept least, %": stage["least_kept"],
             "loss of the task": stage["loss"],
             **{f"left of {task}, %": share for task, share in stage["tasks"].items()}}
            for p in whole["continual"] for i, stage in enumerate(p["stages"], 1)]
    yield "continual", rows, {}
    runs = read("results", "small_model")["runs"]
    rows = [{"recipe": run["recipe"], LEARNED: run["target"]["before"] - run["target"]["after"],
             KEPT: statistics.mean(min(100, 100 * math.log(t["before"]) / math.log(t["after"]))
                                   for t in run["retained"]), "target loss": run["target"]["after"],
             **{f"{t['name']} loss": math.log(t["after"]) for t in run["retained"]}}
            for run in runs]
    rows = [{"method": family(r["recipe"].split("-x")[0]), **r} for r in medians(rows, ["recipe"])]
    best = max(row[LEARNED][0] for row in rows if row["method"] == "plain")
    for row in rows:
        row[LEARNED] = [100 * gain / best for gain in row[LEARNED]]
    yield "small_model", rows, {}
    rows = []
    for (tokens,), some in grouped(read("results", "capacity")["runs"], ["base"]).items():
        setting = Setting(run for run in some if run["plan"] != "seen")
        for p in setting.points() if any("rehearsal" in plan for plan in setting.plans) else ():
            path = [one for one in setting.points() if one.row == p.row]
            losses = {f"{n}_nll": setting.median(p.plan, f"{n}_nll")
                      for n in ("report", "wikitext", "gsm8k")}
            rows.append({"tokens per parameter": tokens, "method": p.row, "run": p.plan,
                         "seeds": p.seeds, LEARNED: p.target, KEPT: p.mean_kept,
                         "kept where 95 % is learned": at_target(path, 95), **losses})
    yield "capacity", rows, {}


def equal_target(settings: Mapping[str, Record]) -> Iterable[Table]:
    rows = []
    for name, one in settings.items():
        own = ours_of(one)
        for row, kept in {"holdfast": own["mean_kept"], **one["equal_target"]}.items():
            rows.append({"setting": name_of(name), "at the target, %": own["target"], KEPT: kept,
                         "method": TITLES["rows"].get(row), "reached": kept is not None,
                         "more than holdfast, points": kept and kept - own["mean_kept"]})
    yield "equal", rows, {}


def path_rows(runs: Iterable[Record], key: str, extra: Sequence[str] = ()) -> list[Row]:
    """Medians over seeds of every recipe at every α."""
    rows = [{**{k: run.get(k) for k in (*extra, "recipe", "train_seconds")}, "α": alpha,
             "learning rate": run.get("lr"), **accurate(point)}
            for run in runs for alpha, point in run[key].items()]
    made = medians(rows, [*extra, "recipe", "α"])
    return [{"method": family(row["recipe"]), **row} for row in made]


def papers() -> Iterable[Table]:
    yield "glue", [*glue()], {}
    for model in ("language", "mobilenet-v2", "efficientnet-lite0"):
        found = Medians(model)
        rows = path_rows(found.runs, found.key)
        at = f"{title_of(found.kept)} at {title_of(found.learned)} {TARGETS[model]:g}"
        for row in rows:
            row[at] = found.matched(row["recipe"]) if row["α"] == "1" else None
        yield model, rows, {"main": [*SPEC["explorer"][model]["main"], at]}
    yield "predictors", [*predictors()], {}
    rows = [{"method": run["method"], "learning rate": run["rate"], "models": len(run["seeds"]),
             "setting": ", ".join(f"{k} {v:g}" for k, v in run["settings"].items())
             or "defaults", "seed": run["seeds"][0], **accurate(run["point"])}
            for run in read("papers", "merges")["runs"]]
    yield "merges", rows, {}
    runs = read("papers", "encoders")["runs"]
    means = mean_points(over_tasks(runs, ("target", "kept")))
    mean = [{"method": family(recipe), "task": "mean of the tasks", "α": alpha, "recipe": recipe,
             "seeds": found.seeds, **found.means} for (recipe, alpha), found in means.items()]
    for name, key in (("encoders", "points"), ("encoders_choose", "points"),
                      ("language_rates", "points"), ("vision_holdfast", "alpha"),
                      ("vision_choose", "alpha")):
        rows = path_rows(read("papers", name)["runs"], key, ["task", "model"])
        yield name, rows + (mean if name == "encoders" else []), {}
    for name in ("language_epochs", "language_sizes"):
        yield name, [*cases(name)], {}


def cases(name: str) -> Iterable[Row]:
    """What is learned and kept in the cases of a choice of learning rates."""
    runs = read("papers", name)["runs"]
    base = next(run for run in runs if "task" not in run)["points"]["1"]
    by_case = grouped((r for r in runs if "task" in r), ["task", "samples", "epochs"])
    for (task, samples, epochs), some in by_case.items():
        gains = {r["run"]: base[f"{task}_nll"] - r["points"]["1"][f"{task}_nll"] for r in some}
        best = max(gain for run, gain in gains.items() if "lora" not in run)
        for run in some:
            point = accurate(run["points"]["1"])
            kept = [min(100, 100 * base[test] / point[test]) for test in _epochs.KEPT]
            yield {"case": f"{task}, {samples} samples × {epochs}", "run": run["run"],
                   "learning rate": run["lr"], LEARNED: 100 * gains[run["run"]] / best,
                   KEPT: min(kept) if name == "language_epochs" else statistics.mean(kept),
                   **point}


def glue() -> Iterable[Row]:
    """RecAdam on GLUE: as the paper chose its settings, and with the same for all tasks."""
    record, found = read("papers", "glue"), defaultdict(list)
    for run in record["runs"]:
        said = [f"{k} {run[k]:g}" for k in ("k", "t0", "width") if run.get(k) is not None]
        title = SPEC["glue"].get(run["method"], run["method"])
        found[", ".join([title, *said])].append(run)
        chosen = record["protocol"]["choice"].get(f"{run['task']}-{run['method']}", {})
        for by in [by for by, one in chosen.items() if one == [run.get("k"), run.get("t0")]]:
            found[f"{title}, chosen per task on {by.replace('_', ' ')}"].append(run)
    for setting, some in found.items():
        by_task = grouped(some, ["task"]).items()
        middle = [{"method": setting.split(",")[0], "setting": setting, "task": task,
                   "seeds": len(of), "highest dev": max(r["dev"] for r in of),
                   **{f: statistics.median(r[f] for r in of) for f in SCORES}}
                  for (task,), of in by_task]
        if len(middle) == len(record["protocol"]["metrics"]):
            mean = {f: statistics.mean(r[f] for r in middle) for f in SCORES}
            middle.append({**middle[0], **mean, "task": "mean of the tasks", "highest dev": None})
        yield from middle


def predictors() -> Iterable[Row]:
    """Spearman's ρ between what was lost and what can be measured without a test."""

    def ranks(values: list[float]) -> list[float]:
        places = sorted(values)
        return [statistics.mean(i for i, v in enumerate(places) if v == x) for x in values]

    fields = {"language": ("wikitext_nll", "mbpp_nll", "retained_accuracy")}
    for model in ("mobilenet-v2", "efficientnet-lite0", "language"):
        found, lost = Medians(model), fields.get(model, ("imagenet", "imagenet_tuned_bn"))
        every = [found.point(r) for r in found.recipes if r != found.base and not found.diverged(r)]
        for field, by in itertools.product(lost, ("distance", "kl", "kl_gsm8k", CONTEXT_FREE)):
            if points := [p for p in every if by in p.figures
                          and not (by == CONTEXT_FREE and found.rehearses(p.recipe))]:
                a, b = (ranks([p[name] for p in points]) for name in (by, field))
                rho = statistics.correlation(a, b) * (1 if "_nll" in field else -1)
                yield {"lost": f"{model}: {title_of(field)}", "measured": title_of(by),
                       "Spearman's ρ": rho, "recipes": len(points)}


def targets() -> Table:
    rows = []
    for one in json.loads((HERE / "targets.json").read_text(encoding="utf-8")):
        name, case, impl, field = one["of"]
        found = {r["impl"]: r[field] for r in read("speed", name)["rows"]
                 if r.get("case") == case and field in r}
        value = found[impl] - found.get(one.get("minus"), 0)
        value = round(value / found.get(one.get("over"), 1), 3)
        rows.append({"target": one["what"], "unit": one["unit"], "at most": one["most"],
                     "measured": value, "result": "met" if value <= one["most"] else "missed",
                     "file": f"{name}.json"})
    met = sum(row["result"] == "met" for row in rows)
    return "targets", rows, {"note": f"{met} of {len(rows)} targets are met. {{targets}}"}


def timings() -> Iterable[Table]:
    """The targets, every benchmark with implementations, and those with other fields."""
    yield targets()
    titles = SPEC["implementations"]
    for file in sorted(FOLDERS["speed"].glob("results/*.json")):
        rows = read("speed", file.stem).get("rows", [{}])
        if "impl" in rows[0]:
            made = [{"case": row.get("case"), "implementation": titles[row["impl"]],
                     **{k: v for k, v in flat(row).items() if k not in ("case", "impl")}}
                    for row in rows]
            ratio = [name for name in rows[0] if name.startswith("x_") and name != "x_limit"]
            x = (ratio or [name for name in rows[0] if name not in ("case", "impl")])[0]
            pick = "case" if "case" in rows[0] else "implementation"
            yield file.stem, made, {"x": x, "y": "implementation", "pick": pick}
    made = [{"what": f"{row['part']}, by {row['axis']}", **point, **flat(row)}
            for row in read("speed", "growth_h200")["rows"] for point in row["points"]]
    yield "growth_h200", made, {}
    yield "scale", [*map(flat, read("speed", "scale")["rows"])], {}
    made = [{**row, "case": titles[row["case"]]} for row in read("speed", "scale")["checked"]]
    yield "forecasts", made, {}


def compared(name: str) -> Table:
    """A comparison of recipes: the target, and what the tests say."""
    runs, rows = read("speed", name)["runs"], []
    for run in runs:
        row: Row = {"recipe": " ".join([run["recipe"], *map(str, run["values"].values())])}
        for test in (run["target"], *run["retained"]):
            scale = 100 if test["metric"] in ("accuracy", "spearman") else 1
            row[f"{test['name']}, {test['metric']}"] = scale * test["after"]
            row[f"{test['name']}, before"] = scale * test["before"]
            if test["metric"] == "perplexity":
                row[f"{test['name']}, rise %"] = 100 * (test["after"] / test["before"] - 1)
        rows.append({**row, **run["kl"], "seconds": run["seconds"]})
    _, x, _, *names = rows[0]
    y = next((name for name in names if name.endswith("rise %")), names[0])
    return name, medians(rows, ["recipe"]), {
        "x": x, "y": y, "pick": "recipe", "title": f"holdfast compare: {name[8:]}",
        "note": f"{{seeds}} {read('speed', name)['protocol']['command']}"}


def others() -> Iterable[Table]:
    """Comparisons, budgets and small tables."""
    for end in ("default", "methods", "smollm2_gsm8k", "minilm_rte"):
        yield compared(f"compare_{end}")
    tuned = read("speed", "tune_default")
    points = {"taken": tuned["taken"], "defaults": tuned["default"],
              **{f"trial {p['trial']}": p for p in tuned["frontier"]}}
    rows = [{"point": title, "half": half, "GSM8K loss": one[half]["target"]["after"],
             "lost, mean rise %": statistics.mean(100 * (t["after"] / t["before"] - 1)
                                                  for t in one[half]["retained"]), **one["values"]}
            for title, one in points.items() if one for half in ("chosen", "reported")]
    yield "tune_default", rows, {}
    for name in ("budget_smollm2", "budget_embedded"):
        rows = [{**row, "budget": str(row["budget"])}
                for row in read("speed", name)["protocol"]["summary"]]
        yield name, rows, {"like": "budget", "title": f"forgetting budget: {name[7:]}"}
    for name in ("digits", "additivity", "additivity_lm"):
        rows = [{"method": method, **row} for method, row in read("speed", name)["medians"].items()]
        yield name, rows, {"like": "digits"}
    two = {name: read("speed", f"forgetting_{name}")["report"]
           for name in ("standard", "recadam_flow")}
    first = {row["recipe"]: row for row in read("speed", "first_run")["rows"]}
    for title, reports in (("forgetting", two), ("first_run", first)):
        rows = [{"recipe": name, "test": f"{s['name']}, {s.get('metric', 'KL')}",
                 "before": s.get("before", {}).get("value"), "change":
                 [s.get("change", s.get("kl"))[end] for end in ("value", "low", "high")]}
                for name, one in reports.items()
                for s in one["scores"] + one.get("divergences", [])]
        yield title, rows, {}
    rows = [{"recipe": row["name"], "check": f"{c['name']} ({c['limit']})", "value, %":
             100 * c["value"], "at most, %": 100 * c["most"], "passed": c["passed"],
             "target loss": row["target"]["nll"][1], "exit code": row["exit_code"]}
            for row in read("speed", "gate_h200")["rows"] for c in row["checks"]]
    yield "gate_h200", rows, {}
    for name in ("ranks", "real_models"):
        yield name, [*map(flat, read("speed", name)["rows"])], {}
    made = {**read("speed", "embedded"), "versions": {}}
    yield "embedded", [{"what": k, "value": v} for k, v in flat(made).items()], {}


def page() -> str:
    """The page with its data, compressed."""
    whole = verdict.read()
    views = {
        "results": ("Results", "results", [*overview(whole["settings"]), *further(whole)]),
        "equal": ("Equal target", "results", [*equal_target(whole["settings"])]),
        "papers": ("The papers' experiments", "papers", [*papers()]),
        "speed": ("Timings and memory", "speed", [*timings()]),
        "other": ("Comparisons, budgets, others", "speed", [*others()]),
    }
    made = [{"name": name, "title": title, "tables": [packed(folder, *table) for table in tables]}
            for name, (title, folder, tables) in views.items()]
    data = gzip.compress(json.dumps(made, ensure_ascii=False, allow_nan=False).encode(), mtime=0)
    found = {
        "@LICENSE@": (PLOTLY / "LICENSE").read_text(encoding="utf-8"),
        "@DATA@": base64.b64encode(data).decode(),
        "@PLOTLY@": base64.b64encode((PLOTLY / "plotly-cartesian.min.js.gz").read_bytes()).decode(),
    }
    text = (HERE / "explorer.html").read_text(encoding="utf-8")
    return re.sub("@[A-Z]+@", lambda place: found[place[0]], text)


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    file.parent.mkdir(exist_ok=True)
    file.write_text(page(), encoding="utf-8")
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
