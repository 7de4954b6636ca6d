"""A sweep as text: its table, as Markdown and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.report.markdown import escape, markdown_table
from holdfast.report.sweep_recommend import key_of, recommend
from holdfast.report.tables import Table
from holdfast.report.terminal import text_table
from holdfast.report.words import level, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.sweep import Sweep

__all__ = ["notes_of", "sweep_table", "to_markdown", "to_text"]

_NONE = "–"


def sweep_table(sweep: Sweep) -> Table:
    """A row for each thing that was measured and a column for each α, targets first."""
    chosen = recommend(sweep).alpha
    heads = [f"α {p.alpha:g}{' ★' if p.alpha == chosen else ''}" for p in sweep.points]
    return Table(
        "By α",
        ("measured", "in", *heads),
        (*_scores(sweep), *_divergences(sweep), *_drift(sweep)),
        "" if chosen is None else "★ is the recommended α.",
    )


def notes_of(sweep: Sweep) -> list[str]:
    """What could not be measured, said once."""
    return list(dict.fromkeys(note for point in sweep.points for note in point.report.notes))


def to_markdown(sweep: Sweep) -> str:
    """The recommendation, the table and the notes; names cannot be anything but text."""
    said = recommend(sweep)
    parts = [
        f"# {escape(said.headline)}",
        f"{escape(plain(sweep.base))} → {escape(plain(sweep.tuned))}",
        "\n".join(f"- {escape(sentence)}" for sentence in said.sentences),
        markdown_table(sweep_table(sweep)),
    ]
    if notes := notes_of(sweep):
        lines = "\n".join(f"- {escape(plain(note))}" for note in notes)
        parts.append(f"## Not measured\n\n{lines}")
    return "\n\n".join(part for part in parts if part) + "\n"


def to_text(sweep: Sweep) -> str:
    """The same for a terminal."""
    said = recommend(sweep)
    lines = [said.headline, *said.sentences, *map(plain, notes_of(sweep))]
    return "\n".join(lines) + "\n\n" + text_table(sweep_table(sweep))


def _scores(sweep: Sweep) -> list[tuple[str, ...]]:
    found = [{key_of(score): score for score in p.report.scores} for p in sweep.points]
    keys = dict.fromkeys(key for scores in found for key in scores)
    rows = []
    for key in sorted(keys, key=lambda key: key[2] != "target"):
        name, metric, role = key
        values = (level(metric, s[key].after.value) if key in s else _NONE for s in found)
        label = plain(name) + (" (target)" if role == "target" else "")
        rows.append((label, plain(metric), *values))
    return rows


def _divergences(sweep: Sweep) -> list[tuple[str, ...]]:
    found = [{(d.name, d.per): d for d in p.report.divergences} for p in sweep.points]
    return [
        (
            f"predictions, {plain(key[0])}",
            f"nats a {plain(key[1])}",
            *(nats(row[key].kl.value) if key in row else _NONE for row in found),
        )
        for key in dict.fromkeys(key for row in found for key in row)
    ]


def _drift(sweep: Sweep) -> list[tuple[str, ...]]:
    drifts = [point.report.drift for point in sweep.points]
    if not any(drifts):
        return []
    return [
        ("weights", "of their norm", *(percent(d.total.relative) if d else _NONE for d in drifts))
    ]
