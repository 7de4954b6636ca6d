"""A forgetting report as one page that needs no other file and no network.

The page holds plotly.js (about 4.8 MB), the plots, the tables and the report's JSON. Its policy
(CSP) lets only its own two scripts run and nothing be loaded; names are text everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from holdfast.forgetting.report import ForgettingReport
from holdfast.forgetting.show._figures import curve_plot, divergence_plot, drift_plot
from holdfast.forgetting.show._plot import Plot
from holdfast.forgetting.show._score_figures import score_plots
from holdfast.forgetting.show._tables import Table, all_tables
from holdfast.forgetting.show._words import change_of, nats, percent, plain
from holdfast.forgetting.show.verdict import source_of, verdict, where

__all__ = ["to_html"]

_MARKS = {
    "nothing": "No loss found",
    "little": "Little forgotten",
    "some": "Some forgetting",
    "much": "Much forgotten",
    "unknown": "Not known",
}


def to_html(report: ForgettingReport) -> str:
    """The page's text.

    Needs plotly, of which it takes the JavaScript.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError('the page needs plotly: pip install "holdfast[eval]"') from error
    report = ForgettingReport.from_json(report.to_json())  # lists as tuples, numpy's as floats
    plots: dict[str, Any] = {}
    cards = [
        _hero(report),
        _tiles(report),
        _scores(report, plots),
        _divergences(report, plots),
        _drift(report, plots),
        _curves(report, plots),
        _notes(report),
        _details(report),
        _how(report),
    ]
    scripts = {"plotly": get_plotlyjs().replace("\r\n", "\n"), "script": _part("_page.js")}
    version = escape(plain(report.versions.get("holdfast", "")))
    return _filled(
        _part("_page.html"),
        {
            "title": escape(f"{plain(report.tuned)}: {verdict(report).headline}"),
            "css": _part("_page.css"),
            "body": "\n".join(card for card in cards if card),
            "footer": f"Made by holdfast {version}. Plots by plotly.js (MIT).",
            "report": _inert(report.to_json()),
            "figures": _inert(json.dumps(plots, allow_nan=False, separators=(",", ":"))),
            "hashes": " ".join(f"'sha256-{_sha256(script)}'" for script in scripts.values()),
            **scripts,
        },
    )


def _hero(report: ForgettingReport) -> str:
    said = verdict(report)
    more = "".join(f"<li>{escape(sentence)}</li>" for sentence in said.sentences)
    names = (f"<b>{escape(plain(name))}</b>" for name in (report.base, report.tuned))
    return (
        f'<section class="hero {said.level}"><span class="mark">{_MARKS[said.level]}</span>'
        f"<h1>{escape(said.headline)}</h1><ul>{more}</ul>"
        f'<p class="models">{" → ".join(names)}</p></section>'
    )


def _tiles(report: ForgettingReport) -> str:
    """The worst loss, the target, the predictions and the weights, in a figure each."""
    tiles = []
    changes = [(score, change_of(score)) for score in report.scores]
    lost = [(s, c) for s, c in changes if c.outcome == "lost" and s.role == "retained"]
    if lost:
        score, change = max(lost, key=lambda row: row[1].severity)
        tiles.append(_tile(f"Worst loss: {plain(score.name)}", change.signed, change.unit, "lost"))
    for score, change in [(s, c) for s, c in changes if s.role == "target"][:1]:
        tiles.append(
            _tile(f"Target: {plain(score.name)}", change.signed, change.unit, change.outcome)
        )
    for d in report.divergences[-1:]:
        label = f"Predictions moved on {source_of(d)}"
        unit = f"nats a {plain(d.per)}"
        tiles.append(_tile(label, f"{nats(d.kl.value)} {unit}", unit))
    if (drift := report.drift) is not None:
        place = where(drift.layers)
        most = f"Weights moved, most in {place}" if place else "Weights moved"
        tiles.append(_tile(most, f"{percent(drift.total.relative)} of their norm", "of their norm"))
    return f'<section class="tiles">{"".join(tiles)}</section>' if tiles else ""


