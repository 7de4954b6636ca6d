"""Put a result into a model card: one section of its text, and scores in its metadata.

A section lies between two marks, ``<!-- holdfast: NAME -->`` and ``<!-- /holdfast: NAME -->``, so
that the next update finds it. The text outside of them stays as it is, byte for byte.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._torch.finite import is_finite
from holdfast._torch.imports import require
from holdfast.io.files import write_whole
from holdfast.io.hub import is_cached_model
from holdfast.io.outputs import refuse_link
from holdfast.io.untrusted import parse_yaml
from holdfast.report.document import Document
from holdfast.report.text import escape, to_markdown
from holdfast.report.words import kind_of, plain, score_text

if TYPE_CHECKING:
    from holdfast.evaluate.report import ForgettingReport, Score

#: The end of the task names of our entries in ``model-index``.
_OURS = "(measured by holdfast)"
_ROLES = {"target": "target of fine-tuning", "retained": "retained after fine-tuning"}

#: Spaces, and the metadata at the beginning if there is one, as the hub finds it.
_FRONT = re.compile(r"(\ufeff?\s*)(?:---\r?\n(?P<yaml>.*?\n)??---[ \t]*(?:\r?\n|$))?", re.DOTALL)


def save_section(
    path: Path, name: str, document: Document, report: ForgettingReport | None
) -> None:
    """Insert or replace a section of a card, and add a report's scores to its metadata.

    A missing card is created. The file is written completely or not at all.
    """
    text = read_card(path, name)
    updated = with_section(text or _title(document), name, document)
    if report is not None:
        updated = with_scores(updated, report, str(path))
    if updated == text:
        return

    def write(file: Path) -> None:
        file.write_bytes(updated.encode())
        if path.exists():
            shutil.copymode(path, file)

    write_whole(path, write)


def read_card(path: Path, name: str) -> str:
    """The text of a card, empty if there is none. A ValueError says why it cannot be updated."""
    if path.suffix.lower() != ".md":
        raise ValueError(f"a model card is a Markdown file (.md), got {path}")
    if not re.fullmatch(r"\w[\w ]*", name):
        raise ValueError(f"a section is named by letters, digits and spaces, got {name!r}")
    refuse_link(path)
    if not path.exists():
        return ""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    _metadata(text, str(path))
    marks = _marks(name)
    places = [match[0] for match in re.finditer("|".join(marks), text)]
    if places and places != [*marks]:
        raise ValueError(
            f"{path}: {' and '.join(marks)} must occur once, in this order: repair or remove them"
        )
    return text


def with_section(text: str, name: str, document: Document) -> str:
    """The text of a card with a section, which replaces the one between its marks.

    Without them, it is appended: text of others stays, also under a heading of the same name.
    """
    begin, end = _marks(name)
    # What to do next is for the one who measured, not for those who read the card.
    shown = to_markdown(replace(document, answer=replace(document.answer, next="")), 3)
    line_break = _line_break(text)
    section = f"{begin}\n## {name.capitalize()}\n\n{shown}{end}".replace("\n", line_break)
    if begin in text:
        return text.partition(begin)[0] + section + text.partition(end)[2]
    gap = "" if text.endswith(2 * line_break) else line_break
    return f"{text}{gap if text.endswith(line_break) else 2 * gap}{section}{line_break}"


def with_scores(text: str, report: ForgettingReport, where: str) -> str:
    """The text of a card whose metadata has a report's scores, and the base if it is known."""
    known = _metadata(text, where)
    index = _model_index(known, report, where)
    new: dict[str, Any] = {}
    if index != known.get("model-index", []):
        new["model-index"] = index
    if known.get("base_model") is None and is_cached_model(report.base):
        new["base_model"] = report.base
    return _with_metadata(text, known, new) if new else text


def _title(document: Document) -> str:
    """The beginning of a new card: the name of the model."""
    return f"# {escape(_model_name(document.names[-1]))}\n"


