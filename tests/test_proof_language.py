"""The scripts of the proof: its measures, its targets, and programs that models wrote."""

import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PROOF = Path(__file__).parents[1] / "benchmarks" / "proof"


pytestmark = pytest.mark.usefixtures("proof_scripts")


def run_of(plan, choose, report, wikitext, piqa, seed=0):
    point = {"choose_nll": choose, "report_nll": report, "report_nll_se": 0.01}
    point |= {"wikitext_nll": wikitext, "piqa": piqa, "samples": {}}
    if plan == "pretrained":
        return {"plan": plan, "points": {"base": point}}
    return {"plan": plan, "seed": seed, "points": {"tuned": point}}


@pytest.fixture
def setting():
    measures = importlib.import_module("_measures")
    return measures, measures.Setting(
        [
            run_of("pretrained", 2.0, 2.0, 3.0, 0.7),
            # The rows to choose on prefer x1, those to report on x2.
            run_of("plain-x1", 1.0, 1.0, 3.3, 0.65),
            run_of("plain-x2", 1.1, 0.9, 4.0, 0.6),
            run_of("holdfast", 1.0, 1.01, 3.0, 0.698),
            run_of("holdfast", 1.0, 1.0, 3.03, 0.71, seed=1),
            run_of("holdfast", 1.0, 0.99, 3.01, 0.7, seed=2),
        ]
    )


def test_measures_of_a_setting(setting):
    measures, runs = setting
    assert runs.best_plain == "plain-x1"
    ours, plain = runs.point("holdfast"), runs.point("plain-x1")
    assert (plain.target, ours.target, ours.seeds) == (100, pytest.approx(100), 3)
    assert ours.kept == pytest.approx({"wikitext_nll": 100 * 3 / 3.01, "piqa": 100})
    # Of each seed the mean, in which 105 % of PIQA count as 100 %; then their median.
    means = [(100 + 99) / 2, (100 * 3 / 3.03 + 100) / 2, (100 * 3 / 3.01 + 100) / 2]
    assert ours.mean_kept == pytest.approx(sorted(means)[1])
    assert plain.kept == pytest.approx({"wikitext_nll": 100 * 3 / 3.3, "piqa": 75})
    assert measures.reached(ours, 99) == "strictly"
    assert measures.reached(plain, 99) == "no"
    assert measures.reached(ours._replace(kept={"piqa": 98.0}), 99) == "yes"


def test_further_seeds_look_at_seed_0_and_at_merged_models(setting):
    """They do not change while the further runs come in."""
    models = importlib.import_module("language_models")
    runs = {
        run["plan"]: run
        for run in (
            run_of("pretrained", 2.0, 2.0, 3.0, 0.7),
            run_of("plain-x1", 1.0, 1.0, 3.3, 0.65),
            run_of("plain-x2", 1.1, 0.9, 4.0, 0.6),
            run_of("plain-x4", 1.5, 1.5, 5.0, 0.55),
            run_of("holdfast", 1.0, 1.01, 3.0, 0.698),
        )
    }
    merged = {"choose_nll": 0.9, "report_nll": 1.2, "wikitext_nll": 3.0, "piqa": 0.7}
    runs["plain-x4"]["points"]["wise-ft-0.5"] = merged
    wanted = {
        "plain-x1": (0, 1, 2, 3, 4), "plain-x2": (0,), "plain-x4": (0, 1, 2),
        "holdfast": (0, 1, 2, 3, 4),
    }  # fmt: skip
    assert models.further_seeds(runs, "smollm2") == wanted
    later = runs | {"more": run_of("plain-x1", 1.9, 1.9, 4.0, 0.6, seed=1)}
    assert models.further_seeds(later, "smollm2") == wanted


