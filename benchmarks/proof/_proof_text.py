"""Words of the proof's page: shares, lists, folded parts, and the titles of what was run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _markdown import SPEC, number
from _measures import GOALS, rate_of

#: Titles of settings, rows, tests and ablations.
TITLES = SPEC["proof"]
#: Titles of model and target, of all files that have one of each.
NAMES = {name: titles[:2] for files in ("settings", "saturated", "abilities")
         for name, titles in TITLES[files].items()}  # fmt: skip
TASKS = {name.partition("_")[2]: target for name, (_, target, _) in TITLES["settings"].items()}


def name_of(setting: str) -> str:
    """The title of a setting.

    >>> name_of("minilm_sst2")
    'MiniLM-L6, SST-2'
    """
    return ", ".join(NAMES[setting])


def plan_title(plan: str) -> str:
    """The title of a language model's plan: that of its row, and its learning rate.

    >>> plan_title("plain-x0.2"), plan_title("holdfast-lora")
    ('plain fine-tuning × 0.2', 'holdfast with LoRA')
    """
    family, _, rate = plan.partition("-x")
    title: str = TITLES["rows"][family].replace("`", "")
    return f"{title} × {rate}" if rate else title


def least(row: Mapping[str, Any]) -> str:
    """The test that a point kept least, and its share."""
    return f"{TITLES['tests'][row['worst']]} {percent(row['kept'][row['worst']])}"


def dominance(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many points dominate ``holdfast``.

    >>> dominance([{"dominates": "no"}, {"dominates": "clearly"}, {"dominates": "yes"}])
    '2 of 3, 1 clearly'
    """
    better = [row["dominates"] for row in rows if row["dominates"] != "no"]
    clearly = f", {better.count('clearly')} clearly" if better else ""
    return f"{len(better)} of {len(rows):,}{clearly}" if rows else "—"


def beyond(edge: str, where: str = "") -> str:
    """A sentence about plain fine-tuning whose best learning rate is at an edge."""
    return (
        f"The best learning rate of plain fine-tuning is the {edge} that was run{where}. One "
        "beyond it may be better still."
    )


def edge_of_rates(setting: Mapping[str, Any]) -> str:
    """Whether the best learning rate of plain fine-tuning is the lowest or the highest of its row.

    >>> points = [{"row": "plain", "plan": f"plain-x{x}", "merged": "tuned"} for x in (0.1, 1)]
    >>> edge_of_rates({"best_plain": "plain-x0.1", "points": points})
    'lowest'
    """
    best = setting["best_plain"]
    row = next(point["row"] for point in setting["points"] if point["plan"] == best)

    rates = [rate_of(point["plan"], row) for point in setting["points"] if point["row"] == row]
    ends = {min(rates): "lowest", max(rates): "highest"} if len({*rates}) > 1 else {}
    return ends.get(rate_of(best, row), "")


def notes(rows: Iterable[str]) -> str:
    """What is to be known of some of these rows."""
    said = {row: TITLES["notes"][row] for row in dict.fromkeys(rows) if row in TITLES["notes"]}
    return "\n".join(f"- *{TITLES['rows'][row]}*: {note}" for row, note in said.items())


def without(missing: Mapping[str, Sequence[str]], name: str) -> str:
    """The missing runs of a file.

    >>> without({"ablations": ["top-8-s0"]}, "ablations"), without({}, "ablations")
    (' Missing runs: top-8-s0.', '')
    """
    return f" Missing runs: {', '.join(missing[name])}." if missing.get(name) else ""


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
