"""What to do next, by a forgetting report: a command, if there is one for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.report.words import change_of, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import ForgettingReport, Score

#: Below this accuracy after so few epochs, more of them may help.
LOW, FEW_EPOCHS = 0.9, 2
#: The tests that need no data of the user, or the option of those that do, by what was predicted.
_TESTS = {"token": ["--skills"], "masked token": ["--text", "FILE"]}
_SWEEP = ["--sweep", "0.5", "0.7", "0.85", "1"]


def next_step(report: ForgettingReport, forgotten: str) -> str:
    """Say what to do with a model that forgot ``forgotten`` (:class:`~.verdict.Verdict`).

    If the target did not improve, or is low after a few epochs, train for longer. If forgetting was
    not tested, test it. If some or much is forgotten, merge with the base. Otherwise, use it.
    """
    models, tests = words_of(report)
    targets = [score for score in report.scores if score.role == "target"]
    learned = any(change_of(score).outcome == "gained" for score in targets)
    lost = forgotten in ("some", "much")
    if targets and not learned and lost:
        return "train again at another learning rate."
    if targets and (not learned or _is_low(report, targets)) and (longer := _longer(report)):
        return longer
    if forgotten == "unknown":
        if any(score.role == "retained" for score in report.scores):
            return "test more samples."
        per = next((d.per for d in report.divergences), "")
        return _command("measure", models, tests, _TESTS.get(per, ["--retained", "FILE"]))
    if targets and not learned:
        return "train for longer, or at a higher learning rate."
    if lost:
        out = f"{models[1]}-merged" if models[1] != "TUNED" else "merged"
        return _command("merge", models, _SWEEP, tests, ["--out", out])
    if not targets:
        return _command("measure", models, tests, ["--target", "FILE"])
    return "use it."


def words_of(report: ForgettingReport) -> tuple[list[str], list[str]]:
    """The two models and the tests of a report, as words of the command line."""
    models = [plain(report.base), plain(report.tuned)]
    try:
        given = shlex.split(str(report.settings.get("command", "")))[2:]
    except ValueError:  # not written by holdfast
        given = []
    return (given[:2], given[2:]) if len(given) > 1 else (models, [])


def _is_low(report: ForgettingReport, targets: Iterable[Score]) -> bool:
    epochs = report.settings.get("epochs")
    low = any(s.metric == "accuracy" and s.after.value < LOW for s in targets)
    return low and isinstance(epochs, int | float) and epochs <= FEW_EPOCHS


def _longer(report: ForgettingReport) -> str:
    """Train again for three times as many epochs, if the options of the run are known."""
    epochs, (_, tuned) = report.settings.get("epochs"), words_of(report)[0]
    if not isinstance(epochs, int | float):
        return ""
    more = f"{3 * epochs:g}"
    config = ["--config", f"{tuned}/config.yaml", "--epochs", more]
    return _command("finetune", config, ["--out", f"{tuned}-{more}-epochs"])


def _command(name: str, *words: list[str]) -> str:
    """
    >>> _command("measure", ["base", "my model"], ["--skills"])
    "holdfast measure base 'my model' --skills"
    """
    return shlex.join(["holdfast", name, *(plain(w) for some in words for w in some)])
