"""A result as a section of a model card: the rest stays, and the hub reads the scores."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("huggingface_hub", reason="the hf extra is not installed")

from huggingface_hub import ModelCard

from holdfast.cli import main
from holdfast.evaluate.gate import Limits, check
from holdfast.evaluate.report import Estimate, ForgettingReport, Score
from report.reports import HOSTILE, reports
from report.sample_report import sample
from report.sample_results import sample_results

BEGIN, END = "<!-- holdfast: forgetting -->", "<!-- /holdfast: forgetting -->"


@pytest.fixture
def card(tmp_path):
    return tmp_path / "README.md"


def saved(card, text, report=None):
    card.write_bytes(text.encode())
    (report or sample()).save(card, section="forgetting")
    return card.read_bytes().decode()


def section(text):
    return re.search(rf"{BEGIN}.*?{END}\n", text.replace("\r\n", "\n"), re.DOTALL)[0]


def test_a_missing_card_is_created(card):
    sample().save(card, section="forgetting")
    text = card.read_text()
    section = "<!-- holdfast: forgetting -->\n## Forgetting\n\n### Much forgotten"
    assert f"---\n# smollm2-gsm8k\n\n{section}" in text
    assert "Next:" not in text  # a card is for those who use the model
    found = ModelCard(text).data.eval_results
    assert [one.dataset_name for one in found][:2] == ["GSM8K", "WikiText-2"]  # the target first
    first = found[0]
    assert (first.task_type, first.metric_type, first.metric_value) == (
        "text-generation", "nll", 0.805,
    )  # fmt: skip
    assert first.metric_name == "nll (1.396 before fine-tuning, n = 1,319)"


@pytest.mark.parametrize("tuned", [".", "..", "below/..", "org/mine"])
def test_the_name_of_the_model(card, tmp_path, monkeypatch, tuned):
    (tmp_path / "mine" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "mine")
    dataclasses.replace(sample(), tuned=tuned).save(card, section="forgetting")
    assert ModelCard.load(card).data.model_name == "mine"
    assert "\n# mine\n" in card.read_text()


def test_again_changes_nothing(card):
    sample().save(card, section="forgetting")
    before, time = card.read_bytes(), card.stat().st_mtime_ns
    sample().save(card, section="forgetting")
    assert (card.read_bytes(), card.stat().st_mtime_ns) == (before, time)


FRONT = """---
# keep me
license: mit   # of the weights
model-index:
- name: mine
  results:
  - task: {type: text-generation}
    dataset: {type: gsm8k, name: GSM8K}
    metrics:
    - {type: accuracy, value: 0.5, verified: true, mine: 3}
