"""Markdown and the terminal."""

import io
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from rich.console import Console

from holdfast.comparison.results import Results
from holdfast.report.document import Answer, Column, Document, Section, Table
from holdfast.report.text import escape
from report.reports import reports
from report.sample_report import sample
from report.sample_results import RECIPES, every_results, run, sample_results, simple
from report.sample_sweep import sample_sweep
from report.test_html import sweeps

LONG = {f"{name}+wise-ft+and-more": row for name, row in RECIPES.items()}


def printed(found, width=140, **options):
    stream = io.StringIO()
    found.to_terminal(Console(file=stream, width=width, **options))
    return stream.getvalue()


def row(text, name):
    """The cells of a Markdown table's row."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_a_report():
    text = sample().to_markdown()
    assert text.startswith("# Much forgotten: kept 92 % (worst: LAMBADA, −6.3 points).\n")
    assert "\nNext: `holdfast merge HuggingFaceTB/SmolLM2-135M runs/smollm2-gsm8k --sweep" in text
    assert row(text, "PIQA") == [
        "PIQA", "acc_norm", "68.4 %", "65.3 %", "−3.1 points", "−4.0 to −2.2", "1,838", "lost",
    ]  # fmt: skip
    assert row(text, "model.layers.19")[1] == "2.5 %"
    assert "11 of 33 rows." in text
    assert "- HellaSwag was left out: the file is not there." in text
    assert "Versions" not in text


def test_a_sweep():
    text = sample_sweep().to_markdown()
    assert "α 0.75 ★" in text
    assert row(text, "GSM8K (target)")[1:] == ["nll", "1.396", "1.054", "0.879", "0.814", "0.805"]


def test_a_comparison():
    text = sample_results({"a|b": (0.7, 0.1), "standard": (0.7, 1.0)}).to_markdown()
    assert text.startswith("# Take a\\|b: ")
    assert "| a\\|b ★ " in text
    rows = sample_results().to_markdown()
    assert row(rows, "pretrained")[1:5] == ["1.396", "21.3", "68.4 %", "42.9 %"]
    assert [row(rows, name)[1].endswith("\\*") for name in RECIPES if name != "lora"] == [
        False
    ] * 10
    assert row(rows, "lora ★")[1].endswith("\\*")
    assert row(rows, "sfa")[2].endswith("\\*")


def test_the_plot_of_a_training_signal_says_so():
    found = sample_sweep()

    def trained(report):
        divergences = (replace(d, trained_on=d.name == "context-free") for d in report.divergences)
        return replace(report, divergences=tuple(divergences))

    base, *others = found.points
    points = (base, *(replace(point, report=trained(point.report)) for point in others))
    for sweep, marked in ((found, 0), (replace(found, points=points), 1)):
        sections = {section.title: section for section in sweep.document().sections}
        section = sections["Distance from the base"]
        titles = [figure.title for figure in section.figures]
        assert sum(title.endswith("(training signal)") for title in titles) == marked
        assert ("was a training signal: it is no evidence" in section.about) == bool(marked)
    assert "Predictions on the base model's own texts, nats per token (training signal)" in titles


def test_one_sentence_per_choice_of_methods():
    def trial(name, recall):
        settings = {"recall": {"name": "auto"}, "merging": {"name": "keep"}, "penalties": []}
        resolved = {**settings, "recall": {"name": recall}}
        return replace(run(name), settings=settings, resolved=resolved)

    found = [trial(f"trial {i}", "self-replay") for i in range(9)]
    text = Results((*found, trial("other", "features"))).to_markdown()
    assert text.count("resolved to") == 2
    assert "trial 0, trial 1, trial 2 and 6 others were resolved to self-replay." in text
    assert "other was resolved to features." in text


def test_default_learning_rates_are_named():
    found = sample_results()
    assert "learning rate" not in found.to_markdown()
    plan = {**found.plan, "rates": {"standard": 5e-4, "flow": 5e-4, "lora": 3e-3}}
    said = "Default learning rates for this model: 0.0005 (standard and flow) and 0.003 (lora)."
    assert said in replace(found, plan=plan).to_markdown()


def change_table(found, title):
    tables = [table for section in found.document().sections for table in section.tables]
    return next(table for table in tables if table.title == title)


def test_the_papers_tables():
    table = change_table(sample_results(), "Change from standard")
    assert table.rows[0][1:] == ("0 (0)", "0 % (0 %)", "0 (0)", "0 (0)")
    two = simple({"standard": ([1.0, 1.2], 20.0), "flow": ([0.9, 1.5], 10.0)})
    table = change_table(two, "Change from the pretrained model")
    assert table.rows[1][1] == "−0.800 (−1.100)"
    table = change_table(two, "Change from standard")
    assert table.rows[1][1:] == ("+0.100 (−0.100)", "−50.0 % (−50.0 %)")
    one = change_table(simple({"flow": ([1.0], 20.0)}), "Change from the pretrained model")
    assert one.rows == (("flow", "−1.000", "+100 %"),)


@pytest.mark.parametrize("recipes", [RECIPES, LONG], ids=["short", "long"])
def test_a_comparison_fits_a_terminal(recipes):
    text = printed(sample_results(recipes), 100)
    lines = [line for line in text.splitlines() if not line.startswith("Next: ")]
    assert max(map(len, lines)) <= 100
    head = next(line for line in text.splitlines() if line.startswith("recipe"))
    assert head.split()[:4] == ["recipe", "GSM8K", "WikiText-2", "PIQA"]
    assert "…" not in text or recipes is LONG


def test_of_many_columns_some_are_left_out():
    tests = {f"test {i}": ("acc", 0.5, -0.01, False) for i in range(12)}
    found = sample_results(tests=tests)
    assert "Too wide for this terminal: " in " ".join(printed(found, 100).split())
    assert "Too wide" not in printed(found, 400)


def test_colors_and_markup():
    said = printed(sample()).splitlines()
    assert said[0].startswith("Much forgotten: kept 92 %")
    assert said[-1].startswith("Next: holdfast merge HuggingFaceTB/SmolLM2-135M")  # not wrapped
    assert said[-1].endswith("-merged")
    assert "\x1b[" in printed(sample(), force_terminal=True)
    found = sample_results(failed={"mas-0-1": "RuntimeError: [red]no[/red]"})
    assert "[red]no[/red]" in printed(found)


def test_without_rich_it_is_markdown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    sample().to_terminal()
    assert capsys.readouterr().out == sample().to_markdown()


@settings(max_examples=50)
@given(reports | sweeps | every_results)
def test_names_are_text(found):
    text = found.to_markdown()
    text.encode()
    lines = [line.replace("\\\\", "").replace("\\|", "") for line in text.splitlines()]
    tables = "\n".join(line if line.startswith("|") else "" for line in lines).split("\n\n")
    for table in tables:
        assert len({line.count("|") for line in table.split("\n") if line}) <= 1
    assert not any(c in text.replace("\\<", "").replace("\\>", "") for c in "<>\x1b")
    assert "\x1b" not in printed(found)


def test_escapes():
    assert escape("a|b") == "a\\|b"
    assert escape("<b>`x`") == "\\<b\\>\\`x\\`"


def test_a_document_without_anything():
    document = Document("kind", Answer("Nothing."), "", "info", (), (Section("Empty"),))
    assert document.filled == []
    empty = Table("Nothing", (Column("a"), Column("b")), ())
    assert empty.toned == []


def test_the_time_of_runs_that_shared_a_device():
    """The note says so. If some runs shared it and others did not, no time is the best."""
    alone = sample_results(seeds=(0,))
    beside = replace(alone, runs=tuple(replace(run, at_a_time=4) for run in alone.runs))
    mixed = replace(alone, runs=(replace(alone.runs[0], at_a_time=2), *alone.runs[1:]))
    stars = []
    for found, said in (
        (alone, "Time: training and testing. "),
        (beside, "training and testing, beside up to 3 other runs on the same device, which takes"),
        (mixed, "training and testing, beside up to 1 other run on the same device"),
    ):
        text = found.to_markdown()
        assert said in " ".join(text.split())
        column = row(text, "recipe").index("time")
        cells = [row(text, run.recipe)[column] for run in found.runs[1:]]
        stars.append(sum("*" in cell for cell in cells))
    assert stars[0] == stars[1] == 1
    assert stars[2] == 0
