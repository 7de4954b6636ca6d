"""Put a result into a model card: one section of its text, and scores in its metadata.

A section lies between two comments, ``<!-- holdfast: NAME -->`` and ``<!-- /holdfast: NAME -->``,
so that the next update finds it. Everything else in the card stays as it is, byte for byte.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

#: The metadata at the beginning, as the hub finds it.
_FRONT = re.compile(r"\s*---(\r\n|\r|\n)(?P<yaml>.*?)(\r\n|\r|\n)---[ \t]*(\r\n|\n|$)", re.DOTALL)
_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)


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
    try:
        _find(text.splitlines(keepends=True), name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text


def with_section(text: str, name: str, document: Document) -> str:
    """The text of a card with a section, which replaces the one between its comments.

    Without them, it is appended: text of others stays, also under a heading of the same name.
    """
    lines = text.splitlines(keepends=True)
    start, end, level = _find(lines, name)
    # What to do next is for the one who measured, not for those who read the card.
    shown = to_markdown(replace(document, answer=replace(document.answer, next="")), level + 1)
    begin, finish = _comments(name)
    section = f"{begin}\n{'#' * level} {name.capitalize()}\n\n{shown}{finish}\n"
    if start == len(lines) and text:
        ended = lines[-1].endswith(("\n", "\r"))
        section = "\n" * (not ended) + "\n" * bool(lines[-1].strip()) + section
    section = section.replace("\n", _line_break(text))
    return "".join([*lines[:start], section, *lines[end:]])


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


def _comments(name: str) -> tuple[str, str]:
    return f"<!-- holdfast: {name.lower()} -->", f"<!-- /holdfast: {name.lower()} -->"


def _line_break(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _find(lines: Sequence[str], name: str) -> tuple[int, int, int]:
    """The lines between its comments, and the level of its heading; after the last line if new."""
    outside = dict(_outside_code(lines))
    begin, finish = (
        [i for i, line in outside.items() if line.strip() == comment] for comment in _comments(name)
    )
    if begin or finish:
        if not (len(begin) == len(finish) == 1 and begin < finish):
            raise ValueError(
                f"the lines {' and '.join(_comments(name))} must occur once, in this order: repair "
                "or remove them"
            )
        start, end = begin[0], finish[0] + 1
        found = (_HEADING.match(outside.get(i, "")) for i in range(start, end))
        return start, end, next((len(heading[1]) for heading in found if heading), 2)
    return len(lines), len(lines), 2


def _outside_code(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The numbered lines that are in neither the metadata nor a fenced block of code."""
    front = _FRONT.match("".join(lines).removeprefix("\ufeff"))
    skipped = len(front[0].splitlines()) if front else 0
    fence = ""
    for i, line in enumerate(lines[skipped:], skipped):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                fence = ""
        elif found:
            fence = found[1]
        else:
            yield i, line
    if fence:
        raise ValueError(f"the last block of code has no end: add a line {fence}")


def _metadata(text: str, where: str) -> dict[str, Any]:
    front = _FRONT.match(text.removeprefix("\ufeff"))
    found = parse_yaml(front["yaml"], f"the metadata of {where}") if front else None
    if not isinstance(found, dict | None):
        raise ValueError(f"the metadata of {where} must be names and values, got {found!r:.60}")
    return found or {}


def _with_metadata(text: str, known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Set values of the metadata. Its other lines stay as they are, if they can."""
    dump = require("huggingface_hub.utils", extra="hf", what="a model card").yaml_dump
    bom = "\ufeff" * text.startswith("\ufeff")
    text, line_break = text.removeprefix(bom), _line_break(text)
    front = _FRONT.match(text)
    if front is None:
        head = dump(dict(new), sort_keys=False, line_break=line_break)
        return f"{bom}---{line_break}{head}---{line_break}{text}"
    block = front["yaml"]
    for key, value in new.items():
        lines = dump({key: value}, sort_keys=False, line_break=line_break).removesuffix(line_break)
        if key in known:
            # The key, and the lines below it that are indented or items of its list.
            old = rf"^{re.escape(key)}[ \t]*:[^\r\n]*(?:\r?\n[ \t-][^\r\n]*)*"
            block = re.sub(old, lambda _, lines=lines: lines, block, count=1, flags=re.MULTILINE)
        else:
            block = f"{block}{line_break if block else ''}{lines}"
    if not _says(block, {**known, **new}):  # in braces, or with comments in between
        block = dump({**known, **new}, sort_keys=False, line_break=line_break).rstrip()
    return f"{bom}{text[: front.start('yaml')]}{block}{text[front.end('yaml') :]}"


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