tags: [a,   'b']
pipeline_tag: question-answering
---
"""


def test_the_rest_stays_byte_for_byte(card):
    body = f"# Mine\n\n{BEGIN}\nstale\n{END}\n\n## Use\n\n```\n## Forgetting\n```\nno end"
    text = saved(card, FRONT + body)
    assert text.startswith(
        "---\n# keep me\nlicense: mit   # of the weights\ntags: [a,   'b']\n"
        "pipeline_tag: question-answering\nmodel-index:\n- name: "
    )
    assert "\n---\n# Mine\n\n" in text
    assert text.endswith(body.partition("stale\n" + END)[2])
    assert "stale" not in section(text)
    found = ModelCard(text).data
    assert [found.license, found.model_name] == ["mit", "mine"]
    assert "mine: 3" in text  # which the hub's classes do not know
    assert {one.task_type for one in found.eval_results} == {
        "text-generation",
        "question-answering",
    }
    again = saved(card, text, ForgettingReport("base", "tuned"))  # without any test
    assert [one.dataset_name for one in ModelCard(again).data.eval_results] == ["GSM8K"]


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        (
            f"# A\n\n{BEGIN}\n## Forgetting ##\nstale\n### stale\n{END}\n\n\n## Next\n",
            "# A\n\n",
            "\n\n\n## Next\n",
        ),
        (
            "# A\n\n## Forgetting\n\nwritten by hand\n\n## Next\n",
            "# A\n\n## Forgetting\n\nwritten by hand\n\n## Next\n\n",
            "\n",
        ),
        ("# A\ntext", "# A\ntext\n\n", "\n"),
        ("# A\n\n", "# A\n\n", "\n"),
        ("```\n# forgetting\n~~~\n```\n", "```\n# forgetting\n~~~\n```\n\n", "\n"),
    ],
    ids=["between the marks", "a heading of others", "no newline", "blank end", "in code"],
)
def test_where_the_section_goes(card, body, before, after):
    text = saved(card, body)
    text = text[text.index("---\n", 4) + 4 :]
    assert text.startswith(before + BEGIN)
    assert text.endswith(END + after)
    assert "stale" not in text
    assert f"{BEGIN}\n## Forgetting\n\n### Much forgotten" in text


def test_windows_line_breaks_and_a_byte_order_mark(card):
    text = saved(card, "\ufeff" + (FRONT + "# Mine\n").replace("\n", "\r\n"))
    assert text.startswith("\ufeff---\r\n# keep me\r\n")
    assert "\n" not in text.replace("\r\n", "")
    assert ModelCard(text.removeprefix("\ufeff")).data.license == "mit"


@pytest.mark.parametrize(
    "front",
    [
        "{license: mit, model-index: []}\n",
        "model-index:\n# none yet\n- {name: mine, results: []}\nlicense: mit\n",
        "license: mit\n'model-index': []\n",
        "license: mit\nmodel-index:\n\n",
    ],
)
def test_metadata_that_cannot_be_edited_line_by_line(card, front):
    text = saved(card, f"---\n{front}---\n# Mine\n")
    assert text.count("model-index") == 1
    found = ModelCard(text).data
    assert found.license == "mit"
    assert len(found.eval_results) == 5


def test_empty_metadata(card):
    text = saved(card, "---\n---\n# Mine\n")
    assert text.count("---\n") == 2
    assert len(ModelCard(text).data.eval_results) == 5


def test_the_base_is_named_if_it_is_of_the_hub(card, monkeypatch, tmp_path):
    from holdfast.report import card as module

    monkeypatch.setattr(module, "is_cached_model", lambda name: name.startswith("HuggingFaceTB/"))
    assert ModelCard(saved(card, "")).data.base_model == "HuggingFaceTB/SmolLM2-135M"
    known = "---\nbase_model: other/base\n---\n"
    assert ModelCard(saved(card, known)).data.base_model == "other/base"


def test_a_local_base_is_not_of_the_hub(card):
    assert ModelCard(saved(card, "")).data.base_model is None  # it was never downloaded here


def test_other_results_have_a_section_too(card):
    gate = check(sample(), Limits(max_drift=0.001))
    assert "### Failed: 1 of 1 figures" in saved(card, "", gate)
    assert len(ModelCard(card.read_text()).data.eval_results) == 5
    text = saved(card, "", sample_results())
    assert not text.startswith("---")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("---\na: [\n---\n", "the metadata of .*README.md is not valid YAML"),
        ("---\n- a\n---\n", "the metadata of .*README.md must be names and values"),
        ("---\nmodel-index: 3\n---\n", "model-index that is not a list of models"),
        (f"{BEGIN}\n", "must occur once, in this order"),
        (f"{END}\n{BEGIN}\n", "must occur once, in this order"),
        (f"{BEGIN}\n{END}\n```\n{BEGIN}\n```\n", "must occur once, in this order"),
    ],
)
def test_a_card_that_cannot_be_updated_is_left_alone(card, text, words):
    with pytest.raises(ValueError, match=words):
        saved(card, text)
    assert card.read_text() == text


def test_only_markdown_and_plain_files(card, tmp_path):
    with pytest.raises(ValueError, match=r"a Markdown file \(.md\), got .*report.html"):
        sample().save(tmp_path / "report.html", section="forgetting")
    with pytest.raises(ValueError, match="letters, digits and spaces, got 'a --> b'"):
        sample().save(card, section="a --> b")
    card.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"README\.md is not UTF-8"):
        sample().save(card, section="forgetting")
    (tmp_path / "link.md").symlink_to(card)
    with pytest.raises(ValueError, match=r"link\.md is a symbolic link"):
        sample().save(tmp_path / "link.md", section="forgetting")


texts = st.lists(
    st.sampled_from(
        ["# A\n", "## forgetting\n", "```\n# forgetting\n```\n", "x\r\n", "\n", "\u2028"]
    )
).map("".join)


@given(reports, st.sampled_from(["", FRONT]), texts)
def test_names_cannot_act_as_markup(tmp_path_factory, report, front, text):
    """A second update finds the same section, whatever the names say."""
    card = tmp_path_factory.mktemp("card") / "README.md"
    once = saved(card, front + text, report)
    assert once.count(BEGIN) == once.count(END) == 1
    assert not re.search(r"(?<!\\)<(?!!-- /?holdfast: )", section(once))
    assert saved(card, once, report) == once


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_the_metadata(card, name):
    at = Estimate(1.0, 0.9, 1.1, 64)
    report = ForgettingReport(name, name, scores=(Score(name, name, True, at, at, at),))
    found = ModelCard(saved(card, "# Mine\n", report)).data.eval_results
    assert [one.metric_value for one in found] == [1.0]


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sample().save("report.json")
    assert main(["report", "report.json", "--model-card", "README.md"]) == 0
    assert "Model card: README.md" in capsys.readouterr().err
    assert len(ModelCard.load("README.md").data.eval_results) == 5
    for wrong, words in {"card.html": "a Markdown file", ".": "is a directory"}.items():
        assert main(["report", "report.json", "--model-card", wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_card_is_no_input(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("some text")
    words = ["measure", "base", "tuned", "--text", "README.md", "--model-card", "README.md"]
    assert main(words) == 2
    assert "--model-card README.md is an input itself" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "some text"
