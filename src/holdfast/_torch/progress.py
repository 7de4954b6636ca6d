"""Progress bars: tqdm's where it is installed, none elsewhere."""

from contextlib import nullcontext
from typing import Any


class _NoBar(nullcontext[None]):
    """Stands in for a bar: the core needs torch, safetensors and numpy only."""

    def __enter__(self) -> Any:
        return self

    def update(self, n: float = 1) -> None: ...

    def close(self) -> None: ...


def progress_bar(total: int | None, description: str, *, shown: bool, unit: str = "sample") -> Any:
    """A progress bar with ``update(n)``, as a context manager."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, desc=description, disable=not shown, unit=unit)
