"""Fill the tables of README.md and of pages in docs/ from the registry and the committed results.

A table stands between ``<!-- name -->`` and ``<!-- /name -->``; the names are those of PARTS.

python benchmarks/pages.py            # writes the pages
python benchmarks/pages.py --check    # only says whether they agree
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "papers"))

import _headlines
import _methods
from _pages import ROOT, Results, number, scoring, table

from holdfast import registry
from holdfast.comparison.results import Measured, RunResult, summarise
from holdfast.io import codec as _codec

RESULTS = Results()
read = RESULTS.read


def methods() -> str:
    rows = []
    for entry in registry.methods():
        paper = f"[{entry.paper}]({entry.url})" if entry.url else ""
        name, cls = f"`{entry.name}`", f"`{entry.cls.__name__}`"
        rows.append([entry.stage, name, cls, entry.summary, paper])
    for above, row in reversed(list(itertools.pairwise(rows))):
        row[0] = "" if row[0] == above[0] else row[0]
    return table(["stage", "name", "class", "what it does", "paper"], rows)


def additivity() -> str:
    here, lm = read("additivity"), read("additivity_lm")["medians"]
    rows = []
    for name, m in here["medians"].items():
        change = lm[name]["retained"] - lm["pretrained"]["retained"]
        figures = [f"{m['target']:.1f}", f"{m['retained']:.1f}"]
        rows.append([name, *figures, f"{lm[name]['target']:.3f}", f"{change:+.3f}"])
    head = ["", "tilted digits, %", "retained: upright, %", "GSM8K loss", "WikiText-2 loss, change"]
    return table(head, rows)


def forgetting() -> str:
    """Two fine-tunes of SmolLM2 side by side: before, and after each."""
    runs = {"standard": "standard", "RecAdam + FLOW": "recadam_flow"}
    reports = {name: read(f"forgetting_{file}")["report"] for name, file in runs.items()}
    names = {
        ("gsm8k", "nll"): "GSM8K (target), loss", ("wikitext", "nll"): "WikiText-2, loss",
        ("piqa", "accuracy"): "PIQA, %", ("arc_easy", "accuracy"): "ARC-easy, %",
        ("lambada", "exact_match"): "LAMBADA, %",
    }  # fmt: skip
    rows: list[list[str]] = []
    for (name, metric), title in names.items():
        share = metric != "nll"
        scale, form = (100, ".1f") if share else (1, ".3f")
        row = [title]
        for report in reports.values():
            (score,) = (s for s in report["scores"] if (s["name"], s["metric"]) == (name, metric))
            change = score["change"]
            low, high = (f"{scale * change[end]:+{form}}" for end in ("low", "high"))
            if len(row) == 1:
                row.append(f"{scale * score['before']['value']:{form}}")
            row.append(f"{scale * change['value']:+{form}} ({low} to {high})")
        rows.append(row)
    for i, title in enumerate(["KL on the base's own texts, nats a token", "KL on GSM8K"]):
        kl = [r["divergences"][i]["kl"] for r in reports.values()]
        figures = [f"{k['value']:.2f} ({k['low']:.2f} to {k['high']:.2f})" for k in kl]
        rows.append([title, "0", *figures])
    totals = [r["drift"]["total"] for r in reports.values()]
    moved = [f"{100 * t['distance'] / t['norm']:.1f}" for t in totals]
    rows.append(["weights moved, % of their norm", "0", *moved])
    return table(["", "pretrained", *(f"{name}: change" for name in reports)], rows)


def digits() -> str:
    medians = read("digits")["medians"]
    rows = [[name, f"{m['target']:.1f}", f"{m['retained']:.1f}"] for name, m in medians.items()]
    return table(["", "target (tilted)", "retained (upright)"], rows)


def compare() -> str:
    """The comparison without arguments: medians over seeds."""
    rows = comparison("compare_default")
    return table(["", "GSM8K loss", "prose", "verse", "code"], rows)


def real() -> str:
    """The comparisons of real models, side by side where they share a recipe."""
    lm, encoder = comparison("compare_smollm2_gsm8k"), comparison("compare_minilm_rte")
    heads = ["SmolLM2-135M", "GSM8K loss", "WikiText-2 perplexity", "PIQA, points"]
    others = ["MiniLM-L6", "RTE, %", "STS-B, Spearman"]
    return "\n\n".join([table(heads, lm), table(others, encoder)])


def comparison(name: str) -> list[list[str]]:
    """A row a recipe: its target, and the change of each test, medians over seeds."""
    found = summarise(_codec.decode(RunResult, run, "run") for run in read(name)["runs"])

    def change(test: Measured, after: float) -> str:
        if test.metric == "perplexity":
            return f"{100 * (after / test.before - 1):+.0f} %"
        return f"{100 * (after - test.before):+.1f}" if _share(test) else f"{test.change:+.3f}"

    def level(test: Measured, value: float) -> str:
        return f"{100 * value:.1f}" if _share(test) else f"{value:.3f}"

    first = found[0]
    rows = [["pretrained", level(first.target, first.target.before)]]
    rows[0] += [
        f"{t.before:.1f}" if t.metric == "perplexity" else level(t, t.before)
        for t in first.retained
    ]
    for one in found:
        tests = [change(t, t.after) for t in one.retained]
        rows.append([one.label, level(one.target, one.target.after), *tests])
    return rows


def _share(test: Measured) -> bool:
    return test.metric.startswith("acc")


def tune() -> str:
    """What a search of twenty trials came to."""
    d = read("tune_default")

    def half(point: dict[str, Any]) -> RunResult:
        return _codec.decode(RunResult, {**point["reported"], "kl": {}, "drift": None}, "run")

    def beat(one: RunResult, other: RunResult) -> bool:
        return one.target.after <= other.target.after and one.loss <= other.loss

    taken, default, plain = (half(d[which]) for which in ("taken", "default", "unmerged"))
    values = ", ".join(f"{n.split('.')[-1]} {v:.3g}" for n, v in d["taken"]["values"].items())
    rows = [
        [name, f"{run.target.after:.3f}", f"{100 * run.loss:.0f} %"]
        for name, run in (
            ("RecAdam, defaults", plain),
            ("RecAdam + WiSE-FT, defaults", default),
            (f"found: {values}", taken),
        )
    ]
    front = [half(point) for point in d["frontier"]]
    better = [sum(beat(one, other) for one in front) for other in (plain, default)]
    verbs = ["beats" if beat(taken, other) else "does not beat" for other in (plain, default)]
    made = table(["held-out half", "GSM8K loss", "lost on prose, verse, code (mean)"], rows)
    return (
        f"{made}\n\nThe recipe found {verbs[0]} RecAdam's defaults in both columns and {verbs[1]} "
        f"those of RecAdam + WiSE-FT in both. Of the {len(front)} models on the search's frontier "
        f"{better[0]} beat the first and {better[1]} the second. The search took "
        f"{d['protocol']['seconds'] / 60:.0f} minutes on two cores."
    )


def ranks() -> str:
    rows = {(row["recipe"], row["dtype"]): row for row in read("ranks")["rows"]}
    columns = [(kind, dtype) for dtype in ("float64", "float32") for kind in ("ddp", "fsdp2")]
    body = [
        [f"`{recipe}`", *(f"{rows[recipe, dtype][kind]:.0e}" for kind, dtype in columns)]
        for recipe in dict.fromkeys(recipe for recipe, _ in rows)
    ]
    return table(["", *(f"{kind.upper()}, {dtype}" for kind, dtype in columns)], body)


def speed() -> str:
    """The headline ratios; docs/performance.md has the rest."""
    gpu, cases = "recadam_step_h200", ("bert-base", "llama-1b")
    steps = {
        "RecAdam": (gpu, "recadam_fused", ""),
        "RecAdam, bfloat16 weights and anchors": (gpu, "recadam_fused", ", bfloat16"),
        "RecAdam, moments of 8 bits, bfloat16 anchors": (gpu, "recadam_8bit", ""),
        "– and bfloat16 weights": (gpu, "recadam_8bit", ", bfloat16"),
        "RecAdam after annealing (of a short shift)": (gpu, "recadam_after_annealing", ""),
        "MoFO, 15 %": ("mofo_step_h200", "mofo_fused", ""),
    }
    rows = [
        [title, *(number(RESULTS.figure(name, case + dtype, impl)) for case in cases)]
        for title, (name, impl, dtype) in steps.items()
    ]
    heads = ["one step on a GPU, × torch's fused AdamW of that dtype", "BERT-base", "Llama-1B"]
    slow = RESULTS.figure("recadam_step_cpu", "minilm-l6", "recadam_fused")
    others = [
        f"On a CPU (MiniLM-L6) a step of `RecAdam(fused=True)` takes {number(slow)} × as long as "
        "fused AdamW's."
    ]
    whole = {"minilm, rte": "MiniLM-L6 on RTE", "smollm2, gsm8k": "SmolLM2-135M on GSM8K"}
    found = {
        title: RESULTS.figure("end_to_end_h200", case, "recadam+flow", "x_adamw")
        for case, title in whole.items()
    }
    told = ", ".join(f"{title} {x:.2f} ×" for title, x in found.items() if x is not None)
    if told:
        others.append(f"A whole update with RecAdam and FLOW, against AdamW: {told}.")
    return "\n\n".join([table(heads, rows), " ".join(others), scoring(RESULTS, "flow_score_h200")])


PAGES = (
    "README.md", "docs/choose.md", "docs/compare.md", "docs/measure.md", "docs/resume.md",
    "docs/methods/index.md",
)  # fmt: skip
PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        _headlines.frontier, _headlines.headlines, _headlines.results,
        methods, speed, compare, real, tune, digits, additivity, forgetting, ranks,
    )
}  # fmt: skip
PARTS |= {stage: _methods.of_stage(stage) for stage in registry.STAGES}
_PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with what belongs between its markers."""
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they agree")
    check = parser.parse_args().check
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    nowhere = PARTS.keys() - {found[2] for text in pages.values() for found in _PART.finditer(text)}
    if nowhere:
        sys.exit(f"no page has the markers of {', '.join(sorted(nowhere))}")
    stale = {name: made for name, text in pages.items() if (made := filled(text)) != text}
    if check and stale:
        sys.exit(f"{', '.join(stale)}: not what the results say. Run benchmarks/pages.py")
    for name, made in stale.items():
        (ROOT / name).write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
