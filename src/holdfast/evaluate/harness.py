"""Tasks of lm-evaluation-harness, by name or from YAML files of the user's own."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.evaluate.report import Estimate, Score
from holdfast.evaluate.stats import Samples, compare
from holdfast.io.models import Loaded

__all__ = ["Harness"]


@dataclass(frozen=True)
class Harness:
    """lm-evaluation-harness tasks, run by the harness itself.

    Args:
        tasks: their names, such as ``["piqa", "arc_easy"]``.
        include_path: a directory with task YAML files of your own.
        limit: samples a task at most.
        num_fewshot: examples in the prompt; None leaves it to the task.
        batch_size: requests at a time.
        role: of the rows in the report.
    """

    tasks: Sequence[str]
    include_path: str | os.PathLike[str] | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    role: str = "retained"

    @property
    def name(self) -> str:
        """All of them."""
        return ", ".join(self.tasks)

    def run(self, loaded: Loaded, *, progress: bool) -> Mapping[str, Any]:
        """The harness's own results, samples included."""
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ImportError(
                'tasks are run by lm-evaluation-harness: pip install "holdfast[eval]"'
            ) from error
        if loaded.kind != "causal_lm":
            raise ValueError(
                f"lm-evaluation-harness tests language models, not {type(loaded.model).__name__}"
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        manager = TaskManager(
            include_path=None if self.include_path is None else str(self.include_path)
        )
        known = set(manager.all_tasks)
        if unknown := [task for task in self.tasks if task not in known]:
            near = difflib.get_close_matches(unknown[0], sorted(known), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            if unknown[0].endswith((".yaml", ".yml")):
                hint = "; name the task, and give its folder: --include-path DIR --tasks NAME"
            raise ValueError(f"lm-evaluation-harness has no task {unknown[0]!r}{hint}")
        model = HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.need_tokenizer("lm-evaluation-harness"),
            max_length=loaded.limit,
            batch_size=self.batch_size,
        )
        results: Any = simple_evaluate(
            model,
            tasks=list(self.tasks),
            task_manager=manager,
            limit=self.limit,
            num_fewshot=self.num_fewshot,
            bootstrap_iters=0,
            log_samples=True,
        )
        return dict(results)

    def scores(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Score]:
        """A row for each metric of each task, by the harness's own names."""
        rows = []
        for task, figures in before["results"].items():
            directions = before.get("higher_is_better", {}).get(task, {})
            for key, value in figures.items():
                metric, _, kind = key.partition(",")
                if not isinstance(value, float | int) or metric.endswith("_stderr") or not kind:
                    continue
                higher = directions.get(metric)
                rows.append(self._score(task, metric, kind, higher is False, before, after))
        return rows

    def _score(
        self,
        task: str,
        metric: str,
        kind: str,
        lower: bool,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
    ) -> Score:
        values = [float(r["results"][task][f"{metric},{kind}"]) for r in (before, after)]
        name = metric if kind == "none" else f"{metric} ({kind})"
        old, new = (_samples(r, task, metric, kind) for r in (before, after))
        if old is not None and new is not None:
            transform = np.exp if old.counts is not None else None
            score = compare(
                task, name, old, new, lower_is_better=lower, role=self.role, transform=transform
            )
            # Where the figure is the mean over the samples; others the harness makes its own way.
            if np.allclose([score.before.value, score.after.value], values, rtol=0, atol=1e-9):
                return score
        n = int(before.get("n-samples", {}).get(task, {}).get("effective", 0))
        first, second = (Estimate(value, None, None, n) for value in values)
        change = Estimate(values[1] - values[0], None, None, n)
        return Score(task, name, lower, first, second, change, self.role)


def _samples(results: Mapping[str, Any], task: str, metric: str, kind: str) -> Samples | None:
    """What each sample got, if the harness tells it as a number."""
    rows = [
        row
        for row in results.get("samples", {}).get(task, [])
        if metric in row and row.get("filter", kind) == kind
    ]
    rows.sort(key=lambda row: row["doc_id"])
    values = [row[metric] for row in rows]
    if values and all(isinstance(v, list | tuple) and len(v) == 2 for v in values):
        # A log-likelihood and what it is divided by: a perplexity over all samples.
        return Samples([-float(ll) for ll, _ in values], [int(n) for _, n in values])
    if not values or not all(isinstance(v, int | float) for v in values):
        return None
    return Samples([float(v) for v in values])
