"""A hook, named in ``mkdocs.yml``: build the explorer before the site, if results have changed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def on_pre_build(*, config: Any, **_: Any) -> None:
    """Write explorer/index.html, which `make explorer` writes too."""
    page = Path(config.docs_dir) / "explorer" / "index.html"
    made = (BENCHMARKS.rglob(names) for names in ("*.py", "results/*.json"))
    sources = [*BENCHMARKS.glob("*.*"), *itertools.chain(*made)]
    changed = max(file.stat().st_mtime for file in sources)
    if not page.exists() or page.stat().st_mtime < changed:
        subprocess.run([sys.executable, BENCHMARKS / "explorer.py"], check=True)
