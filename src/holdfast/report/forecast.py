"""The Document of a forecast: what a training would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast.report.document import Answer, Column, Document, Section, Table, Tone
from holdfast.report.words import NONE, digits, gigabytes, listed, percent, plain, seconds

if TYPE_CHECKING:
    from holdfast.hosts.forecast import Forecast

#: The share of a GPU's memory above which a training may run out of it all the same.
_TIGHT = 0.9
#: Differences that are not worth a word: bytes, and a share of the time of an update.
_EQUAL, _EQUAL_TIME = 5e6, 0.005


def forecast_document(found: Forecast) -> Document:
    """Verdict, memory per GPU, time per update, and what is not counted."""
    needs, others, machines = found.needs, found.plain, found.machines
    size, room = needs.bytes, machines.memory
    said, tone = _verdict(max(size, needs.whole_bytes), room)
    per = "per GPU" if machines.gpus > 1 else "on the GPU"
    is_later = size <= room < needs.whole_bytes
    when, shown = (" before it is sharded", needs.whole_bytes) if is_later else ("", size)
    early = needs.never_whole(room)
    would = "Once it is sharded, it would" if early else "It would"
    headline = f"{said}{when}: {gigabytes(shown)} of {gigabytes(room)} {per}"
    updates = f"{found.updates:,} update{'s' if found.updates > 1 else ''}"
    sentences = [
        f"{plain(found.recipe)} on {plain(found.model)}: {_count(found.weights)} weights, of which "
        f"{_count(found.trained)} are trained, in {updates}.",
        f"An update takes {_longer(found.x_time - 1)} plain fine-tuning, and the memory {per} is "
        f"{_larger(size - others.bytes)}.",
        _duration(found),
        *([f"Once it is sharded, it needs {gigabytes(size)} {per}."] if is_later else ()),
        *(f"{would} fit with {c}: {gigabytes(b)}." for c, b in found.changes.items()),
        *([_before_sharding(found)] if early else ()),
    ]
    if not (found.fits or found.changes or early):
        sentences.append(
            "No change that was tried makes it fit. Take GPUs with more memory, a shorter "
            "--max-length or a smaller model."
        )
    tables = (
        _table(f"Memory {per}", needs.memory, others.memory, gigabytes),
        _table(f"Memory {per} before sharding", needs.whole, others.whole, gigabytes),
        _table("CPU memory per process", needs.on_cpu, others.on_cpu, gigabytes, total=False),
        _table("Time per update", needs.update, others.update, _time),
        _table("Before training", needs.before, others.before, _time, total=False),
    )
    sections = (Section("Needs", tables=tables), Section("About", notes=_notes(found)))
    return Document(
        "forecast", Answer(headline, tuple(sentences)), said, tone, (found.model,), sections
    )


def _duration(found: Forecast) -> str:
    """How long the whole training takes."""
    before = sum(found.needs.before.values())
    said = f"All updates together take about {seconds(found.updates * found.needs.seconds)}"
    return f"{said}, after about {seconds(before)} of preparation." if before else f"{said}."


def _verdict(size: float, room: float) -> tuple[str, Tone]:
    if size > room:
        return "does not fit", "bad"
    return ("fits", "good") if size <= _TIGHT * room else ("fits closely", "warn")


def _before_sharding(found: Forecast) -> str:
    """What to do if the whole model does not fit on a GPU."""
    if work := listed([*found.needs.before]):
        return (
            f"Each process runs the whole model before it is sharded ({work}): take GPUs with more "
            "memory, or a recipe without this work."
        )
    return (
        "`holdfast finetune` loads the whole model onto every GPU. In Python, HoldfastTrainer with "
        "FSDP2 leaves it in CPU memory until it is sharded."
    )


def _notes(found: Forecast) -> tuple[str, ...]:
    machines, needs = found.machines, found.needs
    notes = [
        *found.remarks,
        "This is an estimate. Sizes are counted on the model without its weights, activations "
        "roughly. Samples have the full length, and communication between GPUs and reading data "
        "take no time.",
        f"Measured constants: {found.source}; benchmarks/constants.py computes them.",
    ]
    if machines.ranks > 1:
        notes.append(
            "Each process holds the whole model until it is sharded. A copy of θ* and an "
            "importance that a run makes on it stay whole."
        )
    if machines.anchors == "host" and {"θ*", "fetching θ*"} & {*needs.memory, *needs.update}:
        notes.append(
            "θ* is that of reference=Reference.open(DIR) in Python: `holdfast finetune` copies the "
            "model on the GPU."
        )
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


def _longer(share: float) -> str:
    if abs(share) < _EQUAL_TIME:
        return "about as long as with"
    return f"about {percent(abs(share))} {'more' if share > 0 else 'less'} time than with"


def _larger(size: float) -> str:
    if abs(size) < _EQUAL:
        return "about the same"
    return f"{gigabytes(abs(size))} {'larger' if size > 0 else 'smaller'}"


def _time(value: float) -> str:
    if value < 1e-4:
        return "below 0.1 ms"
    return seconds(value) if value >= 1 else f"{digits(1e3 * value, 1)} ms"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{digits(number / size, 1)} {unit}"
    return f"{number:,}"
