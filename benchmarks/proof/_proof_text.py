"""Words of the proof's page: shares, lists, folded parts, and the titles of what was run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _markdown import SPEC, number
from _measures import GOALS

#: Titles of settings, rows, tests and ablations.
TITLES = SPEC["proof"]
TASKS = {name.partition("_")[2]: target for name, (_, target, _) in TITLES["settings"].items()}


def name_of(setting: str) -> str:
    """The title of a setting.

    >>> name_of("minilm_sst2")
    'MiniLM-L6, SST-2'
    """
    return ", ".join(TITLES["settings"][setting][:2])


def plan_title(plan: str) -> str:
    """The title of a language model's plan: that of its row, and its learning rate.

    >>> plan_title("plain-x0.2"), plan_title("holdfast")
    ('plain fine-tuning × 0.2', 'holdfast')
    """
    family, _, rate = plan.partition("-x")
    title: str = TITLES["rows"][family].strip("`")
    return f"{title} × {rate}" if rate else title


def least(row: Mapping[str, Any]) -> str:
    """The test that a point kept least, and its share."""
    return f"{TITLES['tests'][row['worst']]} {percent(row['kept'][row['worst']])}"


def percent(value: float, interval: Sequence[float] | None = None) -> str:
    """A share in percent, with its interval. Rounding lifts no share to a goal that it misses.

    >>> percent(99.512, (98.0, 100.26)), percent(98.96)
    ('99.5<br>(98.0&nbsp;to&nbsp;100.3)', '98.96')
    """
    digits = 1
    while any(value < goal <= round(value, digits) for goal in GOALS):
        digits += 1
    between = "<br>({:.1f}&nbsp;to&nbsp;{:.1f})".format(*interval) if interval else ""
    return f"{number(value, digits)}{between}".replace("-", "−")


def folded(title: str, text: str) -> str:
    """A part of the page that opens with a click."""
    return f"<details markdown>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def shown(picture: str, about: str, text: str) -> str:
    return f"![{about}](img/{picture}.svg)\n\n{text}"


def listed(parts: Sequence[str]) -> str:
    """A list in words.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
