"""What ``holdfast plan`` estimates for a model of 70 billion weights on 64 GPUs.

    python benchmarks/scale.py --out benchmarks/results/scale.json

Nothing is trained: only the shapes of the model are known here. The second part compares estimates
with the peak memory and the time that other benchmarks measured on a GPU. About three minutes on
two idle CPU cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import fitting
import torch
from _common import write_results
from anchor_placement import SIZES

from holdfast import Recipe
from holdfast.hosts.forecast import Machines, forecast, measured
from holdfast.hosts.job import Training

RESULTS = Path(__file__).parent / "results"
#: The published shapes of Llama 3 70B.
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TRAINING = Training(batch_size=1, max_length=4096, gradient_checkpointing=True)
MACHINES = Machines(gpus=64, anchors="host", anchor_dtype="bfloat16", data_size=100_000)
#: For each row: the preset and its settings.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain fine-tuning": ("standard", {}),
    "`recadam`, θ* in bfloat16": ("recadam", {}),
    "`holdfast`, which is self-replay": ("holdfast", {}),
    "`self-replay`, `share=0.25`": ("self-replay", {"recall.share": 0.25}),
    "`flow`": ("flow", {}),
    "`l2-sp`, θ* in bfloat16": ("l2-sp", {}),
    "`ewc`, θ* in bfloat16": ("ewc", {}),
    "`distill`": ("distill", {}),
    "`lora`": ("lora", {}),
    "`lora+self-replay`, the whole vocabulary, with the adapters off": (
        "lora+self-replay", {"recall.top": None, "recall.share": 0.25},
    ),
    "`lora+distill`": ("lora+distill", {}),
}  # fmt: skip
#: The models of end_to_end.py, and their updates.
SMALL: dict[str, tuple[dict[str, Any], Training]] = {
    "minilm, rte": (
        {
            "architectures": ["BertForSequenceClassification"], "model_type": "bert",
            "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
            "num_attention_heads": 12, "vocab_size": 30522,
        },
        Training(batch_size=32, max_length=128),
    ),
    "smollm2, gsm8k": (
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        },
        Training(batch_size=16, max_length=140),
    ),
}  # fmt: skip


def save(folder: str, shapes: dict[str, Any]) -> str:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shapes}
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def at_scale() -> list[dict[str, Any]]:
    """One row per recipe."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save(folder, LLAMA_70B)
        for title, (name, settings) in ROWS.items():
            recipe = Recipe.preset(name).with_settings(settings)
            found = forecast(folder, name, recipe, TRAINING, MACHINES)
            needs, room = found.needs, MACHINES.memory
            rows.append(
                {
                    "recipe": title,
                    "memory_gb": round(needs.bytes / 1e9, 2),
                    "added_gb": round((needs.bytes - found.plain.bytes) / 1e9, 2),
                    "fits": needs.bytes <= room,
                    "whole_gb": round(needs.whole_bytes / 1e9, 2),
                    # Without work before training, it can wait in CPU memory.
                    "whole_fits": needs.whole_bytes <= room or not needs.before,
                    "cpu_gb": round(sum(needs.on_cpu.values()) / 1e9, 2),
                    "update_s": round(needs.seconds, 3),
                    "added_percent": round(100 * (found.x_time - 1), 2),
                    "before_s": round(sum(needs.before.values()), 1),
                    "memory": needs.memory,
                    "update": needs.update,
                    "before": needs.before,
                }
            )
            if name == "recadam":
                rows.append(in_cpu_memory(rows[-1], found.plain.seconds))
            print({k: v for k, v in rows[-1].items() if not isinstance(v, dict)}, flush=True)
    return rows


