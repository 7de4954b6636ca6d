"""A Document as one self-contained page.

The page holds plotly.js (about 4.8 MB), the plots and the JSON of the result. Its content security
policy allows only its own two scripts to run, and nothing to be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

from holdfast._torch.imports import require
from holdfast.report.document import Document
from holdfast.report.words import plain

__all__ = ["to_html"]


def to_html(document: Document, data: str) -> str:
    """Render a page.

    Needs jinja2, and plotly for its JavaScript.

    Args:
        document: what to show.
        data: the JSON of the result, for download from the page.
    """
    plotly = require("plotly.offline", extra="eval", what="the HTML page")
    figures = [figure for section in document.filled for figure in section.figures]
    plots = [{**figure.plot, "narrow": figure.narrow} for figure in figures]
    page: str = _template().render(
        document=document,
        ids={id(figure): f"plot-{i}" for i, figure in enumerate(figures)},
        data=_inert(data),
        plots=_inert(json.dumps(plots, allow_nan=False, default=float, separators=(",", ":"))),
        plotly=_safe(plotly.get_plotlyjs().replace("\r\n", "\n")),
    )
    return page


@cache
def _template() -> Any:
    jinja2 = require("jinja2", extra="eval", what="the HTML page")
    loader = jinja2.PackageLoader("holdfast.report", "")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plain": plain, "sha256": _sha256}
    environment.globals["id"] = id
    return environment.get_template("page.html.j2")


def _safe(text: str) -> Any:
    return require("markupsafe", extra="eval", what="the HTML page").Markup(text)


def _inert(text: str) -> Any:
    """JSON in which no HTML parser finds a tag; ``<`` occurs only in its strings."""
    return _safe(text.replace("<", "\\u003c"))


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
