"""The probes against lm-evaluation-harness, which runs the same tasks from local files."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.evaluate.probes import Completions, MultipleChoice, Text
from holdfast.io.encoding import Continuation, windows
from holdfast.io.models import Loader
from holdfast.report.words import change_of
from holdfast.scoring import likelihood
from holdfast.scoring.kl import next_token_log_probs
from holdfast.scoring.likelihood import log_likelihoods
from small import make_llama, make_tokenizer, noisy

TOKENIZER = make_tokenizer()
CHOICES = [
    {"goal": "the cat sat on", "choices": ["the mat", "two plus three is five"], "label": 0},
    {"goal": "two plus three is", "choices": ["five", "four", "a dog"], "label": 0},
    {"goal": "the dog ran on", "choices": ["a log", "the log and the mat ."], "label": 1},
    {"goal": "a dog and a cat", "choices": ["ran", "is the question"], "label": 0},
] * 5
ANSWERS = [
    {"question": "two plus two is", "answer": "four"},
    {"question": "the cat sat", "answer": "on the mat ."},
    {"question": "the dog", "answer": "ran and sat on a log"},
]
TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 20)


def opened(model, limit=64):
    return Loader(max_length=limit, tokenizer=TOKENIZER).open(model)


def run(probe, model, limit=64):
    with opened(model, limit) as loaded:
        return probe.run(loaded, progress=False)


def literal_nll(model, context, target):
    """One token after the other, in float64."""
    ids, total = list(context), 0.0
    with torch.inference_mode():
        for token in target:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            total -= float(logits.double().log_softmax(-1)[token])
            ids.append(token)
    return total


@pytest.mark.parametrize(
    "requests", [[Continuation([], [3])], [Continuation([2], [3, 4]), Continuation([], [5])]]
)
def test_a_target_with_nothing_before_it_is_refused(requests):
    with opened(make_llama()) as loaded, pytest.raises(ValueError, match="has no context"):
        log_likelihoods(loaded, requests, "a test")


def test_a_likelihood_is_the_product_over_the_tokens():
    model = make_llama()
    requests = [
        Continuation([2, 8, 9], [10, 11]),
        Continuation([2], [7, 8, 9, 10]),
        Continuation([5], [6]),
    ]
    with opened(model) as loaded:
        found = log_likelihoods(loaded, requests)
    for one, request in zip(found, requests, strict=True):
        assert one.nll == pytest.approx(literal_nll(model, *request), rel=1e-5)
        assert one.tokens == len(request.target)


def test_greedy_is_what_the_model_would_write():
    model = make_llama()
    written = model.generate(
        torch.tensor([[2, 8]]), attention_mask=torch.ones(1, 2, dtype=torch.long),
        do_sample=False, max_new_tokens=3,
    )[0, 2:].tolist()  # fmt: skip
    other = [*written[:-1], (written[-1] + 1) % 30]
    with opened(model) as loaded:
        found = log_likelihoods(
            loaded, [Continuation([2, 8], written), Continuation([2, 8], other)]
        )
    assert [f.greedy for f in found] == [True, False]


class TestBatches:
    """Whatever runs together, the figures are those of one request at a time."""

    REQUESTS = tuple(
        Continuation([2, *range(5, 5 + n)], list(range(8, 9 + n % 4))) for n in range(20)
    )  # fmt: skip

    def check(self, model):
        with opened(model) as loaded:
            found = log_likelihoods(loaded, self.REQUESTS)
            alone = [log_likelihoods(loaded, [request])[0] for request in self.REQUESTS]
        assert [f.greedy for f in found] == [a.greedy for a in alone]
        for mine, other in zip(found, alone, strict=True):
            assert mine.losses == pytest.approx(other.losses, rel=1e-5)
        first = [literal_nll(model, *request) for request in self.REQUESTS[:3]]
        assert [f.nll for f in found[:3]] == pytest.approx(first, rel=1e-5)

    @pytest.mark.parametrize("tokens", [1, 50, 10_000])
    def test_of_any_size(self, monkeypatch, tokens):
        monkeypatch.setattr(likelihood, "_TOKENS_ON_A_CPU", tokens)
        self.check(make_llama())

    @pytest.mark.parametrize("logits", [1, 30 * 50])
    def test_a_model_whose_logits_are_more_than_its_heads(self, monkeypatch, logits):
        monkeypatch.setattr(likelihood, "_LOGITS", logits)
        model = make_llama()
        sizes = []
        model.model.register_forward_hook(lambda _, args, out: sizes.append(out[0].shape))
        model.get_output_embeddings = lambda: torch.nn.Linear(16, 30)
        self.check(model)
        assert max(rows * length for rows, length, _ in sizes) <= max(logits // 30, 23)

    def test_losses_that_are_known_keep_their_places(self):
        with opened(make_llama()) as loaded:
            found = log_likelihoods(loaded, self.REQUESTS)
            known = [[*request.context, *request.target] for request in self.REQUESTS[3::4]]
            for _ in next_token_log_probs(loaded, known, keep=True):
                pass
            assert len(loaded.losses) == 5
            again = log_likelihoods(loaded, self.REQUESTS)
            assert log_likelihoods(loaded, self.REQUESTS[3::4]) == again[3::4]
            assert log_likelihoods(loaded, []) == []
        assert [f.greedy for f in found] == [a.greedy for a in again]
        for one, other in zip(found, again, strict=True):
            assert one.losses == pytest.approx(other.losses, rel=1e-5)

    def test_memory_that_runs_out(self):
        model, tried = make_llama(), []

        def tight(_, args, inputs):
            tried.append(inputs["input_ids"].numel())
            if tried[-1] > 60:
                raise torch.OutOfMemoryError("no room")

        model.model.register_forward_pre_hook(tight, with_kwargs=True)
        self.check(model)
        assert 0 < sum(size > 60 for size in tried) < 6  # it learns what fits
        model.model.register_forward_pre_hook(out_of_memory)
        with opened(model) as loaded, pytest.raises(torch.OutOfMemoryError):
            log_likelihoods(loaded, self.REQUESTS)

    def test_the_letters_of_a_question_are_run_once(self):
        model = make_llama()
        rows = []
        with opened(model) as loaded:
            requests = [
                Continuation([2, 8, 9 + i], [letter]) for i in range(3) for letter in (7, 8, 9)
            ]
            alone = [log_likelihoods(loaded, [request])[0] for request in requests]
            model.model.register_forward_hook(lambda _, args, out: rows.append(len(out[0])))
            found = log_likelihoods(loaded, requests)
        assert rows[-1] == 3
        assert [f.nll for f in found] == pytest.approx([a.nll for a in alone], rel=1e-5)


def out_of_memory(*_):
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(("length", "limit"), [(1, 5), (5, 5), (11, 5), (12, 5), (40, 64)])
def test_windows_predict_every_token_once(length, limit):
    ids = list(range(100, 100 + length))
    found = windows(ids, start=0, limit=limit)
    assert [token for window in found for token in window.target] == ids
    for window in found:
        inputs = [*window.context, *window.target][:-1]
        assert len(inputs) <= limit
        assert window.context
        assert len(inputs) == min(limit, length)


def test_contexts_that_are_too_long_lose_their_begin():
    model = make_llama(limit=8)
    long = Continuation([2, *[8] * 20], [9, 10])
    with opened(model, 1000) as loaded:
        assert loaded.limit == 8
        found = log_likelihoods(loaded, [long])[0]
    assert found.nll == pytest.approx(literal_nll(model, [8] * 7, [9, 10]), rel=1e-4)


def test_text():
    model = make_llama()
    before, after = run(Text("t", TEXT), model), run(Text("t", TEXT), noisy(model))
    (score,) = Text("t", TEXT).scores(before, after)
    ids = TOKENIZER(TEXT)["input_ids"]
    assert sum(before.counts) == len(ids)
    assert score.before.value == pytest.approx(math.exp(sum(before.values) / len(ids)))
    (nll,) = Text("t", TEXT, metric="nll").scores(before, after)
    assert math.exp(nll.before.value) == pytest.approx(score.before.value)
    with pytest.raises(ValueError, match="empty"):
        Text("t", "  \n")


def test_rows_that_do_not_fit_are_told_by_number():
    model = make_llama()
    with pytest.raises(ValueError, match="row 1 needs one of the columns prompt, question"):
        run(Completions("d", [ANSWERS[0], {"x": 1}]), model)
    with pytest.raises(ValueError, match="row 0 has 2 choices, so its label must be a whole"):
        run(MultipleChoice("d", [{**CHOICES[0], "label": 2}]), model)
    with pytest.raises(ValueError, match=r"template .* does not fit row 0"):
        run(MultipleChoice("d", CHOICES, template="{nothing}"), model)
    with pytest.raises(ValueError, match="no rows"):
        run(MultipleChoice("d", []), model)


def predicting_nan(model=None):
    """A model of finite weights whose logits are NaN, and whose likeliest token would be 0."""
    model = make_llama() if model is None else model
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(3e38)
    return model


@pytest.mark.parametrize(
    "probe",
    [
        Text("t", TEXT),
        Completions("a", ANSWERS),
        MultipleChoice("c", CHOICES),
        MultipleChoice("c", CHOICES, by_length=True),
    ],
    ids=["text", "completions", "choice", "choice by length"],
)
def test_a_model_that_predicts_nan_has_no_score(probe):
    base, tuned = make_llama(), predicting_nan()
    for score in probe.scores(run(probe, base), run(probe, tuned)):
        assert math.isfinite(score.before.value)
        assert not math.isfinite(score.after.value)
        assert not math.isfinite(score.change.value)
    for score in probe.scores(run(probe, tuned), run(probe, tuned)):
        assert change_of(score).outcome == "not finite"


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """lm-evaluation-harness on three local tasks."""
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    rows = {"choice": CHOICES, "completion": ANSWERS, "rolling": [{"text": TEXT}]}
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    common = "dataset_path: json\ntest_split: test\n"
    yamls = {
        "choice": """output_type: multiple_choice
