"""A Document as one self-contained page, and as a fragment for notebooks.

The page holds plotly.js (about 4.8 MB), the plots and the JSON of the result. Its content security
policy allows only its own two scripts to run, and nothing to be loaded.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from typing import Any

from holdfast._torch.imports import require
from holdfast.report.document import Document, Table
from holdfast.report.words import plain


def to_html(document: Document, data: str) -> str:
    """Render a page, from which ``data``, the JSON of the result, can be downloaded."""
    plotly = require("plotly.offline", extra="eval", what="the HTML page")
    markup = require("markupsafe", extra="eval", what="the HTML page").Markup
    figures = [figure for section in document.filled for figure in section.figures]
    plots = json.dumps(
        [{**figure.plot, "narrow": figure.narrow} for figure in figures],
        allow_nan=False,
        default=float,  # of numpy
    )
    page = _template().render(
        document=document,
        # "<" occurs only in strings of JSON: escaped, no HTML parser finds a tag.
        data=markup(data.replace("<", "\\u003c")),
        plots=markup(plots.replace("<", "\\u003c")),
        plotly=markup(plotly.get_plotlyjs().replace("\r\n", "\n")),
    )
    return str(page)


def to_fragment(document: Document) -> str:
    """The answer, the main tables and the notes, for a notebook; all strings are escaped.

    Colors are those of the notebook's theme. A wide table scrolls.
    """
    answer = document.answer
    parts = [f"<p><strong>{escape(answer.headline)}</strong></p>"]
    parts += [f"<p>{escape(plain(sentence))}</p>" for sentence in answer.sentences]
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
    environment.filters |= {"plain": plain, "sha256": _sha256}
    return environment.get_template("page.html.j2")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