def test_a_setting_that_is_not_in_the_protocol_is_refused(monkeypatch, capsys):
    models = importlib.import_module("language_models")
    given = ["", "--name", "qwen-1.5b", "--target", "boolq", "--runs", ".", "--collect", "x.json"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        models.main()
    said = capsys.readouterr().err
    assert "qwen-1.5b does not learn boolq: choose one of smollm2 gsm8k, smollm2 mbpp" in said


def test_the_ablations_have_the_learning_rate_of_holdfast():
    models, language = map(importlib.import_module, ("language_models", "language"))
    size = language.TrainingSize(models.GSM8K, 1)
    assert language.default_lr(language.PARAMETERS, size=size) == models.RATES["smollm2"]


def test_solutions_are_rewritten_again_for_another_number_of_samples(tmp_path, monkeypatch):
    models = importlib.import_module("language_models")
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(6)]
    (tmp_path / "lm").mkdir()
    with gzip.open(tmp_path / "lm" / "gsm8k-train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    def rewrite(model, tokenizer, given):
        return [{**row, "answer": "One more.\n" + row["answer"]} for row in given[:2]] + given[2:]

    monkeypatch.setattr(models, "rewrite", rewrite)
    monkeypatch.setattr(models, "load", lambda path, device: None)
    monkeypatch.setattr(models.Proof, "tokenizer", None)
    for samples, count in ((4, 4), (None, 6)):
        args = SimpleNamespace(
            model=None, data=tmp_path, runs=tmp_path, collect=tmp_path, name="smollm2",
            target="gsm8k", samples=samples, limit=2,
        )  # fmt: skip
        bench = models.Proof(args)
        assert len(bench.rewritten) == count
        assert bench.share_rewritten == 2 / count


def test_a_setting_whose_first_stage_has_just_begun_is_collected(tmp_path, monkeypatch):
    models, out = importlib.import_module("language_models"), tmp_path / "found.json"
    given = ["", "--target", "mbpp", "--runs", str(tmp_path / "runs"), "--collect", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr("torch.set_float32_matmul_precision", lambda precision: None)
    (tmp_path / "runs").mkdir()
    for run in (run_of("holdfast", 1.0, 1.01, 3.0, 0.698), run_of("pretrained", 2, 2, 3, 0.7)):
        name = run["plan"] + ("-s0" if "seed" in run else "")
        record = run | {"run": name, "made": {"device": "GPU"}}
        (tmp_path / "runs" / f"{name}.json").write_text(json.dumps(record))
        models.main()  # first without the pretrained model
    found = json.loads(out.read_text())
    assert [run["run"] for run in found["runs"]] == ["pretrained", "holdfast-s0"]
    assert len(found["missing"]) == len(models.plans("smollm2", "mbpp")) - 1


def test_dominance_and_equal_target(setting):
    measures, runs = setting
    ours = runs.point("holdfast")
    assert measures.dominates(ours._replace(target=ours.target + 1), ours)
    assert not measures.dominates(ours, ours)
    assert not measures.dominates(ours._replace(target=200.0, mean_kept=0.0), ours)
    plain = [runs.point("plain-x1"), runs.point("plain-x2")]
    halfway = measures.at_target(plain, 105)  # x1 is at 100, x2 at 110
    assert halfway == pytest.approx((plain[0].mean_kept + plain[1].mean_kept) / 2)
    assert measures.at_target(plain, 111) != measures.at_target(plain, 111)  # not a number
    assert measures.at_target(plain, 90) == plain[0].mean_kept
    worse = [point._replace(mean_kept=point.mean_kept - 9) for point in plain]
    for same in ([*plain, *worse], [*worse, *plain]):  # of equal targets, the best counts
        assert measures.at_target(same, 105) == halfway
        assert measures.at_target(same, 100) == plain[0].mean_kept
    dominated = plain[1]._replace(target=105, mean_kept=plain[1].mean_kept - 1)
    assert measures.at_target([*plain, dominated], 105) == halfway  # no user would choose it


def test_written_programs_pass_fail_and_run_out_of_time(tmp_path):
    programs = [
        "def f(x): return x + 1\nassert f(1) == 2",
        "assert False",
        "def broken(:",
        "while True: pass",
        f"open({str(tmp_path / 'file')!r}, 'wb', 0).write(b'x')",
        "import sys; sys.exit(0)",  # not a test that passed
    ]
    code = f"import json, sys; sys.path.append({str(PROOF)!r}); import _execute as e; "
    code += "e.SECONDS = 1; print(json.dumps(e.run_all(json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=json.dumps(programs), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, False, False, False, False, False]


class Words:
    """A tokenizer with a token per character."""

    eos_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(letter) for letter in text]}


