"""Which method, for my model and my data? Many recipes, side by side, and a recommendation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.comparison.plan import Measuring, Plan
    from holdfast.comparison.results import Results
    from holdfast.comparison.scheduler import compare
    from holdfast.comparison.search import Tuning
    from holdfast.comparison.tuning import Tuned, tune
    from holdfast.hosts.job import Training

#: Imported when they are first asked for. No module may have the name of one of them: importing it
#: would put the module in its place.
_LAZY = {
    "Measuring": "holdfast.comparison.plan",
    "Plan": "holdfast.comparison.plan",
    "Results": "holdfast.comparison.results",
    "Training": "holdfast.hosts.job",
    "Tuned": "holdfast.comparison.tuning",
    "Tuning": "holdfast.comparison.search",
    "compare": "holdfast.comparison.scheduler",
    "tune": "holdfast.comparison.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast.comparison' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = ["Measuring", "Plan", "Results", "Training", "Tuned", "Tuning", "compare", "tune"]
