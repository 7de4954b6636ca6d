"""The measured constants of ``holdfast plan``, from the results of the other benchmarks.

    python benchmarks/constants.py            # write src/holdfast/hosts/measured.json
    python benchmarks/constants.py --check    # exit with an error if the file is stale

Nothing is measured here: every constant is computed from files in results/, all of one machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _common import llama_shapes

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "src" / "holdfast" / "hosts" / "measured.json"
CASE = "llama-1b"
WEIGHTS = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in llama_shapes())
#: The texts of draw_bos, from a model of these shapes (SmolLM2-135M).
DRAWN_FROM = 134_515_008
#: Of the models of end_to_end.py and fitting.py.
LAYERS_OF = {"minilm": 6, "smollm2": 30, "1.5b": 28}
#: Of the model of anchor_placement.py.
TOKENS, LENGTH, LAYERS, HIDDEN = 16_384, 2048, 16, 2048
FILES = {
    "float32": "recadam_step_h200",
    "bfloat16": "recadam_step_h200_bf16",
    "mofo": "mofo_step_h200",
    "penalties": "penalty_step_h200",
    "placement": "anchor_placement_h200",
    "replay": "self_replay_h200",
    "fitting": "fitting_h200",
    "end_to_end": "end_to_end_h200",
    "score": "flow_score_h200",
}


def read(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def constants() -> dict[str, Any]:
    """The constants, with the machine and the files that they come from."""
    records = {kind: read(name) for kind, name in FILES.items()}
    (device,) = {record["device"] for record in records.values()}

    def rows(kind: str, case: str = CASE) -> dict[str, dict[str, Any]]:
        return {r["impl"]: r for r in records[kind]["rows"] if r["case"].startswith(case)}

    plain, placed = rows("float32")["torch_fused_adamw"], rows("placement")
    # The limit is bytes over bandwidth, so the bandwidth is bytes over the limit.
    bandwidth = plain["bytes_per_param"] * WEIGHTS / (plain["ms"] / plain["x_limit"] / 1e3)
    kernels = {
        kind: {impl: row["x_limit"] for impl, row in rows(kind).items()}
        for kind in ("float32", "bfloat16", "mofo", "penalties")
    }
    pulls = ("l2sp", "ewc", "l2sp_coupled", "ewc_coupled")
    pull = statistics.median(kernels["penalties"][name] for name in pulls)
    adamw = placed["torch_fused_adamw"]
    training = adamw["update_ms"] - plain["ms"]
    # A token takes 6 operations per weight, and those of attention to all positions.
    per_token = 6 * WEIGHTS + 12 * LAYERS * HIDDEN * LENGTH
    host, device_ms = (placed[f"recadam_{where}"]["update_ms"] for where in ("host", "device"))
    fetched = 2 * WEIGHTS / (host / 1e3)
    drawing = rows("replay", "4096 texts")["draw_bos"]
    fitted, scored = rows("fitting", "1.5b"), rows("score", "smollm2")
    # Small models wait for the launches of kernels. So does LoRA, whose layers launch more of them.
    launched = [
        rows("end_to_end", name)["plain_adamw"]["ms"] / LAYERS_OF[name]
        for name in ("minilm", "smollm2")
    ]
    adapted = fitted["fit_lora"]["update_ms"] / LAYERS_OF["1.5b"]
    # Two forward passes over the batches of an epoch, beside the epoch.
    forward = scored["naive_two_pass"]["seconds"] / 2 / scored["train_epoch"]["seconds"]
    return {
        "device": device,
        "date": max(record["date"] for record in records.values()),
        "files": sorted(FILES.values()),
        "bandwidth": round(bandwidth, -9),
        "flops": round(per_token * TOKENS / (training / 1e3), -12),
        "x_limit": {
            **{
                impl: {dtype: kernels[dtype][impl] for dtype in ("float32", "bfloat16")}
                for impl in ("torch_fused_adamw", "recadam_fused", "recadam_8bit")
            },
            "mofo_fused": {"float32": kernels["mofo"]["mofo_fused"]},
            "": {"float32": pull},
        },
        "host_anchors": {"x_update": round(host / device_ms, 4), "bytes_per_s": round(fetched, -6)},
        "draw_s_per_token_and_weight": float(
            f"{drawing['seconds'] / drawing['drawn_tokens'] / DRAWN_FROM:.3g}"
        ),
        "x_checkpointing": fitted["fit_checkpointing"]["x_adamw"],
        "launch_s_per_layer": {
            "weights": float(f"{statistics.mean(launched) / 1e3:.3g}"),
            "adapters": float(f"{adapted / 1e3:.3g}"),
        },
        "x_forward": round(forward, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = json.dumps(constants(), indent=2, ensure_ascii=False) + "\n"
    if not parser.parse_args().check:
        OUT.write_text(text, encoding="utf-8")
    elif not OUT.exists() or OUT.read_text(encoding="utf-8") != text:
        sys.exit(f"{OUT.relative_to(ROOT)} is stale: run python benchmarks/constants.py")


if __name__ == "__main__":
    main()
