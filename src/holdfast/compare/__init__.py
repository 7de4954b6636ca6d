"""Which method, for my model and my data? Many recipes, side by side, and a recommendation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.compare.plan import Measuring, Plan, Training
    from holdfast.compare.results import Results
    from holdfast.compare.running import compare
    from holdfast.compare.search import Tuning
    from holdfast.compare.tuning import Tuned, tune

#: Imported when they are first asked for. No module may have the name of one of them: importing it
#: would put the module in its place.
_LAZY = {
    "Measuring": "holdfast.compare.plan",
    "Plan": "holdfast.compare.plan",
    "Results": "holdfast.compare.results",
    "Training": "holdfast.compare.plan",
    "Tuned": "holdfast.compare.tuning",
    "Tuning": "holdfast.compare.search",
    "compare": "holdfast.compare.running",
    "tune": "holdfast.compare.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast.compare' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = ["Measuring", "Plan", "Results", "Training", "Tuned", "Tuning", "compare", "tune"]
