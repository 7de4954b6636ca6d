"""A Document as one self-contained page, and as a fragment for notebooks.

The page holds plotly.js (about 4.8 MB), the plots and the JSON of the result. Its content security
policy allows only its own two scripts to run, and nothing to be loaded.
"""

import base64
import hashlib
import itertools
import json
from functools import cache
from html import escape
from typing import Any

from holdfast._torch.imports import require
from holdfast.report.document import Document
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
    """The answer and the main tables, for a notebook; all strings are escaped."""
    answer = document.answer
    parts = [f"<p><strong>{escape(answer.headline)}</strong></p>"]
    parts += [f"<p>{escape(plain(sentence))}</p>" for sentence in answer.sentences]
    for table in (t for section in document.filled for t in section.tables if not t.page_only):
        head = "".join(f"<th>{escape(column.title)}</th>" for column in table.columns)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
        body = "".join(f"<tr>{row}</tr>" for row in itertools.islice(rows, table.brief))
        parts.append(f"<p>{escape(table.title)}</p><table><tr>{head}</tr>{body}</table>")
    return f"<div>{''.join(parts)}</div>"


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
