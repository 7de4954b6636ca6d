"""Fail if README.md, the pages or what tests them grow too long; `make lint` runs this."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [file for file in (ROOT / "docs").rglob("*.md") if file.parent.name != "api"]
TOOLS = [*(ROOT / "docs").glob("_*.py")]
TOOLS += [ROOT / f"benchmarks/{name}.py" for name in ("pages", "_markdown")]
TOOLS += [ROOT / f"tests/test_{name}.py" for name in ("contributing", "docs", "notebooks", "pages")]
#: What is counted, in which files, and the most there may be.
MOST = {
    "words of README.md": ([ROOT / "README.md"], 900),
    "words of docs/, without api/": (PAGES, 40_000),
    "lines of tests and tools of the documentation": (TOOLS, 900),
}


def counted(what: str, files: list[Path]) -> int:
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(len(text.split() if "words" in what else text.splitlines()) for text in texts)


def main() -> None:
    found = {what: (counted(what, files), most) for what, (files, most) in MOST.items()}
    lines = [f"{what}: {count:,} of {most:,}" for what, (count, most) in found.items()]
    print("\n".join(lines))
    if too_many := [what for what, (count, most) in found.items() if count > most]:
        sys.exit(f"too many {'; '.join(too_many)}")


if __name__ == "__main__":
    main()
