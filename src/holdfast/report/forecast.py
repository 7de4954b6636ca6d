"""The Document of a forecast: what a training would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast.report.document import Answer, Column, Document, Section, Table, Tone
from holdfast.report.words import NONE, digits, gigabytes, percent, plain, seconds

if TYPE_CHECKING:
    from holdfast.hosts.forecast import Forecast

#: The share of a GPU's memory above which a training may run out of it all the same.
_TIGHT = 0.9
_EQUAL = 5e6  # bytes of difference that are not worth a word


def forecast_document(found: Forecast) -> Document:
    """Verdict, memory per GPU, time per update, and what is not counted."""
    needs, others, machines = found.needs, found.plain, found.machines
    size, room = needs.bytes, machines.memory
    said, tone = _verdict(size, room)
    per = "per GPU" if machines.gpus > 1 else "on the GPU"
    headline = f"{said}: {gigabytes(size)} of {gigabytes(room)} {per}"
    sentences = [
        f"{plain(found.recipe)} on {plain(found.model)}: {_count(found.weights)} weights, of which "
        f"{_count(found.trained)} are trained, in {found.updates:,} updates.",
        f"An update takes {_more(found.x_time - 1)} time than with plain fine-tuning, and the "
        f"memory {per} is {_larger(size - others.bytes)}.",
        *(f"It would fit with {c}: {gigabytes(b)}." for c, b in found.changes.items()),
    ]
    tables = (
        _table(f"Memory {per}", needs.memory, others.memory, gigabytes),
        _table("CPU memory per process", needs.on_cpu, others.on_cpu, gigabytes, total=False),
        _table("Time per update", needs.update, others.update, _time),
        _table("Before training", needs.before, others.before, seconds, total=False),
    )
    sections = (Section("Needs", tables=tables), Section("About", notes=_notes(found)))
    return Document(
        "forecast", Answer(headline, tuple(sentences)), said, tone, (found.model,), sections
    )


def _verdict(size: float, room: float) -> tuple[str, Tone]:
    if size > room:
        return "does not fit", "bad"
    return ("fits", "good") if size <= _TIGHT * room else ("fits closely", "warn")


def _notes(found: Forecast) -> tuple[str, ...]:
    machines, needs = found.machines, found.needs
    notes = [
        "This is an estimate. Sizes are counted on the model without its weights, activations "
        "roughly. Samples have the full length, and communication between GPUs and reading data "
        "take no time.",
        f"Measured constants: {found.source}; benchmarks/constants.py computes them.",
    ]
    if machines.ranks > 1:
        whole = gigabytes(needs.memory["weights"] * machines.ranks)
        notes.append(
            f"Each process holds the whole model ({whole}) until it is sharded, and what happens "
            "before training runs on it."
        )
        if "θ*" in needs.memory or "θ*" in needs.on_cpu:
            notes.append(
                "The share of θ* is that of a reference=Reference.open(DIR), mapped from disk. A "
                "copy of the model that a run makes by itself stays whole."
            )
        if machines.anchors == "host" and "θ*" in needs.on_cpu:
            notes.append("On paper only: this version keeps θ* of sharded weights on the GPU.")
    return tuple(notes)


def _table(
    title: str,
    ours: Mapping[str, float],
    plain_ones: Mapping[str, float],
    text: Callable[[float], str],
    *,
    total: bool = True,
) -> Table:
    def cell(value: float | None) -> str:
        return text(value) if value else NONE

    names = dict.fromkeys((*ours, *plain_ones))
    rows = [(name, cell(ours.get(name)), cell(plain_ones.get(name))) for name in names]
    if total and rows:
        rows.append(("all", text(sum(ours.values())), text(sum(plain_ones.values()))))
    columns = Column(""), Column("recipe"), Column("plain fine-tuning")
    return Table(title, columns, tuple(rows))


def _more(share: float) -> str:
    return f"about {percent(abs(share))} {'more' if share >= 0 else 'less'}"


def _larger(size: float) -> str:
    if abs(size) < _EQUAL:
        return "about the same"
    return f"{gigabytes(abs(size))} {'larger' if size > 0 else 'smaller'}"


def _time(value: float) -> str:
    return seconds(value) if value >= 1 else f"{digits(1e3 * value, 1)} ms"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{digits(number / size, 1)} {unit}"
    return f"{number:,}"
