"""Fill the tables of README.md and docs/ from the registry and the committed results.

A table stands between ``<!-- table: name arguments -->`` and ``<!-- /table -->``; ``name`` is a
function of this file, of papers/_tables.py or of proof/_proof_tables.py. Text outside these blocks
is written by hand. Row titles and targets are in tables.yaml.

python benchmarks/pages.py            # write the tables
python benchmarks/pages.py --check    # exit with an error if a page is stale
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent / folder) for folder in ("papers", "proof")]

import _epochs
import _proof_tables
import _tables
import pictures
import proof_pictures
import verdict
from _markdown import SPEC, number, table

from holdfast import Results, registry
from holdfast.methods.auto import default_lr
from holdfast.recipe import preset_words

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
Run = dict[str, Any]
BLOCK = re.compile(r"(<!-- table: (\w+)([^\n]*?) -->\n).*?(<!-- /table -->)", re.DOTALL)


def read(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def _paper(entry: registry.Entry) -> str:
    """A link to the paper; its text is the arXiv number, or the name of the site."""
    text = "DOI" if "doi.org" in entry.url else entry.paper
    text = "documentation" if text.startswith("https://") else text
    return f"[{text}]({entry.url})" if entry.url else ""


def methods() -> str:
    """All methods of the registry."""
    rows = []
    for entry in registry.methods():
        paper = _paper(entry)
        name, cls = f"`{entry.name}`", f"`{entry.cls.__name__}`"
        rows.append([entry.stage, name, cls, entry.summary, paper])
    for above, row in reversed(list(itertools.pairwise(rows))):
        row[0] = "" if row[0] == above[0] else row[0]
    return table(["stage", "name", "class", "what it does", "paper"], rows)


def stage(name: registry.Stage) -> str:
    """The methods of one stage, with links to their pages and their costs."""
    rows = []
    for entry in registry.methods(name):
        title, page = f"`{entry.name}`", ROOT / "docs" / "methods" / f"{entry.name}.md"
        first = f"[{title}]({page.name})" if page.exists() else title
        paper = _paper(entry)
        cost = SPEC["costs"].get(entry.name, "—")
        rows.append([f"{first}<br>`{entry.cls.__name__}`", entry.summary, cost, paper])
    return table(["name, class", "what it does", "cost compared with AdamW", "paper"], rows)


def presets() -> str:
    """The presets that are not named like a method."""
    rows = [
        [f"`{name}`", f"`{preset_words(name)}`" if found else preset_words(name)]
        for name, found in registry.PRESETS.items()
    ]
    return table(["preset", "methods"], rows)


def modules() -> str:
    """Every module of src/holdfast with the first line of its docstring, room by room."""
    source, order = ROOT / "src" / "holdfast", SPEC["rooms"]
    found: dict[str, list[list[str]]] = {room: [] for room in order}
    for file in sorted(source.rglob("*.py"), key=lambda file: (len(file.parts), file)):
        path = file.relative_to(source)
        room = f"{path.parts[0]}/" if len(path.parts) > 1 else ""
        if str(path) == f"{room}__init__.py":
            continue  # the sentence of its room describes it
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "—"
        found[room].append([f"`{path}`", docstring.splitlines()[0].rstrip(".").replace("|", r"\|")])
    return "\n\n".join(
        f"### {f'`{room}`' if room else 'The top level'}\n\n{order[room]}\n\n"
        + table(["module", "what it does"], rows)
        for room, rows in found.items()
    )


def timings(name: str) -> str:
    """The rows of a benchmark by case, and how they were measured."""
    record, titles = read(name), list(SPEC["implementations"])
    rows = sorted(record["rows"], key=lambda row: titles.index(row["impl"]))
    columns = {f: c for f, c in SPEC["columns"].items() if any(f in row for row in rows)}
    lines = []
    for case in dict.fromkeys(row.get("case") for row in record["rows"]):
        for i, row in enumerate(row for row in rows if row.get("case") == case):
            cells = [number(row.get(field), digits) for field, (_, digits) in columns.items()]
            title = SPEC["implementations"][row["impl"]]
            lines.append(["" if i or case is None else case, title, *cells])
    made = table(["case", "", *(head for head, _ in columns.values())], lines)
    how, versions = record["protocol"], record["versions"]
    if isinstance(how, dict):
        how = "; ".join(f"{key}: {value}" for key, value in how.items())
    on_gpu = "NVIDIA" in record["device"] and "triton" in versions
    triton = f", Triton {versions['triton']}" if on_gpu else ""
    where = f"{record['device']}, torch {versions['torch']}{triton}, {record['date']}"
    return f"{made}\n\n[{name}.json](../benchmarks/results/{name}.json): {where}; {how}."


def figure(name: str, case: str | None, impl: str, field: str) -> float:
    (row,) = [r for r in read(name)["rows"] if (r.get("case"), r["impl"]) == (case, impl)]
    return float(row[field])


def targets() -> str:
    """Targets of speed and memory, and whether they are met."""
    rows = []
    for target in SPEC["targets"]:
        name, case, impl, field = target["of"]
        value = figure(name, case, impl, field)
        if "minus" in target:
            value = round(value - figure(name, case, target["minus"], field), 3)
        if "over" in target:
            value = round(value / figure(name, case, target["over"], field), 3)
        by = value - target["most"]
        verdict = f"**missed** by {by:.2g}" if by > 0 else "met"
        most = f"{target['most']:g} {target['unit']}"
        rows.append([target["what"], most, number(value, 3), verdict])
    met = sum(verdict == "met" for *_, verdict in rows)
    said = f"{met} of {len(rows)} targets are met."
    return f"{said}\n\n{table(['', 'at most', 'measured', ''], rows)}"


def memory() -> str:
    """Bytes per parameter of llama-1b: what a step keeps on the GPU and what it moves."""
    files = (
        "recadam_step_h200", "recadam_step_h200_bf16", "mofo_step_h200", "penalty_step_h200",
        "penalty_step_h200_bf16",
    )  # fmt: skip
    found: dict[str, dict[str, Run]] = {}
    for row in (row for name in files for row in read(name)["rows"]):
        if row["case"].startswith("llama-1b") and row["impl"] != "plain_loop":
            dtype = "bfloat16" if row["case"].endswith("bfloat16") else "float32"
            found.setdefault(row["impl"], {}).setdefault(dtype, row)
    fields = [
        (kind, field, dtype)
        for kind, field in (("kept", "kept_bytes_per_param"), ("moved", "bytes_per_param"))
        for dtype in ("float32", "bfloat16")
    ]
    rows = [
        [title, *(number(found[impl].get(d, {}).get(field)) for _, field, d in fields)]
        for impl, title in SPEC["implementations"].items()
        if impl in found
    ]
    return table(["", *(f"{kind}, {dtype} weights" for kind, _, dtype in fields)], rows)


def speed() -> str:
    """The headline ratios."""
    rows = [
        [title, *(number(figure(name, f"{case}{end}", impl, "x_fused_adamw"))
                  for case in ("bert-base", "llama-1b"))]
        for title, name, impl, end in SPEC["speed"]
    ]  # fmt: skip
    head = "step time relative to torch's fused AdamW in the same dtype"
    return table([head, "BERT-base", "Llama-1B"], rows)


def speed_notes() -> str:
    """What a user waits for beside the steps, in sentences."""
    replay, update = "self_replay_h200", "smollm2, gsm8k"
    (scored,) = {row["case"] for row in read("flow_score_h200")["rows"]}

    def a(*of: str, digits: int = 2) -> str:
        return number(figure(*of), digits)

    cpu = a("recadam_step_cpu", "minilm-l6", "recadam_fused", "x_fused_adamw")
    small, large = (
        a("end_to_end_h200", case, "recadam+flow", "x_plain") for case in ("minilm, rte", update)
    )
    times, memories = (
        [
            a(replay, f"{update}, {how}", "self_replay_share_0.5", field)
            for how in ("eager", "CUDA graphs")
        ]
        for field in ("x_adamw", "x_adamw_memory")
    )
    draw = a(replay, "4096 texts of 128 tokens", "draw_chats", "seconds", digits=1)
    naive = a("flow_score_h200", scored, "naive_two_pass", "x_score", digits=1)
    epoch = a("flow_score_h200", scored, "score", "x_epoch")
    again = a("flow_score_h200", scored, "score_cached", "seconds")
    side = figure("compare_throughput_h200", None, "one at a time", "wall_s") / figure(
        "compare_throughput_h200", None, "side by side", "wall_s"
    )
    said = {
        "CPU:": f"a step of `RecAdam(fused=True)` takes {cpu} times as long as one of torch's "
        "fused AdamW (MiniLM-L6).",
        "A whole update": f"with RecAdam and FLOW takes {small} times as long as in a loop without "
        f"holdfast for MiniLM-L6 on RTE, and {large} times for SmolLM2-135M on GSM8K.",
        "Self-replay": "(the preset `holdfast`, SmolLM2-135M on GSM8K): in an eager loop, which "
        f"waits for kernel launches, an update takes {times[0]} times as long as one of plain "
        f"fine-tuning, and {memories[0]} times the memory. With CUDA graphs it takes {times[1]} "
        f"times as long, and {memories[1]} times the memory. Drawing 4,096 texts before training "
        f"takes {draw} s.",
        "Scoring for FLOW": f"(SmolLM2-135M, 2,000 samples) is {naive} times as fast as a naive "
        f"two-pass implementation, and takes {epoch} of the time of a training epoch. A second "
        f"call reads the cache in {again} s.",
        "Comparing": "ten short runs of a model with the sizes of SmolLM2-135M on one GPU ends "
        f"{side:.1f} times as soon with `--per-gpu auto`, which runs several at a time.",
    }
    return "\n".join(["", *(f"- **{head}** {rest}" for head, rest in said.items()), ""])


def recommendation(name: str) -> str:
    """What the report of a comparison recommends, as a list."""
    answer = Results.load(ROOT / "benchmarks" / "results" / f"{name}.json").recommendation()
    return "\n".join(
        ["", *(f"- {said}" for said in (f"**{answer.headline}**", *answer.sentences)), ""]
    )


def comparison(name: str, *heads: str) -> str:
    """One row per recipe: its target and the change of each test, medians over seeds."""
    groups: dict[str, list[Run]] = {}
    for run in read(name)["runs"]:
        label = ", ".join([run["recipe"], *(f"{k} {v:g}" for k, v in run["values"].items())])
        groups.setdefault(label, []).append(run)

    def level(test: Run, value: float) -> str:
        return number(100 * value, 1) if test["metric"].startswith("acc") else number(value, 3)

    def change(test: Run, after: float) -> str:
        if test["metric"] == "perplexity":
            return f"{100 * (after / test['before'] - 1):+.0f} %"
        share = test["metric"].startswith("acc")
        return f"{(100 if share else 1) * (after - test['before']):+.{1 if share else 3}f}"

    first = next(iter(groups.values()))[0]
    start = [level(first["target"], first["target"]["before"])]
    start += [
        number(t["before"], 1) if t["metric"] == "perplexity" else level(t, t["before"])
        for t in first["retained"]
    ]
    rows = [["pretrained", *start]]
    for label, runs in groups.items():
        target = statistics.median(run["target"]["after"] for run in runs)
        tests = zip(*(run["retained"] for run in runs), strict=True)
        changes = [change(t[0], statistics.median(one["after"] for one in t)) for t in tests]
        rows.append([label, level(runs[0]["target"], target), *changes])
    return table(" ".join(heads).split(" / "), rows)


def tune() -> str:
    """The result of a search, on the held-out half."""
    record = read("tune_default")
    values = ", ".join(f"{n.split('.')[-1]} {v:.3g}" for n, v in record["taken"]["values"].items())
    titles = {
        "unmerged": "RecAdam, defaults", "default": "RecAdam + WiSE-FT, defaults",
        "taken": f"found: {values}",
    }  # fmt: skip
    rows = []
    for which, title in titles.items():
        run = record[which]["reported"]
        lost = statistics.mean(t["after"] / t["before"] - 1 for t in run["retained"])
        rows.append([title, number(run["target"]["after"], 3), f"{100 * lost:.0f} %"])
    return table(["held-out half", "GSM8K loss", "lost on prose, verse, code (mean)"], rows)


def digits() -> str:
    medians = read("digits")["medians"]
    rows = [[name, number(m["target"], 1), number(m["retained"], 1)] for name, m in medians.items()]
    return table(["", "target (tilted)", "retained (upright)"], rows)


def additivity() -> str:
    """Methods with and without FLOW, on digits and on text."""
    lm, rows = read("additivity_lm")["medians"], []
    for name, m in read("additivity")["medians"].items():
        change = lm[name]["retained"] - lm["pretrained"]["retained"]
        figures = [number(m["target"], 1), number(m["retained"], 1), number(lm[name]["target"], 3)]
        rows.append([name, *figures, f"{change:+.3f}"])
    head = ["", "tilted digits, %", "retained: upright, %", "GSM8K loss", "WikiText-2 loss, change"]
    return table(head, rows)


def forgetting() -> str:
    """Two fine-tunes of SmolLM2: before, and the change after each."""
    runs = {"standard": "standard", "RecAdam + FLOW": "recadam_flow"}
    reports = {name: read(f"forgetting_{file}")["report"] for name, file in runs.items()}
    names = {
        "gsm8k": "GSM8K (target), loss", "wikitext": "WikiText-2, loss", "piqa": "PIQA, %",
        "arc_easy": "ARC-easy, %", "lambada": "LAMBADA, %",
    }  # fmt: skip
    rows: list[list[str]] = []
    for name, title in names.items():
        metric = {"piqa": "accuracy", "arc_easy": "accuracy", "lambada": "exact_match"}.get(name)
        wanted = (name, metric or "nll")
        scale, form = (100, ".1f") if metric else (1, ".3f")
        (before, *_), changes = zip(*(
            (s["before"], s["change"])
            for r in reports.values() for s in r["scores"] if (s["name"], s["metric"]) == wanted
        ), strict=True)  # fmt: skip
        told = [[f"{scale * c[end]:+{form}}" for end in ("value", "low", "high")] for c in changes]
        cells = [f"{value} ({low} to {high})" for value, low, high in told]
        rows.append([title, f"{scale * before['value']:{form}}", *cells])
    for i, title in enumerate(["KL on the base's own texts, nats per token", "KL on GSM8K"]):
        kl = [r["divergences"][i]["kl"] for r in reports.values()]
        cells = [f"{k['value']:.2f} ({k['low']:.2f} to {k['high']:.2f})" for k in kl]
        rows.append([title, "0", *cells])
    totals = [r["drift"]["total"] for r in reports.values()]
    moved = [number(100 * t["distance"] / t["norm"], 1) for t in totals]
    rows.append(["distance of the weights, % of their norm", "0", *moved])
    return table(["", "pretrained", *(f"{name}: change" for name in reports)], rows)


def ranks() -> str:
    """Differences between two ranks and one process."""
    rows = {(row["recipe"], row["dtype"]): row for row in read("ranks")["rows"]}
    columns = [(kind, dtype) for dtype in ("float64", "float32") for kind in ("ddp", "fsdp2")]
    body = [
        [f"`{recipe}`", *(f"{rows[recipe, dtype][kind]:.0e}" for kind, dtype in columns)]
        for recipe in dict.fromkeys(recipe for recipe, _ in rows)
    ]
    return table(["", *(f"{kind.upper()}, {dtype}" for kind, dtype in columns)], body)


def budgets(name: str) -> str:
    """What is kept and learned within a forgetting budget, and where it was measured."""
    record = read(name)
    protocol, made = record["protocol"], record["made"][0]
    rows = []
    for row in protocol["summary"]:
        used = "—"
        if row["budget"] is not None:
            shares = [f"{100 * row[name]:.0f}" for name in ("least_used", "most_used")]
            used = f"{'–'.join(dict.fromkeys(shares))} %"
        limit = "none" if row["budget"] is None else f"{row['budget']:g}"
        cells = [number(row[field], 3) for field in ("kl", "ratio")]
        target = number(row["target"], 3)
        if row["seeds"] > 1:
            target += f" ± {row['spread'] / 2:.3f}"
        plain = number(row.get("plain_target"), 3)
        rows.append([limit, *cells, used, target, plain, str(row["seeds"])])
    heads = ["budget", "KL", "log ratio", "KL, of the budget", "target loss"]
    shown = table([*heads, "– plain fine-tuning at this KL", "seeds"], rows)
    where = f"{made['device']}, torch {made['versions']['torch']}, {made['date']}"
    link = f"[{name}.json](../../benchmarks/results/{name}.json)"
    return f"{shown}\n\n{link}: `benchmarks/budget.py`; {where}."


def learning_rates() -> str:
    """The default learning rates of the preset holdfast, by the kind and the size of a model."""
    sizes = {"3 million": 3e6, "25 million": 2.5e7, "135 million": 1.35e8, "360 million": 3.6e8,
             "494 million": 4.94e8, "1.5 billion": 1.5e9, "8 billion": 8e9}  # fmt: skip
    columns: dict[str, Any] = {
        "language model": {"kind": "language"},
        "– with adapters": {"kind": "language", "adapters": True},
        "encoder": {"kind": "encoder"},
        "image model": {"kind": "image"},
    }
    rows = [
        [name, *(f"{default_lr(int(size), **options):g}" for options in columns.values())]
        for name, size in sizes.items()
    ]
    return table(["parameters", *columns], rows)


def learning_rate_shares() -> str:
    """What is left of a language model's learning rate, by samples and epochs."""
    heads = {"1 epoch": 1, "2 epochs": 2, "3 epochs": 3, "6 epochs": 6, "10 and more": 10}
    rows = [
        [name, *(f"{100 * _epochs.factor_of(samples, n, 0.5, 1.0):.0f} %" for n in heads.values())]
        for name, samples in {"600 and fewer": 600, "1,500": 1500, "3,000 and more": 3000}.items()
    ]
    return table(["samples", *heads], rows)


