"""Runs in the format of PEFT's method comparison, to be shown beside its own results.

PEFT keeps one JSON per run (``method_comparison/MetaMathQA/results``). Its reader needs whole
numbers in some places, so not everything that we do not measure can be null:

- ``train_time`` includes the tests, and is longer if other runs shared the device. All three
  figures of the accelerator's memory are the peak. They are upper bounds, listed in
  ``meta_info.upper_bounds``.
- ``file_size``, ``num_trainable_params``, ``train total tokens`` and, with packing or if the number
  of updates is not known, ``train samples`` are 0 and listed in ``meta_info.not_measured``.
- Everything else that is not known is null, which the reader shows as missing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._torch.finite import is_finite
from holdfast.io import codec as _codec
from holdfast.recipe import Recipe
from holdfast.report.words import kind_of, plain

if TYPE_CHECKING:
    from holdfast.comparison.results import Measured, Results, RunResult
    from holdfast.evaluate.report import Curve

_PACKAGES = ("transformers", "peft", "datasets", "bitsandbytes", "torch")


def records(results: Results) -> dict[str, dict[str, Any]]:
    """One record per run, by file name."""
    found: dict[str, dict[str, Any]] = {}
    for run in results.runs:
        record = _record(run, results.plan)
        file = record["run_info"]["experiment_name"].replace("/", "--") + ".json"
        if file in found:
            raise ValueError(f"two runs have the name {file}: rename a recipe")
        found[file] = record
    return found


def _record(run: RunResult, plan: Mapping[str, Any]) -> dict[str, Any]:
    training = _training(run, plan)
    model = plain(str(plan.get("model") or "model"))
    updates = _updates(run, training)
    size = training.get("batch_size", 0) * training.get("accumulate", 1)
    samples = 0 if updates is None or training.get("packing") else updates * size
    metrics = {
        "step": updates,
        "test accuracy": _share(run.target),
        "train loss": _train_loss(run),
        "train samples": samples,
        "train total tokens": 0,
        "forgetting": forgetting(run),
    }
    not_measured = ["file_size", "num_trainable_params", "train total tokens"]
    return {
        "run_info": {
            "created_at": None,
            "total_time": run.seconds,
            "experiment_name": _experiment(run, model),
            "peft_branch": None,
            "train_config": _train_config(run, training, model),
            "peft_config": _peft_config(run, model),
            "error_msg": "",
        },
        "train_info": {
            "accelerator_memory_reserved_avg": run.peak_memory,
            "accelerator_memory_max": run.peak_memory,
            "accelerator_memory_reserved_99th": run.peak_memory,
            "train_time": run.seconds,
            "file_size": 0,
            "num_trainable_params": 0,
            "num_total_params": None,
            "status": "success",
            "metrics": [metrics],
        },
        "meta_info": {
            "model_info": {"sha": None, "created_at": None},
            "dataset_info": {},
            "package_info": {f"{name}-version": run.versions.get(name) for name in _PACKAGES},
            "system_info": {},
            "pytorch_info": None,
            "upper_bounds": [
                "accelerator_memory_reserved_avg", "accelerator_memory_reserved_99th", "train_time",
            ],
            "not_measured": not_measured if samples else [*not_measured, "train samples"],
        },
        "holdfast": {k: v for k, v in _codec.encode(run).items() if k != "curves"},
    }  # fmt: skip


def _training(run: RunResult, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the training loop: those of the plan, with its options and the run's own."""
    given = {**(plan.get("options") or {}), **run.values}
    own = {name: value for name, value in given.items() if "." not in name}
    return {**(plan.get("training") or {}), **own}


def _updates(run: RunResult, training: Mapping[str, Any]) -> int | None:
    """The number of updates; if it was not fixed, the last one in the log."""
    fixed: int | None = training.get("max_updates")
    if fixed is not None and training.get("patience") is None:
        return fixed
    return next((curve.steps[-1] for curve in _losses(run)), None)


def _losses(run: RunResult) -> list[Curve]:
    return [curve for curve in run.curves if curve.name == "loss" and curve.values]


def forgetting(run: RunResult) -> float | None:
    """The mean rise of the loss on retained texts, in nats per token; None without such tests.

    PEFT reports the rise of the loss on one text.
    """
    rises = [_rise(test) for test in run.retained if test.metric in ("nll", "perplexity")]
    return _finite(statistics.fmean(rises)) if rises else None


def _rise(test: Measured) -> float:
    if test.metric == "nll":
        return test.change
    return math.log(test.after / test.before) if min(test.after, test.before) > 0 else math.nan


def _finite(value: float) -> float | None:
    return value if is_finite(value) else None


def _share(target: Measured) -> float | None:
    return _finite(target.after) if kind_of(target.metric) == "share" else None


def _train_loss(run: RunResult) -> float | None:
    return next((_finite(curve.values[-1]) for curve in _losses(run)), None)


def _experiment(run: RunResult, model: str) -> str:
    """PEFT's names are METHOD/VARIANT; the file has ``--`` instead of the slash."""
    values = [f"{name.rpartition('.')[2]}{value}" for name, value in run.values.items()]
    parts = (run.recipe, "-".join([Path(model).name, *values, f"seed{run.seed}"]))
    return "/".join(re.sub(r"[^\w.+]+", "-", part).strip("-.") or "run" for part in parts)


def _train_config(run: RunResult, training: Mapping[str, Any], model: str) -> dict[str, Any]:
    update = run.resolved.get("update") or {}  # results of earlier versions have no settings
    bits = [name for name in ("int4", "int8") if training.get(f"load_in_{name[3:]}bit")]
    return {
        "model_id": model,
        "dtype": bits[0] if bits else training.get("dtype"),
        "max_seq_length": training.get("max_length"),
        "batch_size": training.get("batch_size"),
        "batch_size_eval": None,
        "max_steps": training.get("max_updates"),
        "eval_steps": training.get("evaluate_every"),
        "compile": False,
        "use_gc": training.get("gradient_checkpointing"),
        "query_template": None,
        "seed": run.seed,
        "grad_norm_clip": training.get("clip_norm"),
        "optimizer_type": update.get("name"),
        "optimizer_kwargs": {
            "lr": update.get("lr"),
            "weight_decay": update.get("weight_decay"),
        },
        "lr_scheduler": "linear",
        "use_amp": None,
        "autocast_adapter_dtype": None,
        "generation_kwargs": None,
        "attn_implementation": None,
    }


def _peft_config(run: RunResult, model: str) -> dict[str, Any] | None:
    """The adapters of a run; None if the weights themselves were trained.

    Results of earlier versions have no settings: the kind is then that of the preset.
    """
    about = {"base_model_name_or_path": model}
    try:
        recipe = Recipe.from_dict(run.settings) if run.settings else Recipe.preset(run.recipe)
    except ValueError:  # a recipe file that is not known here
        return {"peft_type": "unknown", **about}
    if not recipe.trainable.keeps_base:
        return None
    settings = dict(recipe.to_dict()["trainable"])
    kind = settings.pop("name").upper()
    for value in settings.values():
        if isinstance(value, Mapping) and "peft_type" in value:  # a configuration of PEFT
            return {**about, **_codec.encode(value)}
    return {"peft_type": kind, **about, **(_codec.encode(settings) if run.settings else {})}
