"""The Document of a gate, and its JUnit XML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from holdfast.report.document import Answer, Column, Document, Section, Table
from holdfast.report.forgetting import document as forgetting
from holdfast.report.verdict import no_evidence, source_of, verdict
from holdfast.report.words import between, digits, listed, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.gate import Check, Gate

#: A limit in words, and how its figures are written.
_WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "max_perplexity_rise": ("rise of the perplexity", percent),
    "max_skill_rise": ("rise of the perplexity of a skill", percent),
    "max_drop": ("drop, points", lambda share: digits(100 * share, 1)),
    "max_kl": ("divergence, nats", nats),
    "max_drift": ("drift of the weights", percent),
    "min_target": ("target, at least", nats),
    "max_target_loss": ("loss of the target", nats),
}


def document(gate: Gate) -> Document:
    under = forgetting(gate.report)
    return Document(
        kind="gate",
        answer=Answer(_headline(gate), tuple(map(str, _sentences(gate)))),
        badge="Passed" if gate.passed else "Failed",
        tone="good" if gate.passed else "bad",
        names=under.names,
        sections=(Section("Limits", tables=(_table(gate),)), *under.sections),
        download="gate.json",
    )


def _headline(gate: Gate) -> str:
    failed = sum(not check.passed for check in gate.checks)
    total = len(gate.checks)
    if not failed:
        figures = "the figure is" if total == 1 else f"all {total} figures are"
        return f"Passed: {figures} within limits."
    return f"Failed: {failed} of {total} figures {'is' if failed == 1 else 'are'} beyond the limit."


def _sentences(gate: Gate) -> list[str]:
    said = [f"{plain(check.name)}: {in_words(check)}." for check in gate.checks if not check.passed]
    if close := [plain(check.name) for check in gate.checks if check.is_close]:
        said.append(
            f"The limit lies within the interval on {', '.join(dict.fromkeys(close))}: more "
            "samples might turn the outcome."
        )
    if trained := [source_of(d) for d in gate.report.divergences if d.trained_on]:
        said.append(no_evidence(listed(trained)))
    return [*said, verdict(gate.report).headline]


def in_words(check: Check) -> str:
    """A figure and its limit: ``rise of the perplexity 8.1 %, limit 2.0 %``."""
    what, text = _WORDS[check.limit]
    return f"{what} {text(check.value.value)}, limit {text(check.most)}"


def _table(gate: Gate) -> Table:
    columns: dict[Column, Callable[[Check], str]] = {
        Column("on"): lambda c: plain(c.name),
        Column("figure"): lambda c: _WORDS[c.limit][0],
        Column("value"): lambda c: _WORDS[c.limit][1](c.value.value),
        Column("limit"): lambda c: _WORDS[c.limit][1](c.most),
        Column("95 % interval", rank=1): lambda c: between(
            c.value.low, c.value.high, _WORDS[c.limit][1]
        ),
        Column("n", rank=2): lambda c: f"{c.value.n:,}",
        Column(""): lambda c: "passed" if c.passed else "failed",
    }
    ordered = sorted(gate.checks, key=lambda check: check.passed)
    tones = tuple("good" if check.passed else "bad" for check in ordered)
    return Table.of("Limits", ordered, columns, tones=tones, opened=True)


def to_junit(gate: Gate) -> str:
    """One test case per figure, in the form that CI systems read."""
    failed = sum(not check.passed for check in gate.checks)
    about = {"name": "holdfast check", "tests": str(len(gate.checks)), "failures": str(failed)}
    suites = ET.Element("testsuites", about)
    suite = ET.SubElement(suites, "testsuite", about)
    for check in gate.checks:
        names = {"classname": f"holdfast.{check.limit}", "name": plain(check.name)}
        case = ET.SubElement(suite, "testcase", names)
        if not check.passed:
            ET.SubElement(case, "failure", {"message": in_words(check)})
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