def gate() -> str:
    """What ``holdfast check`` found in models that were trained with several settings."""
    record = read("gate_h200")
    lines, names = [], [check["name"] for check in record["rows"][0]["checks"]]
    for row in record["rows"]:
        found = {
            check["name"]: number(check["value"], 3) if check["limit"] == "max_kl"
            else f"{100 * check['value']:+.1f} %"
            for check in row["checks"]
        }  # fmt: skip
        cells = [found.get(name, "—") for name in names]
        (_, loss), verdict = row["target"]["nll"], "failed" if row["exit_code"] else "passed"
        lines.append([row["name"], number(loss, 3), *cells, verdict])
    made = table(["", "GSM8K, nats", *names, ""], lines)
    how = "; ".join(f"{key}: {value}" for key, value in record["protocol"].items())
    source = "[gate_h200.json](../benchmarks/results/gate_h200.json)"
    where = f"{record['device']}, torch {record['versions']['torch']}, {record['date']}"
    return f"{made}\n\n{source}: {where}; {how}."


def real_models() -> str:
    """What each command did with each real model, and the sentences of those that refused."""
    record = read("real_models")
    commands = list(dict.fromkeys(row["command"] for row in record["rows"]))
    lines: list[list[str]] = []
    refused: dict[str, None] = {}  # in the order of the table
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        rows = {row["command"]: row for row in record["rows"] if row["model"] == model}
        cells = []
        for command in commands:
            row = rows[command]
            if "refused" in row:
                refused[row["refused"]] = None
                cells.append(f"refused ({list(refused).index(row['refused']) + 1})")
            elif "loss" in row:
                cells.append(f"loss {row['loss']['first']:.2f} → {row['loss']['last']:.2f}")
            elif "metric" in row:
                cells.append(f"{row['metric']} {row['before']:.2f} → {row['after']:.2f}")
            else:
                cells.append("ran")
        lines.append([model, rows[commands[0]]["data"], *cells])
    heads = [f"`{command}`" for command in commands]
    sentences = "\n".join(f"{i}. `{sentence}`" for i, sentence in enumerate(refused, 1))
    how = "; ".join(f"{key}: {value}" for key, value in record["protocol"].items())
    source = "[real_models.json](../benchmarks/results/real_models.json)"
    made = table(["model", "data", *heads], lines)
    return f"{made}\n\n{source}: {record['date']}; {how}.\n\n{sentences}"


