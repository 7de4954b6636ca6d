"""Fill the tables of README.md and docs/ from the registry and the committed results.

A table stands between ``<!-- table: name arguments -->`` and ``<!-- /table -->``; ``name`` is a
function of this file. All other text is written by hand; all other figures are in the explorer.

python benchmarks/pages.py            # write the tables, the verdict and the pictures
python benchmarks/pages.py --check    # exit with an error if one of them is stale
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent / folder) for folder in ("papers", "proof")]

import pictures
import verdict
from _markdown import SPEC, table
from verdict import frugal_plain_of, ours_of

from holdfast import registry
from holdfast.recipe import preset_words

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\w+)([^\n]*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
LOW = 90  # percent; in the first row of the evidence, plain fine-tuning keeps less
Settings = dict[str, Any]


def stage(name: registry.Stage) -> str:
    """The methods of one stage, with links to their pages and their costs."""
    rows = []
    for entry in registry.methods(name):
        title, page = f"`{entry.name}`", ROOT / "docs" / "methods" / f"{entry.name}.md"
        first = f"[{title}]({page.name})" if page.exists() else title
        text = "DOI" if "doi.org" in entry.url else entry.paper
        text = "documentation" if text.startswith("https://") else text
        paper = f"[{text}]({entry.url})" if entry.url else ""
        cost = SPEC["costs"].get(entry.name, "—")
        rows.append([f"{first}<br>`{entry.cls.__name__}`", entry.summary, cost, paper])
    return table(["name, class", "what it does", "cost compared with AdamW", "paper"], rows)


def presets() -> str:
    """The presets that are not named like a method."""
    rows = [
        [f"`{name}`", f"`{preset_words(name)}`" if found else preset_words(name)]
        for name, found in registry.PRESETS.items()
    ]
    return table(["preset", "methods"], rows)


def groups(settings: Settings) -> dict[str, list[str]]:
    """The settings in which the plain run keeps little, as much as ``holdfast``, and the others."""
    kept = {
        n: (frugal_plain_of(s)["mean_kept"], ours_of(s)["mean_kept"]) for n, s in settings.items()
    }
    little = [name for name, (plain, _) in kept.items() if plain < LOW]
    enough = [name for name, (plain, ours) in kept.items() if plain >= ours]
    rest = [name for name in settings if name not in (*little, *enough)]
    return {
        f"{len(little)} settings: plain forgot much": little,
        f"{len(enough)} settings: plain kept as much or more": enough,
        f"the other {len(rest)}": rest,
    }


def evidence() -> str:
    """What ``holdfast`` and a cautious plain run learned and kept, as ranges over settings."""
    settings = verdict.read()["settings"]
    rows = []
    for title, names in [*groups(settings).items()][:2]:  # a sentence tells the others
        cells = [title]
        for of in (ours_of, frugal_plain_of):
            found = [of(settings[name]) for name in names]
            ends = [
                f"{min(shares):.0f}–{max(shares):.0f} %"
                for shares in ([row[field] for row in found] for field in ("target", "mean_kept"))
            ]
            cells.append(" / ".join(ends))
        rows.append(cells)
    plain = "plain, swept: learned / kept"
    return table(["", "`holdfast`: learned / kept", plain], rows)


def first_run() -> str:
    """The first lines that the README's commands print, and figures of plain fine-tuning."""
    rows = json.loads((ROOT / "benchmarks/results/first_run.json").read_text("utf-8"))["rows"]
    ours, plain = ([line.lstrip("#- ") for line in row["printed"].splitlines()] for row in rows)
    learned = plain[4].partition(";")[0].rpartition(" ")[2]
    kept = plain[0].partition(" (")[0].rpartition("kept ")[2]
    return (
        f"```text\n{ours[0]}\n{ours[4].partition(';')[0]} …\n```\n\n"
        f"Plain fine-tuning at the same learning rate kept {kept} (loss {learned})."
    )


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made for made in (stage, presets, first_run, evidence)
}


def filled(text: str) -> str:
    """A page with its tables."""
    return BLOCK.sub(lambda b: f"{b[1]}{TABLES[b[2]](*b[3].split())}\n{b[4]}", text)


def stale() -> list[str]:
    """The files that do not show the present results."""
    old = ["verdict.json"] if verdict.stale() else []
    old += [page.name for page in PAGES if filled(text := page.read_text("utf-8")) != text]
    return [*old, *pictures.stale()]


def write() -> None:
    """Bring all of them up to date."""
    if verdict.stale():
        verdict.write()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            page.write_text(made, encoding="utf-8")
    pictures.draw(pictures.stale())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    if not parser.parse_args().check:
        write()
    elif old := stale():
        sys.exit(f"{', '.join(old)}: stale; run python benchmarks/pages.py")


if __name__ == "__main__":
    main()
