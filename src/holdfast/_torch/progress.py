"""Progress bars."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int | None, description: str, *, shown: bool, unit: str = "sample") -> Any:
    """A progress bar with ``update(n)``, as a context manager."""
    return tqdm(total=total, desc=description, disable=not shown, unit=unit)
