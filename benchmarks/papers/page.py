"""Make docs/results.md and its pictures from benchmarks/papers/results/*.json.

python benchmarks/papers/page.py            # writes the page
python benchmarks/papers/page.py --check    # only says whether it agrees
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _advice
import _glue_page
import _page_tables as tables
import _pictures
import _words as words
from _pages import ROOT
from _summary import Results

PAGE, PICTURES = ROOT / "docs" / "results.md", ROOT / "docs" / "img"


def made(results: Results) -> str:
    """Where figures come from."""
    machines = "; ".join(
        dict.fromkeys(
            f"{m['device']}, torch {m['versions']['torch']}, {m['date']}" for m in results.made
        )
    )
    file = f"benchmarks/papers/results/{results.name}.json"
    commits = {m["versions"]["commit"] for m in results.made if "commit" in m["versions"]}
    early = sum("commit" not in results.made[run["made"]]["versions"] for run in results.runs)
    text = (
        f"[{results.name}.json](../{file}), {len(results.runs)} runs by "
        f"`benchmarks/papers/{results.name}.py`: {machines}, commit {', '.join(sorted(commits))}"
    )
    text += f" ({early} runs before commits were recorded)." if early else "."
    if results.missing:
        every = len(results.missing) + len(results.runs)
        text += f" {len(results.missing)} of {every} runs are still to be made."
    return text


def page(glue: Results, vision: Results, language: Results) -> str:
    of_glue = _glue_page.Glue(glue)
    parts = [
        words.HEAD,
        words.DIFFERENT,
        "## Which recipe to start with",
        _advice.start(of_glue, vision, language),
        "## RecAdam on GLUE",
        words.GLUE,
        _glue_page.tables(glue),
        words.say_glue(of_glue),
        "### Figure 2: loss and distance over the updates",
        "![Training loss and distance to the pretrained weights over the updates, for three k and "
        "plain Adam](img/recadam-figure-2.svg)",
        words.FIGURE_2,
        "### Figure 1: from recalling to learning",
        "![λ(t) for several k](img/recadam-figure-1.svg)",
        words.FIGURE_1,
        "### Coupled against decoupled",
        _glue_page.coupled(glue),
        made(glue),
        "## FLOW and the others, vision",
        words.VISION,
        "![ImageNet accuracy kept against Flowers102 accuracy](img/frontier-vision.svg)",
        *(tables.vision(vision, model) for model in tables.NAMES),
        words.say_vision(vision),
        made(vision),
        "## FLOW and the others, language",
        words.LANGUAGE,
        "![WikiText loss against GSM8K loss](img/frontier-language.svg)",
        tables.language(language),
        tables.accuracies(language),
        words.say_language(language),
        "### Does FLOW add to the others?",
        tables.additivity(language, vision),
        words.say_additivity(language, vision),
        made(language),
        "## What predicts forgetting",
        words.PREDICTS,
        tables.predictors(vision, language),
        words.say_predictors(vision, language),
        "## Make it again",
        words.AGAIN,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make docs/results.md and its pictures.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    glue, vision, language = (Results(name) for name in ("glue", "vision", "language"))
    text = page(glue, vision, language)
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        _pictures.draw_all(glue, vision, language, PICTURES)
        return
    stale = _pictures.stale(glue, vision, language, PICTURES)
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        stale.append(PAGE.name)
    if stale:
        sys.exit(f"{', '.join(stale)}: not what the results say. Run python {sys.argv[0]}")


if __name__ == "__main__":
    main()
