"""What to do next, by a forgetting report: a command, if there is one for it."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Any

from holdfast.report.command import command
from holdfast.report.words import change_of

if TYPE_CHECKING:
    from holdfast.evaluate.report import ForgettingReport

#: Below this accuracy after so few epochs, more of them may help.
LOW, FEW_EPOCHS = 0.9, 2
#: The test that needs no data of the user, or the option of one that does, by what was predicted.
_TESTS: dict[str, dict[str, Any]] = {"token": {"skills": True}, "masked token": {"text": "FILE"}}
#: The options of tests: none of them writes a file or trusts one.
_KNOWN = {
    "target", "text", "retained", "similarity", "tasks", "limit", "limit-tokens", "context-free",
    "columns", "skills", "seed", "test-max-length", "no-drift", "dtype", "device",
}  # fmt: skip
_AGAIN = "train again at another learning rate."


def next_step(report: ForgettingReport, forgotten: str) -> str:
    """Say what to do with a model that forgot ``forgotten`` (:class:`~.verdict.Verdict`).

    First the target must have improved, then forgetting must be tested. If some or much is
    forgotten, merge with the base; more epochs would forget more. Otherwise use it, unless a target
    got worse.
    """
    models, tests = words_of(report)
    targets = [score for score in report.scores if score.role == "target"]
    outcomes = {change_of(score).outcome for score in targets}
    lost, worse = forgotten in ("some", "much"), "lost" in outcomes
    longer = _longer(report, models[1])
    if targets and "gained" not in outcomes:
        if "no interval" in outcomes:
            return "test more samples."
        if lost or worse:
            return _AGAIN
        return longer or "train for longer, or at a higher learning rate."
    low = any(s.metric == "accuracy" and s.after.value < LOW for s in targets)
    if low and longer and not (lost or worse):
        return f"{'' if forgotten == 'unknown' else 'use it, or '}try more epochs: {longer}"
    if forgotten == "unknown":
        if any(score.role == "retained" for score in report.scores):
            return "test more samples."
        per = next((d.per for d in report.divergences), "")
        return command("measure", *models, **{**tests, **_TESTS.get(per, {"retained": "FILE"})})
    if lost:
        out = f"{models[1].rstrip('/')}-merged" if models[1] != "TUNED" else "merged"
        return command("merge", *models, sweep=[0.5, 0.7, 0.85, 1], **tests, out=out)
    if not targets:
        return command("measure", *models, **{**tests, "target": "FILE"})
    return _AGAIN if worse else "use it."


def words_of(report: ForgettingReport) -> tuple[list[str], dict[str, Any]]:
    """The two models of a report, and the options that give the same tests."""
    found: dict[str, list[str]] = {}
    models: list[str] = []
    last = models
    with contextlib.suppress(ValueError):  # not written by holdfast
        for word in shlex.split(str(report.settings.get("command", "")))[2:]:
            if word.startswith("-"):
                last = found[word.removeprefix("--")] = []
            else:
                last.append(word)
    if len(models) != 2 or not found.keys() <= _KNOWN:
        return [report.base, report.tuned], {}
    return models, {name: values or True for name, values in found.items()}


def _longer(report: ForgettingReport, tuned: str) -> str:
    """Train again for three times as many epochs, if the run is known and had few."""
    epochs = report.settings.get("epochs")
    if not isinstance(epochs, int | float) or not 0 < epochs <= FEW_EPOCHS:
        return ""
    tuned, more = tuned.rstrip("/"), 3 * float(epochs)
    out = f"{tuned}-{more:g}-epochs"
    return command("finetune", config=f"{tuned}/config.yaml", epochs=more, out=out)