doc_to_text: "{{goal}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
        "completion": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
        "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity}
""",
    }
    for name, text in yamls.items():
        files = f"dataset_kwargs:\n  data_files:\n    test: {folder / name}.jsonl\n"
        (folder / f"{name}.yaml").write_text(f"task: our_{name}\n{common}{files}{text}")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_harness_gives_the_same_figures(harness, monkeypatch, tmp_path):
    from holdfast.evaluate.harness import Harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    base = make_llama()
    tuned = noisy(base, 0.3)
    task = Harness(["our_choice", "our_completion", "our_rolling"], include_path=harness)
    both = [run(task, model) for model in (base, tuned)]
    theirs = {(s.name, s.metric): s for s in task.scores(*both)}

    def ours(probe):
        return probe.scores(run(probe, base), run(probe, tuned))

    (choice,) = ours(MultipleChoice("c", CHOICES))
    (by_length,) = ours(MultipleChoice("c", CHOICES, by_length=True))
    for mine, name in ((choice, "acc"), (by_length, "acc_norm")):
        other = theirs["our_choice", name]
        assert (mine.before, mine.after, mine.change) == (other.before, other.after, other.change)
        assert not other.lower_is_better
    assert 0 < choice.before.value < 1
    nll, match = ours(Completions("a", ANSWERS))
    other = theirs["our_completion", "acc"]
    assert (match.before, match.after) == (other.before, other.after)
    other = theirs["our_completion", "perplexity"]
    assert other.lower_is_better
    assert other.before.low is None  # no mean of samples: the harness says none
    first = run(Completions("a", ANSWERS), base)[0]
    assert other.before.value == pytest.approx(math.exp(sum(first.values) / len(ANSWERS)))
    for limit in (64, 30):  # in one window and in several
        rolling = run(task, base, limit)["results"]["our_rolling"]["byte_perplexity,none"]
        total = sum(run(Text("t", TEXT), base, limit).values)
        assert rolling == pytest.approx(math.exp(total / len(TEXT)), rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_the_harness_has_no_figures_of_a_model_that_predicts_nan(harness, monkeypatch, tmp_path):
    from holdfast.evaluate.harness import Harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    task = Harness(["our_choice", "our_completion", "our_rolling"], include_path=harness)
    base = make_llama()
    found = task.scores(run(task, base), run(task, predicting_nan()))
    assert len(found) == 5
    assert all(math.isfinite(s.before.value) and math.isnan(s.after.value) for s in found)
    assert not base._forward_hooks


@pytest.mark.soak  # indexes all tasks of the harness, as a test of comparison does too
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task(harness):
    from holdfast.evaluate.harness import Harness

    with pytest.raises(ValueError, match="no task 'our_choise'; did you mean 'our_choice'"):
        run(Harness(["our_choise"], include_path=harness), make_llama())