def _model_name(source: str) -> str:
    """The last part of a model's name, which may be that of the working directory (``.``)."""
    return plain(Path(os.path.abspath(source)).name)


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- holdfast: {name.lower()} -->", f"<!-- /holdfast: {name.lower()} -->"


def _line_break(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _front(text: str) -> re.Match[str]:
    front = _FRONT.match(text)
    assert front is not None  # it may be empty
    return front


def _metadata(text: str, where: str) -> dict[str, Any]:
    found = parse_yaml(_front(text)["yaml"] or "", f"the metadata of {where}")
    if not isinstance(found, dict | None):
        raise ValueError(f"the metadata of {where} must be names and values, got {found!r:.60}")
    return found or {}


def _with_metadata(text: str, known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Set values of the metadata. Its other lines stay as they are, if they can."""
    yaml_dump = require("huggingface_hub.utils", extra="hf", what="a model card").yaml_dump
    front, line_break = _front(text), _line_break(text)
    dump = partial(yaml_dump, sort_keys=False, line_break=line_break)
    # A key, and the lines below it that are indented or items of its list.
    old = rf"^['\"]?(?:{'|'.join(new)})['\"]?[ \t]*:.*\n(?:[ \t-].*\n)*"
    block = re.sub(old, "", front["yaml"] or "", flags=re.MULTILINE) + dump({**new})
    if not _says(block, {**known, **new}):  # in braces, or with comments in between
        block = dump({**known, **new})
    return f"{front[1]}---{line_break}{block}---{line_break}{text[front.end() :]}"


def _says(block: str, values: Mapping[str, Any]) -> bool:
    try:
        return bool(parse_yaml(block, "") == values)
    except ValueError:
        return False


def _model_index(known: Mapping[str, Any], report: ForgettingReport, where: str) -> list[Any]:
    """The card's ``model-index``, in which the report's scores replace those of an earlier one."""
    hub = require("huggingface_hub", extra="hf", what="a model card")
    index = known.get("model-index") or []
    try:
        kept = [one for one in index[0]["results"] if not _is_ours(one)] if index else []
        name = index[0]["name"] if index else _model_name(report.tuned)
    except (AttributeError, KeyError, TypeError, IndexError):
        raise ValueError(
            f"the metadata of {where} has a model-index that is not a list of models with name and "
            "results: repair or remove it"
        ) from None
    task = known.get("pipeline_tag") or _task(report)
    results = [
        hub.EvalResult(
            task_type=str(task),
            task_name=f"{_ROLES[score.role]} {_OURS}",
            dataset_type=re.sub(r"[^\w./-]+", "-", plain(score.name)),
            dataset_name=plain(score.name),
            metric_type=re.sub(r"\W+", "_", plain(score.metric)).strip("_"),
            metric_value=float(f"{score.after.value:.6g}"),
            metric_name=_metric(score),
        )
        for score in sorted(report.scores, key=lambda score: score.role != "target")
        if is_finite(score.after.value)
    ]
    ours = hub.ModelCardData(model_name=name, eval_results=results).to_dict()["model-index"]
    first = {**(index[0] if index else {}), "name": name, "results": kept + ours[0]["results"]}
    return [first, *index[1:]] if first["results"] else []


def _is_ours(result: Mapping[str, Any]) -> bool:
    return str((result.get("task") or {}).get("name", "")).endswith(_OURS)


def _metric(score: Score) -> str:
    before = score_text(score.metric, score.before.value)
    return f"{plain(score.metric)} ({before} before fine-tuning, n = {score.after.n:,})"


def _task(report: ForgettingReport) -> str:
    """The kind of model, in the hub's words, as far as the tests tell."""
    kinds = {"token": "text-generation", "masked token": "fill-mask"}
    known = [kinds[d.per] for d in report.divergences if d.per in kinds]
    likelihood = any(kind_of(score.metric) in ("nll", "perplexity") for score in report.scores)
    return known[0] if known else "text-generation" if likelihood else "other"
