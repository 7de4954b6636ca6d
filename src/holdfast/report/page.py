"""A page that needs no other file and no network: cards, plots, tables and their data.

The page holds plotly.js (about 4.8 MB), the plots and the JSON that it shows. Its policy (CSP) lets
only its own two scripts run and nothing be loaded; texts are text everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from holdfast.report.plot import JSON, Plot
from holdfast.report.tables import Table
from holdfast.report.words import plain

__all__ = ["card", "facts", "folded", "hero", "listing", "page", "pair", "place", "tile", "tiles"]


def page(
    title: str,
    brand: str,
    cards: Iterable[str],
    plots: Mapping[str, JSON],
    data: str,
    download: str,
    version: str,
) -> str:
    """The page's text.

    Needs plotly, of which it takes the JavaScript.

    Args:
        title: of the window.
        brand: what kind of page it is, beside the name on top.
        cards: HTML; empty ones are left out.
        plots: by the names that :func:`place` gave them.
        data: the JSON text that the page shows, to be downloaded from it.
        download: the name of that file.
        version: of holdfast.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError('the page needs plotly: pip install "holdfast[eval]"') from error
    scripts = {"plotly": get_plotlyjs().replace("\r\n", "\n"), "script": _part("_page.js")}
    return _filled(
        _part("_page.html"),
        {
            "title": escape(title),
            "brand": escape(brand),
            "css": _part("_page.css"),
            "body": "\n".join(filter(None, cards)),
            "download": escape(download),
            "footer": f"Made by holdfast {escape(plain(version))}. Plots by plotly.js (MIT).",
            "report": _inert(data),
            "figures": _inert(json.dumps(plots, allow_nan=False, separators=(",", ":"))),
            "hashes": " ".join(f"'sha256-{_sha256(script)}'" for script in scripts.values()),
            **scripts,
        },
    )


def hero(
    level: str, mark: str, headline: str, sentences: Sequence[str], names: Iterable[str]
) -> str:
    """What there is to say, above everything; the level gives the mark its colour."""
    more = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    models = " → ".join(f"<b>{escape(plain(name))}</b>" for name in names)
    return (
        f'<section class="hero {level}"><span class="mark">{escape(mark)}</span>'
        f"<h1>{escape(headline)}</h1><ul>{more}</ul>"
        f'<p class="models">{models}</p></section>'
    )


def tiles(found: Sequence[str]) -> str:
    """A row of them."""
    return f'<section class="tiles">{"".join(found)}</section>' if found else ""


def tile(label: str, text: str, unit: str, outcome: str = "") -> str:
    """One figure, large; what was lost is red and what was gained green."""
    figure = escape(text.removesuffix(f" {unit}"))
    color = outcome if outcome in ("lost", "gained") else ""
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="figure"><span class="{color}">{figure}</span> '
        f"<small>{escape(unit)}</small></div></div>"
    )


def card(title: str, content: str, about: str = "") -> str:
    """HTML under a title; nothing where there is none."""
    if not content:
        return ""
    more = f"<p>{escape(about)}</p>" if about else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{more}{content}</section>'


def place(plot: Plot, plots: dict[str, JSON]) -> str:
    """The place of a plot on the page; the plot itself goes to ``plots``."""
    name = f"plot-{len(plots)}"
    plots[name] = plot.figure
    height = plot.figure["layout"]["height"]
    return (
        f'<div class="plot"><h3>{escape(plot.title)}</h3>'
        f'<div id="{name}" style="height:{height}px"></div></div>'
    )


def pair(places: Iterable[str]) -> str:
    """Plots side by side, two in a row where there is room."""
    inside = "".join(places)
    return f'<div class="pair">{inside}</div>' if inside else ""


def listing(sentences: Sequence[str]) -> str:
    """A list."""
    items = "".join(f"<li>{escape(plain(sentence))}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def folded(table: Table, *, opened: bool = False) -> str:
    """A table that opens at a click."""
    head = "".join(
        f'<th class="{"text" if h == "how" else ""}">{escape(h)}</th>' for h in table.head
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, table.head))}</tr>" for row in table.rows)
    note = f'<p class="about">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<details{' open' if opened else ''}>"
        f"<summary>{escape(table.title)} <span>{len(table.rows)}</span></summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f"{note}</div></details>"
    )


def facts(parts: Mapping[str, Mapping[str, object]]) -> str:
    """Names and values, a table for each title."""
    inside = "".join(_facts(title, values) for title, values in parts.items())
    return f'<div class="facts">{inside}</div>' if inside else ""


def _cell(text: str, head: str) -> str:
    kind = text if text in ("lost", "gained") and head == "outcome" else ""
    return f'<td class="{"text" if head == "how" else kind}">{escape(text)}</td>'


def _facts(title: str, values: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><th>{escape(plain(name))}</th><td>{escape(plain(str(value)))}</td></tr>"
        for name, value in values.items()
    )
    return f"<div><h3>{title}</h3><table>{rows}</table></div>" if rows else ""


def _inert(text: str) -> str:
    """JSON that no HTML parser finds a tag or comment in; ``<`` occurs only in its strings."""
    return text.replace("<", "\\u003c")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Fill ``{{name}}`` in one pass, so that nothing in a value is filled again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _part(name: str) -> str:
    return files("holdfast.report").joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
