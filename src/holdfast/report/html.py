"""A Document as one self-contained page, and as a fragment for notebooks.

The page holds the plots, the JSON of the result and, if there are plots, plotly.js: 1.5 MB, which
take 0.7 MB as base64 of a gzip file that the browser inflates. Its content security policy allows
only these two scripts to run, by their hashes, and nothing to be loaded.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from holdfast._torch.imports import require
from holdfast.report.document import Document, Table
from holdfast.report.words import plain


def to_html(document: Document, data: str) -> str:
    """Render a page, from which ``data``, the JSON of the result, can be downloaded."""
    markup = require("markupsafe", extra="eval", what="the HTML page").Markup
    plots = json.dumps(
        [figure.plot for section in document.filled for figure in section.figures],
        allow_nan=False,
        default=float,  # of numpy
    )
    page = _template().render(
        document=document,
        # "<" occurs only in strings of JSON: escaped, no HTML parser finds a tag.
        data=markup(data.replace("<", "\\u003c")),
        plots=markup(plots.replace("<", "\\u003c")),
        plotly=_plotly() if plots != "[]" else None,
    )
    return str(page)


def to_fragment(document: Document) -> str:
    """The answer, the main tables and the notes, for a notebook; all strings are escaped.

    Colors are those of the notebook's theme. A wide table scrolls.
    """
    answer = document.answer
    first, *lines = answer.lines
    parts = [f"<p><strong>{escape(first)}</strong></p>"]
    parts += [f"<p>{escape(plain(line))}</p>" for line in lines]
    for section in document.filled:
        for table in (table for table in section.tables if not table.page_only):
            parts += [f"<p><em>{escape(table.title)}</em></p>", _scrolling(table)]
            parts += [f"<p>{escape(table.brief_note)}</p>"] if table.brief_note else []
        if section.notes:
            parts.append(f"<p><em>{escape(section.title)}</em></p>")
            parts += [f"<p>{escape(plain(note))}</p>" for note in section.notes]
    return f"<div>{''.join(parts)}</div>"


def _scrolling(table: Table) -> str:
    """A table whose names and sentences are on the left; notebooks put all cells on the right."""
    left = [i == 0 or column.prose for i, column in enumerate(table.columns)]
    styles = [' style="text-align:left"' if is_left else "" for is_left in left]

    def line(tag: str, cells: Iterable[str]) -> str:
        shown = zip(cells, styles, strict=True)
        return "".join(f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in shown)

    head = line("th", (column.title for column in table.columns))
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in table.rows[: table.brief])
    style = "overflow-x:auto;white-space:nowrap"
    return f'<div style="{style}"><table><tr>{head}</tr>{body}</table></div>'


@cache
def _template() -> Any:
    jinja2 = require("jinja2", extra="eval", what="the HTML page")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("holdfast.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plain": plain, "sha256": lambda text: _sha256(text.encode())}
    return environment.get_template("page.html.j2")


class Library(NamedTuple):
    """A script as a page holds it."""

    packed: str  # base64 of a gzip file
    sha256: str  # of the script inside, in base64
    license: str


@cache
def _plotly() -> Library:
    folder = files("holdfast.report") / "plotly"
    packed = (folder / "plotly-cartesian.min.js.gz").read_bytes()
    license_text = (folder / "LICENSE").read_text(encoding="utf-8")
    return Library(
        base64.b64encode(packed).decode(), _sha256(gzip.decompress(packed)), license_text
    )


def _sha256(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()