def in_cpu_memory(row: dict[str, Any], plain: float) -> dict[str, Any]:
    """A row with its shard of θ* in CPU memory, on paper: this version keeps it on the GPU.

    It is fetched behind the backward pass, which takes the measured ratio longer.
    """
    anchors, update = row["memory"]["θ*"], row["update"]
    host = measured()["host_anchors"]
    target = update["forward and backward"]
    late = max(0.0, anchors / host["bytes_per_s"] - target) + (host["x_update"] - 1) * target
    return {
        **row,
        "recipe": f"{row['recipe']}, in CPU memory (on paper)",
        "memory_gb": round(row["memory_gb"] - anchors / 1e9, 2),
        "added_gb": round(row["added_gb"] - anchors / 1e9, 2),
        "cpu_gb": round(row["cpu_gb"] + anchors / 1e9, 2),
        "update_s": round(row["update_s"] + late, 3),
        "added_percent": round(100 * ((row["update_s"] + late) / plain - 1), 2),
        "memory": {part: size for part, size in row["memory"].items() if part != "θ*"},
        "update": {**update, "fetching θ*": late},
    }


def beside_measurements() -> list[dict[str, Any]]:
    """Estimates of trainings that were measured."""
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size",
    )  # fmt: skip
    rows = []

    def add(case: str, shapes: dict[str, Any], recipe: Recipe, training: Training,
            row: dict[str, Any], machines: Machines, all_logits: bool) -> None:  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            save(folder, {"tie_word_embeddings": True, **shapes})
            needs = forecast(folder, recipe.name, recipe, training, machines).needs
        seconds = {
            "estimated_ms": round(1e3 * needs.seconds, 1),
            "measured_ms": row["update_ms"],
            "x_time": round(1e3 * needs.seconds / row["update_ms"], 3),
        }
        estimate, peak = needs.bytes / 1e9, row.get("peak_gb")
        if all_logits:  # bfloat16 ones, and three tensors in float32
            outputs = 14 * training.batch_size * training.max_length * shapes["vocab_size"]
            estimate += (outputs - needs.memory["outputs and loss"]) / 1e9
        rows.append(
            {
                "case": case,
                "estimated_gb": round(estimate, 1) if peak else None,
                "measured_gb": peak,
                "x_memory": round(estimate / peak, 3) if peak else None,
                **seconds,
            }
        )
        print(rows[-1], flush=True)

    found = {r["impl"]: r for r in _read("fitting_h200")["rows"]}
    shapes = dict(zip(keys, fitting.SIZES["1.5b"], strict=True))
    for name in ("fit_full", "fit_accumulate", "fit_checkpointing", "fit_bfloat16", "fit_rounded",
                 "fit_lora"):  # fmt: skip
        given, settings = fitting.ROWS[name]
        training = Training(**{"batch_size": 16, "max_length": fitting.LENGTH, **settings})
        add(name, shapes, Recipe.from_dict(given), training, found[name], Machines(), False)
    # The loss of this benchmark is that of transformers.
    placed = {r["impl"]: r for r in _read("anchor_placement_h200")["rows"]}
    training = Training(batch_size=8, max_length=2048)
    for impl, name, where in (("torch_fused_adamw", "standard", "device"),
                              ("recadam_device", "recadam", "device"),
                              ("recadam_host", "recadam", "host")):  # fmt: skip
        machines = Machines(anchor_dtype="bfloat16", anchors=where)  # type: ignore[arg-type]
        shapes, recipe = dict(SIZES["llama-1b"]), Recipe.preset(name)
        add(impl, shapes, recipe, training, placed[impl], machines, True)
    plain = {r["case"]: r for r in _read("end_to_end_h200")["rows"] if r["impl"] == "plain_adamw"}
    for case, (shapes, training) in SMALL.items():
        row = {"update_ms": plain[case]["ms"]}
        add(case, shapes, Recipe(), training, row, Machines(), False)
    return rows


def _read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    rows, checked = at_scale(), beside_measurements()
    if args.out:
        constants = measured()
        protocol = {
            "model": "the shapes of Llama 3 70B, 70.6 billion float32 weights",
            "machines": f"{MACHINES.gpus} {MACHINES.gpu} (141 GB), FSDP2, bfloat16 autocast",
            "update": "64 samples of 4096 tokens, gradient checkpointing",
            "data": f"{MACHINES.data_size:,} samples, one epoch",
            "constants": f"{constants['device']}, {constants['date']}",
        }
        write_results(args.out, torch.device("cpu"), protocol, rows=rows, checked=checked)


if __name__ == "__main__":
    main()
