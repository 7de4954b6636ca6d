"""Make docs/performance.md from benchmarks/results/*.json.

python benchmarks/performance.py            # writes the page
python benchmarks/performance.py --check    # only says whether it agrees
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from _common import SHAPES
from _pages import (
    CPU,
    DISK,
    EIGHT_BIT,
    GPU,
    GPU_BF16,
    GROWTH,
    MOFO,
    MOFO_GPU,
    PENALTIES,
    PENALTY_GPU,
    PLACEMENT,
    RECADAM,
    ROOT,
    SCORING,
    WHOLE,
    Columns,
    Results,
    by_case,
    measured,
    ms,
    number,
    prose,
    scoring,
    table,
)
from _performance_text import (
    ABOUT,
    CHOICE,
    CHOSEN,
    NOT_SAID,
    OF_DISK,
    OF_EIGHT_BIT,
    OF_MOFO,
    OF_PENALTIES,
    OF_PLACES,
    OF_RUNS,
)
from _promises import LARGE, promised

PLACES = {
    "torch_fused_adamw": RECADAM["torch_fused_adamw"],
    "recadam_device": "`RecAdam`, anchors on the GPU",
    "recadam_host": "`RecAdam`, anchors in the host's memory, page-locked: `Reference.pinned()`",
    "recadam_pageable": "`RecAdam`, anchors in the host's memory, not page-locked",
}
RUNS = {
    "plain_adamw": "torch's fused AdamW in a loop without holdfast",
    "adamw": "recipe `standard`, which is AdamW",
    "flow": "recipe `flow`",
    "recadam": "recipe `recadam`",
    "recadam+flow": "recipe `recadam+flow`",
}
SCORERS = {
    "forward_alone": "the forward pass alone",
    "score": "`holdfast.score`",
    "score_cached": "– again, from its cache",
    "naive_two_pass": "a naive two-pass version",
    "train_epoch": "one epoch of training, for comparison",
}
ON_DISK = {
    "cat": "`cat` of both checkpoints",
    "cp": "`cp` of one",
    "import": "starting Python and importing holdfast",
    "drift": "the drift between them",
    "merge": "their merge",
}
COMMANDS = {
    GPU: "recadam_step.py --repeats 11",
    GPU_BF16: "recadam_step.py --dtypes bfloat16 --cases bert-base llama-1b --repeats 9",
    EIGHT_BIT: "recadam_step.py --cases llama-1b --repeats 7 \\\n"
    "    --impls recadam_8bit torchao_adamw_8bit",
    CPU: "recadam_step.py --device cpu --cases minilm-l6 bert-base --repeats 15",
    MOFO_GPU: "mofo_step.py --repeats 5",
    PENALTY_GPU: "penalty_step.py --cases bert-base llama-1b --repeats 7",
    PLACEMENT: "anchor_placement.py --updates 8 --rounds 1",
    GROWTH: "step_growth.py --repeats 5",
    WHOLE: "end_to_end.py --minilm DIR --rte FILE --smollm2 DIR --gsm8k FILE --updates 60",
    SCORING[0]: "flow_score.py --data FILE --samples 2000 --model smollm2-135m \\\n"
    "    --dtype bfloat16 --batch-size 16 --repeats 2",
    SCORING[1]: "flow_score.py --data FILE --samples 200 --device cpu --repeats 2",
}

STEP: Columns = {
    "ms": ("ms", None),
    "× limit": ("x_limit", 2),
    "× AdamW": ("x_fused_adamw", 2),
    "host ms": ("host_ms", None),
}
PLACED: Columns = {
    "backward and step, ms": ("ms", None),
    "× on the GPU": ("x_device", 3),
    "whole update, ms": ("update_ms", None),
    "peak, GB": ("peak_gb", 2),
}
UPDATES: Columns = {
    "ms an update": ("ms", None),
    "× AdamW": ("x_adamw", 3),
    "scoring, s": ("score_s", 1),
}
SCORED: Columns = {
    "s": ("seconds", 3),
    "samples a second": ("samples_per_s", None),
    "× score": ("x_score", 3),
    "× limit": ("x_limit", 2),
}
STORED: Columns = {
    "ms": ("ms", None),
    "× limit": ("x_limit", 2),
    "× `cp`": ("x_cp", 2),
    "processor, s": ("processor_s", 2),
    "peak memory, GB": ("peak_gb", 2),
}


def section(
    results: Results, name: str, titles: dict[str, str], columns: Columns, first: str = "shapes"
) -> str:
    """A table, and where it comes from."""
    rows = results.rows(name)
    made = [by_case(rows, titles, columns, first)] if rows else []
    return "\n\n".join([*made, measured(results, name)])


def recadam(results: Results) -> str:
    told = []
    for case in LARGE:
        own, adamw = (
            results.row(GPU, case, impl) for impl in ("recadam_fused", "torch_fused_adamw")
        )
        if own and adamw:
            loop = number(results.figure(GPU, case, "plain_loop"), 1)
            told.append(
                f"On {case} a step takes {own['x_fused_adamw']:.2f} × as long as torch's fused "
                f"AdamW's, with {own['bytes_per_param']:g} bytes a parameter to move instead of "
                f"{adamw['bytes_per_param']:g}; a plain loop takes {loop} ×."
            )
    made = [" ".join(told)] if told else []
    for dtype, narrow in (("float32", False), ("bfloat16, moments too unless said", True)):
        rows = [r for r in results.rows(GPU) if r["case"].endswith(", bfloat16") == narrow]
        if rows:
            made += [f"On a GPU, weights in {dtype}:", by_case(rows, RECADAM, STEP)]
    on_cpu = {head: column for head, column in STEP.items() if head != "host ms"}  # ms again
    return "\n\n".join(
        [
            *made,
            measured(results, GPU),
            measured(results, GPU_BF16),
            prose(OF_EIGHT_BIT),
            section(results, EIGHT_BIT, RECADAM, STEP),
            "On a CPU, weights in float32. A copy on a CPU also reads the lines that it is about "
            "to overwrite, which an update in place is spared: a step can do better than the limit "
            "there.",
            section(results, CPU, RECADAM, on_cpu),
        ]
    )


def scores(results: Results) -> str:
    made = []
    if any("x_limit" in row for name in SCORING for row in results.rows(name)):
        made.append(
            "The limit is the forward pass over the same batches as far as the logits of the "
            "targets, without losses."
        )
    for name in SCORING:
        made += [scoring(results, name)] if results.has(name) else []
        made.append(section(results, name, SCORERS, SCORED, "model and data"))
    return "\n\n".join(made)


def growth(results: Results) -> str:
    rows = results.rows(GROWTH)
    if not rows:
        return measured(results, GROWTH)
    own = [row for row in rows if row["impl"] == "recadam_fused"]
    base = {row["case"]: row for row in rows if row["impl"] == "torch_fused_adamw"}
    made: list[str] = []
    for fixed, grows, head, unit in (
        ("tensors", "parameters", "With the number of parameters, in", "tensors"),
        ("parameters", "tensors", "With the number of tensors,", "parameters in all"),
    ):
        kept = _most([row[fixed] for row in own])
        some = sorted((row for row in own if row[fixed] == kept), key=lambda row: row[grows])
        lines = [
            [
                f"{row[grows]:,}", ms(base[row["case"]]["ms"]), ms(row["ms"]),
                number(row["x_limit"]), number(row["x_fused_adamw"]),
                ms(base[row["case"]]["host_ms"]), ms(row["host_ms"]),
            ]
            for row in some
        ]  # fmt: skip
        heads = [grows, "AdamW, ms", "RecAdam, ms", "× limit", "× AdamW"]
        heads += ["host ms, AdamW", "host ms, RecAdam"]
        first, last = some[0], some[-1]
        told = (
            f"From {first[grows]:,} to {last[grows]:,} {grows} "
            f"({last[grows] / first[grows]:,.0f} ×) RecAdam's step goes from {ms(first['ms'])} "
            f"to {ms(last['ms'])} ms ({last['ms'] / first['ms']:,.1f} ×), the host's share from "
            f"{ms(first['host_ms'])} to {ms(last['host_ms'])} ms."
        )
        made += [f"{head} {kept:,} {unit}:", table(heads, lines), told]
        near = [row for row in some if row["x_limit"] <= 1.2]
        if grows == "parameters" and near and near == some[-len(near) :]:
            made[-1] += f" It is within 1.2 × of the limit from {near[0][grows]:,} on."
    return "\n\n".join([*made, measured(results, GROWTH)])


def _most(values: list[int]) -> int:
    return max(values, key=values.count)


def memory(results: Results) -> str:
    """Bytes of state and anchors, beside what one pass moves."""
    lines = []
    sources = ((GPU, RECADAM), (MOFO_GPU, MOFO), (PENALTY_GPU, PENALTIES))
    for name, titles in sources:
        for impl, title in titles.items():
            found = [results.row(name, f"llama-1b{end}", impl) for end in ("", ", bfloat16")]
            again = name != GPU and impl in RECADAM
            if any(found) and not again:
                told = title.replace("–", "RecAdam") if name == GPU else title
                kept = [number(row.get("kept_bytes_per_param")) for row in found]
                moved = [number(row.get("bytes_per_param")) for row in found]
                lines.append([told, *kept, *moved])
    heads = ["", "kept, float32 weights", "kept, bfloat16 weights"]
    heads += ["moved, float32", "moved, bfloat16"]
    told = (
        "Bytes a parameter on the GPU (llama-1b): of state and anchors, without weights and "
        "gradients; and what one pass of the step moves, from which the limit comes. Penalties "
        "come on top of their optimizer."
    )
    made = table(heads, lines) if lines else "Not measured yet."
    return f"{told}\n\n{made}"


def sizes() -> str:
    return ", ".join(
        f"`{name}` {sum(map(math.prod, shapes)) / 1e6:,.1f} M in {len(shapes)}"
        for name, shapes in SHAPES.items()
    )


def reproduce() -> str:
    lines = [
        f"python benchmarks/{command} \\\n    --out benchmarks/results/{name}.json"
        for name, command in COMMANDS.items()
    ]
    lines.append("python benchmarks/merge_and_drift.py --gb 4")
    lines.append("python benchmarks/performance.py && python benchmarks/pages.py")
    block = "\n".join(["```bash", *lines, "```"])
    return (
        f"From a clone. Each script says in its `--help` what it does.\n\n{block}\n\n"
        "FILE is JSON lines of RTE (`sentence1`, `sentence2`, `label`) or GSM8K (`question`, "
        "`answer`), gzipped or, for scoring, not; DIR a model's folder with its tokenizer. "
        "torchao's optimizer (`pip install torchao`; here 0.18) is compiled for each shape and "
        "only measured when it is named."
    )


def page(results: Results) -> str:
    sections = {
        "What is measured": f"{prose(ABOUT)}\n\nShapes, parameters in tensors: {sizes()}.",
        "Promised and measured": promised(results),
        "RecAdam's step": recadam(results),
        "MoFO's step": f"{prose(OF_MOFO)}\n\n{section(results, MOFO_GPU, MOFO, STEP)}",
        "Penalties": f"{prose(OF_PENALTIES)}\n\n" + section(results, PENALTY_GPU, PENALTIES, STEP),
        "Anchors in the host's memory": f"{prose(OF_PLACES)}\n\n"
        + section(results, PLACEMENT, PLACES, PLACED, "model"),
        "A whole update": f"{prose(OF_RUNS)}\n\n"
        + section(results, WHOLE, RUNS, UPDATES, "model and data"),
        "Scoring for FLOW": scores(results),
        "Drift and merging": f"{prose(OF_DISK)}\n\n"
        + section(results, DISK, ON_DISK, STORED, "checkpoint"),
        "How the cost grows": growth(results),
        "What is kept in memory": memory(results),
        "Which implementation runs": f"{CHOSEN}\n\n{prose(CHOICE)}",
        "How to reproduce": reproduce(),
        "What the figures do not say": NOT_SAID,
    }
    made = (
        "<!-- made by benchmarks/performance.py: edit that -->\n\n# Performance\n\n"
        "All figures are from `benchmarks/results/`; the page is made from there."
    )
    for title, text in sections.items():
        made += f"\n\n## {title}\n\n{text}"
    return f"{made}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=Results().folder)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args()
    made = page(Results(args.results))
    if not args.check:
        args.out.write_text(made, encoding="utf-8")
    elif not args.out.exists() or args.out.read_text(encoding="utf-8") != made:
        sys.exit(f"{args.out.name} disagrees with the results: run benchmarks/performance.py")


if __name__ == "__main__":
    main()