def growth(name: str, axis: str) -> str:
    """How the time of every part grows along one axis."""
    record = read(name)
    found = [row for row in record["rows"] if row["axis"] == axis]
    sizes = dict.fromkeys(point["size"] for row in found for point in row["points"])
    rows = []
    for row in found:
        times = {point["size"]: point["ms"] for point in row["points"]}
        start = row["linear_from"]
        cells = [number(times.get(size)) for size in sizes]
        cells += [number(row[field], 2) for field in ("exponent", "last_exponent")]
        rows.append([SPEC["growth"][row["part"]], *cells, "—" if start is None else f"{start:,}"])
    heads = [f"{size:,} {axis}" for size in sizes]
    made = table(["ms", *heads, "exponent", "of the last two", "linear from"], rows)
    how = "; ".join(f"{key}: {value}" for key, value in record["protocol"].items())
    where = f"{record['device']}, torch {record['versions']['torch']}, {record['date']}"
    return f"{made}\n\n[{name}.json](../benchmarks/results/{name}.json): {where}; {how}."


def scale() -> str:
    """What recipes need for 70 billion weights on 64 GPUs."""
    record = read("scale")
    rows = [
        [
            row["recipe"], f"{number(row['memory_gb'], 1)}{'' if row['fits'] else ', too much'}",
            f"{number(row['whole_gb'], 1)}, {'on the CPU' if row['whole_fits'] else 'too much'}",
            f"{row['added_gb']:+.1f}" if row["added_gb"] else "0",
            number(row["cpu_gb"], 1) if row["cpu_gb"] else "0",
            number(row["update_s"]),
            f"{row['added_percent']:+.1f} %" if abs(row["added_percent"]) >= 0.05 else "0 %",
            number(row["before_s"] / 60, 1) if row["before_s"] else "0",
        ]
        for row in record["rows"]
    ]  # fmt: skip
    heads = ["", "GPU memory, GB", "before sharding, GB", "above plain, GB"]
    heads += ["kept in CPU memory per process, GB"]
    made = table([*heads, "update, s", "time", "before training, min"], rows)
    how = "; ".join(f"{key}: {value}" for key, value in record["protocol"].items())
    link = "[scale.json](../benchmarks/results/scale.json)"
    return f"{made}\n\n{link}: `benchmarks/scale.py`, {record['date']}; {how}."


