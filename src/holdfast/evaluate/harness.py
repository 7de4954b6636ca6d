"""Tasks of lm-evaluation-harness, by name or from your own YAML files."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from holdfast._torch.checks import did_you_mean
from holdfast._torch.imports import require
from holdfast.evaluate.report import Estimate, Score
from holdfast.evaluate.stats import Outcomes, compare
from holdfast.io.models import Loaded


@dataclass(frozen=True)
class Harness:
    """Tasks that lm-evaluation-harness runs itself, such as ``["piqa", "arc_easy"]``.

    ``include_path`` is a directory with your own task YAML files. ``limit`` and ``num_fewshot`` are
    those of the harness. If ``num_fewshot`` is None, the number that the task sets is used.
    """

    tasks: Sequence[str]
    include_path: str | os.PathLike[str] | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    role: str = "retained"

    @property
    def name(self) -> str:
        return ", ".join(self.tasks)

    def check_tasks(self) -> Any:
        """Raise ValueError for an unknown task; return the harness's task manager."""
        folder = None if self.include_path is None else str(self.include_path)
        if folder and set(self.tasks) <= set((own := _task_manager(folder, False)).all_subtasks):
            return own
        manager = _task_manager(folder, True)
        known = set(manager.all_tasks)
        for task in self.tasks:
            if task not in known:
                hint = did_you_mean(task, known, cutoff=0.6)
                if task.endswith((".yaml", ".yml")):
                    hint = "; name the task, and give its folder: --include-path DIR --tasks NAME"
                elif hint.startswith("; known"):
                    hint = ""  # thousands of names
                raise ValueError(f"lm-evaluation-harness has no task {task!r}{hint}")
        return manager

    def run(self, loaded: Loaded, *, progress: bool) -> Mapping[str, Any]:
        if loaded.kind != "causal_lm":
            model = type(loaded.model).__name__
            raise ValueError(f"lm-evaluation-harness tests causal language models, got {model}")
        manager = self.check_tasks()
        huggingface = require("lm_eval.models.huggingface", extra="eval", what="tasks")
        model = huggingface.HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.need_tokenizer("lm-evaluation-harness"),
            max_length=loaded.limit,
            batch_size=self.batch_size,
        )
        predicts: list[Tensor] = []
        harness = require("lm_eval", extra="eval", what="tasks")
        with loaded.model.register_forward_hook(
            lambda _, __, out: predicts.append(out.logits[:, -1].amax(-1).isfinite().all())
        ):
            results: dict[str, Any] = harness.simple_evaluate(
                model,
                tasks=list(self.tasks),
                task_manager=manager,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                bootstrap_iters=0,
                log_samples=True,
            )
        return results if all(predicts) else _without_figures(results)

    def scores(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Score]:
        rows = []
        for task, figures in before["results"].items():
            directions = before.get("higher_is_better", {}).get(task, {})
            for key, value in figures.items():
                metric, _, kind = key.partition(",")
                if not isinstance(value, float | int) or metric.endswith("_stderr") or not kind:
                    continue
                lower = directions.get(metric) is False
                rows.append(self._score(task, metric, kind, lower, [before, after]))
        return rows

    def _score(
        self, task: str, metric: str, kind: str, lower: bool, both: list[Mapping[str, Any]]
    ) -> Score:
        values = [float(results["results"][task][f"{metric},{kind}"]) for results in both]
        name = metric if kind == "none" else f"{metric} ({kind})"
        old, new = (_outcomes(results, task, metric, kind) for results in both)
        if old is not None and new is not None:
            transform = np.exp if old.counts is not None else None
            score = compare(
                task, name, old, new, lower_is_better=lower, role=self.role, transform=transform
            )
            # Only if the figure is the mean over the samples; the harness aggregates some
            # metrics in other ways.
            if np.allclose([score.before.value, score.after.value], values, rtol=0, atol=1e-9):
                return score
        n = int(both[0].get("n-samples", {}).get(task, {}).get("effective", 0))
        first, second = (Estimate(value, None, None, n) for value in values)
        change = Estimate(values[1] - values[0], None, None, n)
        return Score(task, name, lower, first, second, change, self.role)


def _without_figures(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Results whose figures are all NaN: the harness takes the first choice where all are NaN."""
    figures = {
        task: {k: math.nan if isinstance(v, float | int) else v for k, v in found.items()}
        for task, found in results["results"].items()
    }
    return {**results, "results": figures, "samples": {}}


@lru_cache(maxsize=4)  # indexing the harness's own task files takes seconds
def _task_manager(include_path: str | None, include_defaults: bool) -> Any:
    tasks = require("lm_eval.tasks", extra="eval", what="tasks of lm-evaluation-harness")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return tasks.TaskManager(include_path=include_path, include_defaults=include_defaults)


def _outcomes(results: Mapping[str, Any], task: str, metric: str, kind: str) -> Outcomes | None:
    """Return the result of each sample, if the harness gives it as a number."""
    rows = [
        row
        for row in results.get("samples", {}).get(task, [])
        if metric in row and row.get("filter", kind) == kind
    ]
    rows.sort(key=lambda row: row["doc_id"])
    values = [row[metric] for row in rows]
    if values and all(isinstance(v, list | tuple) and len(v) == 2 for v in values):
        # A log-likelihood and its divisor: a perplexity over all samples.
        return Outcomes([-float(ll) for ll, _ in values], [int(n) for _, n in values])
    if not values or not all(isinstance(v, int | float) for v in values):
        return None
    return Outcomes([float(v) for v in values])