def _tile(label: str, text: str, unit: str, outcome: str = "") -> str:
    figure = escape(text.removesuffix(f" {unit}"))
    color = outcome if outcome in ("lost", "gained") else ""
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="figure"><span class="{color}">{figure}</span> '
        f"<small>{escape(unit)}</small></div></div>"
    )


def _scores(report: ForgettingReport, plots: dict[str, Any]) -> str:
    if not report.scores:
        return ""
    pairs = [
        f'<div class="pair">{_plot(left, plots)}{_plot(right, plots)}</div>'
        for left, right in score_plots(report.scores)
    ]
    about = (
        "Red was lost, green was gained; grey is within chance: the 95 % interval of the change "
        "holds 0."
    )
    return _card("Before and after", "".join(pairs), about)


def _divergences(report: ForgettingReport, plots: dict[str, Any]) -> str:
    if not report.divergences:
        return ""
    about = "How far the tuned model's predictions are from the base model's on the same inputs."
    if any(d.name == "context-free" for d in report.divergences):
        about += " Context-free: on texts that the base model itself wrote."
    return _card("Predictions", _plot(divergence_plot(report.divergences), plots), about)


def _drift(report: ForgettingReport, plots: dict[str, Any]) -> str:
    if report.drift is None or (plot := drift_plot(report.drift)) is None:
        return ""
    about = "How far the weights moved, in per cent of their norm: by kind and layer, and by layer."
    return _card("Weights", _plot(plot, plots), about)


def _curves(report: ForgettingReport, plots: dict[str, Any]) -> str:
    if not report.curves:
        return ""
    drawn = "".join(_plot(curve_plot(curve), plots) for curve in report.curves)
    return _card("During training", f'<div class="pair">{drawn}</div>')


def _notes(report: ForgettingReport) -> str:
    if not report.notes:
        return ""
    notes = "".join(f"<li>{escape(plain(note))}</li>" for note in report.notes)
    return _card("What could not be measured", f"<ul>{notes}</ul>")


def _details(report: ForgettingReport) -> str:
    tables = [table for table in all_tables(report) if table.rows]
    return _card("Details", "".join(map(_folded, tables))) if tables else ""


def _how(report: ForgettingReport) -> str:
    parts = [_facts("Settings", report.settings), _facts("Versions", report.versions)]
    if not any(parts):
        return ""
    return _card("How it was measured", f'<div class="facts">{"".join(parts)}</div>')


def _card(title: str, content: str, about: str = "") -> str:
    more = f"<p>{escape(about)}</p>" if about else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{more}{content}</section>'


def _plot(plot: Plot, plots: dict[str, Any]) -> str:
    """The place of a plot on the page; the plot itself goes to ``plots``."""
    name = f"plot-{len(plots)}"
    plots[name] = plot.figure
    height = plot.figure["layout"]["height"]
    return (
        f'<div class="plot"><h3>{escape(plot.title)}</h3>'
        f'<div id="{name}" style="height:{height}px"></div></div>'
    )


def _folded(table: Table) -> str:
    head = "".join(
        f'<th class="{"text" if h == "how" else ""}">{escape(h)}</th>' for h in table.head
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, table.head))}</tr>" for row in table.rows)
    note = f'<p class="about">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<details><summary>{escape(table.title)} <span>{len(table.rows)}</span></summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f"{note}</div></details>"
    )


def _cell(text: str, head: str) -> str:
    kind = text if text in ("lost", "gained") and head == "outcome" else ""
    return f'<td class="{"text" if head == "how" else kind}">{escape(text)}</td>'


def _facts(title: str, facts: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th>{escape(plain(name))}</th><td>{escape(plain(str(value)))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<div><h3>{title}</h3><table>{rows}</table></div>" if rows else ""


def _inert(text: str) -> str:
    """JSON that no HTML parser finds a tag or comment in; ``<`` occurs only in its strings."""
    return text.replace("<", "\\u003c")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Fill ``{{name}}`` in one pass, so that nothing in a value is filled again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _part(name: str) -> str:
    return files("holdfast.forgetting.show").joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