def scale_parts() -> str:
    """What is in the memory of each of 64 GPUs."""
    found = read("scale")["rows"]
    wanted = [row for row in found if row["recipe"] in SPEC["scale_parts"]]
    names = dict.fromkeys(name for row in wanted for name in row["memory"])
    rows = [
        [name, *(number(size and size / 1e9, 1) for row in wanted
                 for size in [row["memory"].get(name)])]
        for name in names
    ]  # fmt: skip
    return table(["GB", *(row["recipe"] for row in wanted)], rows)


def forecasts() -> str:
    """Estimates beside what was measured."""
    fields, rows = SPEC["forecasts"].items(), []
    for row in read("scale")["checked"]:
        cells = [number(row[field], digits) for field, digits in fields]
        rows.append([SPEC["implementations"][row["case"]], *cells])
    heads = ["estimated, GB", "measured, GB", "ratio", "estimated, ms", "measured, ms", "ratio"]
    return table(["", *heads], rows)


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (
        methods, stage, presets, modules, timings, targets, memory, speed, speed_notes,
        comparison,
        recommendation, tune, digits, additivity, forgetting, ranks, learning_rates,
        learning_rate_shares, budgets, gate, real_models, growth, scale, scale_parts, forecasts,
        *_tables.TABLES, *_proof_tables.TABLES,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its tables."""
    return BLOCK.sub(lambda b: f"{b[1]}{TABLES[b[2]](*b[3].split())}\n{b[4]}", text)


def stale() -> list[str]:
    """The files that do not show the present results."""
    old = ["verdict.json"] if verdict.stale() else []
    old += [page.name for page in PAGES if filled(text := page.read_text("utf-8")) != text]
    return [*old, *pictures.stale(), *proof_pictures.stale(verdict.read())]


def write() -> None:
    """Bring all of them up to date."""
    if verdict.stale():
        verdict.write()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            page.write_text(made, encoding="utf-8")
    if pictures.stale():
        pictures.draw()
    if proof_pictures.stale(verdict.read()):
        proof_pictures.draw(verdict.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    if not parser.parse_args().check:
        write()
    elif old := stale():
        sys.exit(f"{', '.join(old)}: stale; run python benchmarks/pages.py")


if __name__ == "__main__":
    main()
