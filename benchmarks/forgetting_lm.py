"""What fine-tuning costs a real language model, by our own probes and by lm-evaluation-harness.

SmolLM2-135M-Instruct learns grade-school math (GSM8K) by a recipe. Before and after: its loss on
GSM8K's test answers, WikiText-2, PIQA, ARC-easy, LAMBADA. The last three are run twice, by
holdfast's probes and as tasks of lm-evaluation-harness over the same rows, with the prompts of the
harness's own tasks of these names; WikiText's loss is compared with the harness's rolling
likelihood of the same text.

    python benchmarks/forgetting_lm.py --model SMOLLM2 --data DATA --json FILE

DATA holds lm/*.gz. A GPU takes a few minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _common import default_device, write_results
from additivity_lm import answers, read

from holdfast import ForgettingReport, Loader, LoopSettings, Recipe, finetune_loop, measure
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.probes import Completions, MultipleChoice, Text
from holdfast.evaluate.watch import Watch, curves_of

QUESTION = "Question: {}\nAnswer:"


def arc_rows(path: Path) -> list[dict[str, Any]]:
    """ARC from its instruction form: the question, its answers, the right one."""
    rows = []
    for row in read(path):
        text = row["instruction"].split("question: ", 1)[1].split("\n\nAnswer format")[0]
        question, _, rest = text.partition("\n\nAnswer1: ")
        choices = re.split(r" Answer\d: ", rest)
        rows.append({"question": question, "choices": choices, "label": int(row["answer"][-1]) - 1})
    return rows


def lambada_rows(path: Path) -> list[dict[str, str]]:
    """The passage without its last word, and the word."""
    pairs = [row["text"].rpartition(" ") for row in read(path)]
    return [{"prompt": before, "completion": f" {word}"} for before, _, word in pairs]


def harness_tasks(folder: Path, rows: dict[str, list[Any]]) -> list[str]:
    """The same rows as tasks of the harness."""
    import yaml

    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    choice = {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label",
        "metric_list": accuracy,
    }  # fmt: skip
    tasks: dict[str, dict[str, Any]] = {
        "piqa": {**choice, "doc_to_text": QUESTION.format("{{goal}}")},
        "arc_easy": {**choice, "doc_to_text": QUESTION.format("{{question}}")},
        "lambada": {
            "output_type": "loglikelihood", "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{completion}}", "metric_list": accuracy,
        },
        "wikitext": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows[name])))
        where = {
            "task": f"harness_{name}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**where, **task}))
    return [f"harness_{name}" for name in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", default="standard")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2500, help="of the training data")
    parser.add_argument("--limit", type=int, default=1000, help="rows of each test at most")
    parser.add_argument("--characters", type=int, default=1_000_000, help="of WikiText at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_float32_matmul_precision("high")
    device = default_device()
    folder = args.data / "lm"
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    with gzip.open(folder / "wikitext2-test.txt.gz", "rt") as file:
        wikitext = file.read()[: args.characters]
    rows: dict[str, list[Any]] = {
        "piqa": list(read(folder / "piqa-valid.jsonl.gz")),
        "arc_easy": arc_rows(folder / "arc-easy-test.jsonl.gz"),
        "lambada": lambada_rows(folder / "lambada-test.jsonl.gz"),
    }
    rows = {name: some[: args.limit] for name, some in rows.items()} | {
        "wikitext": [{"text": wikitext}]
    }
    test = [
        {
            "prompt": f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n",
            "completion": f"{row['answer']}<|im_end|>\n",
        }
        for row in read(folder / "gsm8k-test.jsonl.gz")[: args.limit]
    ]
    train = answers(tokenizer, read(folder / "gsm8k-train.jsonl.gz")[: args.samples])

    def warm_up_and_decay(update: int, total: int) -> float:
        return min((update + 1) / (0.03 * total), 1 - update / total)

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(device)
    watch = Watch(
        model, every=10, loader=Loader(tokenizer=tokenizer, max_length=512), context_free=16,
        text={"wikitext": wikitext[:60_000]}, target={"gsm8k": test[:100]},
    )  # fmt: skip
    history: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        base, tuned = place / "base", place / "tuned"
        model.save_pretrained(base), tokenizer.save_pretrained(base)
        tuned_model: Any = finetune_loop(
            model, Recipe.preset(args.recipe), train, lr=args.lr, epochs=args.epochs,
            batch_size=args.batch_size, seed=args.seed, watch=watch, log=history.append,
            progress=False, settings=LoopSettings(
                schedule=warm_up_and_decay, clip_norm=1.0,
                autocast=torch.bfloat16 if device.type == "cuda" else None,
            ),
        )  # fmt: skip
        tuned_model.save_pretrained(tuned), tokenizer.save_pretrained(tuned)
        del model, tuned_model
        tasks = harness_tasks(place, rows)
        torch.set_float32_matmul_precision("highest")  # or the order of batches would matter
        report = measure(
            base,
            tuned,
            target={"gsm8k": test},
            probes=[
                Text("wikitext", wikitext, metric="nll"),
                MultipleChoice("piqa", rows["piqa"], QUESTION.format("{goal}")),
                MultipleChoice("arc_easy", rows["arc_easy"], QUESTION.format("{question}")),
                Completions("lambada", rows["lambada"]),
                Harness(tasks, include_path=place),
            ],
            loader=Loader(dtype=torch.float32),
            progress=False,
        )
    size = {"bytes": len(wikitext.encode()), "tokens": len(tokenizer(wikitext)["input_ids"])}
    compared = beside_the_harness(report, size)
    print(f"{'':14}{'before':>12}{'harness':>12}{'after':>12}{'harness':>12}")
    for row in compared:
        print(f"{row['task']:14}" + "".join(f"{x:12.6f}" for x in (*row["before"], *row["after"])))
    report = replace(
        report,
        base="SmolLM2-135M-Instruct",
        tuned=f"{args.recipe} on GSM8K",
        scores=tuple(s for s in report.scores if not s.name.startswith("harness_")),
        curves=curves_of(history),
    )
    report.to_terminal()
    if args.json:
        protocol = {
            "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)", "recipe": args.recipe,
            "settings": Recipe.preset(args.recipe).to_dict(),
            "target": "GSM8K", "lr": args.lr, "epochs": args.epochs, "seed": args.seed,
            "batch_size": args.batch_size, "samples": args.samples, "rows_a_test": args.limit,
            "training": "float32 weights, bfloat16 autocast, 3 % warm-up, linear to 0",
            "testing": "float32", "wikitext": size, "windows": 1024,
        }  # fmt: skip
        write_results(
            args.json, device, protocol, harness=compared, report=json.loads(report.to_json())
        )


def beside_the_harness(report: ForgettingReport, wikitext: dict[str, int]) -> list[dict[str, Any]]:
    """Our figure and the harness's, before and after, for each task that both ran."""
    figures = {(s.name, s.metric): (s.before.value, s.after.value) for s in report.scores}
    pairs = {
        "piqa": (figures["piqa", "accuracy"], figures["harness_piqa", "acc"]),
        "arc_easy": (figures["arc_easy", "accuracy"], figures["harness_arc_easy", "acc"]),
        "lambada": (figures["lambada", "exact_match"], figures["harness_lambada", "acc"]),
        "wikitext": (
            tuple(x * wikitext["tokens"] / wikitext["bytes"] for x in figures["wikitext", "nll"]),
            tuple(math.log(x) for x in figures["harness_wikitext", "byte_perplexity"]),
        ),
    }
    return [
        {"task": task, "before": [ours[0], theirs[0]], "after": [ours[1], theirs[1]]}
        for task, (ours, theirs) in pairs.items()
    ]


if __name__ == "__main__":
    main()