def test_the_parts_of_a_target_share_no_row(tmp_path):
    rows = [
        {"instruction": f"Is {n} even?", "answer": str(n % 2 == 0).lower()} for n in range(3270)
    ]
    with gzip.open(tmp_path / "boolq-test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    target = importlib.import_module("_targets").make_target("boolq", Words(), tmp_path)
    contexts = [[*map(chr, request.context)] for request in (*target.choose, *target.report)]
    train = [sample["input_ids"] for sample in target.train]
    asked = {"".join(context) for context in contexts}
    seen = {"".join(map(chr, ids)).partition("true")[0].partition("false")[0] for ids in train}
    assert (len(train), len(target.choose), len(target.report)) == (2270, 500, 500)
    assert len(asked) == 1000
    assert {chr(*request.target) for request in target.report} == {"t", "f"}
    assert not asked & seen
    assert len(seen) == 2270
    assert target.right(["true"] * 1000).count(True) + target.right(["False."] * 1000).count(
        True
    ) == len(target.questions)


@pytest.fixture
def writer(tmp_path):
    """A model as the scripts load it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from small import make_llama

    make_llama(scale=0.5, num_key_value_heads=1, limit=128).save_pretrained(tmp_path)
    return importlib.import_module("_lm_tests").load(tmp_path, torch.device("cpu"))


PROMPTS = [[2, 5, 7, 9], [2, 8], [2, *range(4, 24)], [2, 11, 12]]


def test_what_is_written_is_what_transformers_generates(writer):
    import torch

    found = importlib.import_module("_lm_write").write(writer, PROMPTS, 3, most=30)
    with torch.no_grad():
        for prompt, answer in zip(PROMPTS, found, strict=True):
            ids = torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            made = writer.generate(ids, max_new_tokens=30, **options)[0, len(prompt) :].tolist()
            assert answer == (made[: made.index(3)] if 3 in made else made)
    assert len({len(answer) for answer in found}) > 1  # some end


def test_answers_are_written_up_to_the_end_that_was_trained(writer):
    import torch

    exam, training = importlib.import_module("_exam"), importlib.import_module("additivity_lm")
    asked = importlib.import_module("_targets").Target(
        1, [], [], [], PROMPTS, lambda texts: [bool(text) for text in texts], most=30
    )

    class Chats:
        """A tokenizer of a GGUF file, which names the beginning of a turn as its end."""

        eos_token_id = 1

        def __call__(self, text, **_):
            return {"input_ids": [3] if text == training.END else [9]}

        def batch_decode(self, answers, **_):
            return [str(answer) for answer in answers]

    sitting = exam.Exam(asked, [], Chats(), torch.device("cpu"))
    sitting.pool.answered = lambda model: ([], [])
    with torch.no_grad():
        found = sitting.take(writer)
        answers = importlib.import_module("_lm_write").write(writer, PROMPTS, 3, most=30)
    assert found["samples"]["texts"] == [str(answer) for answer in answers]
    assert found["written_ended"] == sum(len(answer) < 30 for answer in answers) / 4 > 0
    (sample,) = training.answers(Chats(), [{"question": "?", "answer": "!"}])
    assert len(sample["labels"]) == 2
    with pytest.raises(ValueError, match="must be one token of the tokenizer, but it is 0"):
        training.end_of_answer(lambda *_, **__: {"input_ids": []})


def test_the_committed_results_have_all_planned_merges():
    models, missing = importlib.import_module("language_models"), set()
    for name in models.RATES:
        for file in sorted((PROOF / "results").glob(f"{name}_*.json")):
            target = file.stem.removeprefix(f"{name}_")
            runs = {(r["plan"], r.get("seed", 0)): r for r in json.loads(file.read_text())["runs"]}
            if target == "mbpp":  # which was run first, with other merges, or is saturated
                continue
            merged = models.MERGED[name.split("-")[0]]
            missing |= {
                (file.stem, *run)
                for run in runs
                if run[0] in merged and run[1] in models.MERGED_SEEDS
                if len(runs[run]["points"]) == 1
            }
    assert not missing
