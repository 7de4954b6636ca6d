"""The scripts of the proof: stages, seeds, samples, and what their records have."""

import doctest
import gzip
import importlib
import json
from pathlib import Path
from types import SimpleNamespace as Args

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Reference

PROOF = Path(__file__).parents[1] / "benchmarks" / "proof"


pytestmark = pytest.mark.usefixtures("proof_scripts")


def load(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["_samples", "_stages", "_measures", "_bootstrap", "image_models"])
def test_examples(name):
    assert doctest.testmod(load(name)).failed == 0


def test_samples_come_back():
    samples = load("_samples")
    bits = np.random.default_rng(0).random(37) < 0.5
    assert (samples.unpack(samples.pack(bits), 37) == bits).all()
    with pytest.raises(ValueError, match="41 samples take 6 bytes, but the text has 5"):
        samples.unpack(samples.pack(bits), 41)
    cosines = np.linspace(-1, 1, 9)
    again = samples.unpack_numbers(samples.pack_numbers(cosines))
    assert np.abs(again - cosines).max() <= 0.5e-4
    with pytest.raises(ValueError, match=r"from -3\.2767 to 3\.2767, but .* to 5: use fewer"):
        samples.pack_numbers([0.0, 5.0])


def setting(stages, made, learned, broken=()):
    """A setting whose runs take their target from a table, and note what was made."""

    def base():
        chance = {"target_choose": 0.5, "old": 0.0}
        return {"plan": "pretrained", "chance": chance, "points": {"base": {"old": 0.8}}}

    def make(plan, seed):
        made.append((plan, seed))
        if plan in broken:
            raise FloatingPointError("diverged")
        target, old = learned[plan]
        points = {"tuned": {"target_choose": target, "old": old}}
        if plan.startswith("plain"):
            points["wise-ft-0.5"] = {"target_choose": target - 0.1, "old": 0.8}
        return {"plan": plan, "family": plan.split("-")[0], "seed": seed, "points": points}

    def plan(name):
        return lambda seed: make(name, seed)

    return stages.Stages("toy", {"pretrained": base}, {name: plan(name) for name in learned})


def run(stages, toy, folder, stage="first", collect=None):
    args = Args(runs=folder, stage=stage, collect=collect, only="", seconds=60.0)
    if collect is None:
        with pytest.raises(SystemExit):
            stages.run([toy], args, {"rules": "here"})
    else:
        stages.run([toy], args, {"rules": "here"})


LEARNED = {
    "holdfast": (0.7, 0.7), "plain-1": (0.7, 0.8), "plain-2": (0.9, 0.6), "plain-3": (0.8, 0.1),
    "mofo-1": (0.6, 0.8), "mofo-2": (0.7, 0.75),
}  # fmt: skip


def test_further_seeds_follow_from_the_first_stage(tmp_path, capsys):
    stages, made = load("_stages"), []
    toy = setting(stages, made, LEARNED)
    run(stages, toy, tmp_path, "more")
    assert "toy: 7 runs of its first stage are missing" in capsys.readouterr().out
    run(stages, toy, tmp_path)
    assert made == [(plan, 0) for plan in LEARNED]
    made.clear()
    run(stages, toy, tmp_path, "more")
    seeds = {plan: [seed for name, seed in made if name == plan] for plan in LEARNED}
    # plain-2 is the best of plain. Merged, it is ahead of holdfast; so are plain-1 and mofo-2.
    assert seeds == {
        "holdfast": [1, 2, 3, 4], "plain-2": [1, 2, 3, 4], "plain-1": [1, 2], "plain-3": [],
        "mofo-1": [], "mofo-2": [1, 2],
    }  # fmt: skip
    run(stages, toy, tmp_path, collect=tmp_path / "all.json")
    found = json.loads((tmp_path / "all.json").read_text())
    assert (len(found["runs"]), found["missing"]) == (7 + 12, [])


def test_seeds_that_the_rule_does_not_ask_for_are_collected_if_they_were_run(tmp_path):
    stages, out = load("_stages"), tmp_path / "all.json"
    toy = setting(stages, [], LEARNED)
    run(stages, toy, tmp_path)
    run(stages, toy, tmp_path, "more")
    record = json.loads((tmp_path / "toy-plain-3-s0.json").read_text())
    later = record | {"run": "toy-plain-3-s1", "seed": 1}
    (tmp_path / "toy-plain-3-s1.json").write_text(json.dumps(later))
    run(stages, toy, tmp_path, collect=out)
    found = json.loads(out.read_text())
    assert [r["seed"] for r in found["runs"] if r["plan"] == "plain-3"] == [0, 1]
    assert found["missing"] == []


def test_further_seeds_are_collected_if_a_run_of_the_first_stage_is_missing(tmp_path):
    stages, out = load("_stages"), tmp_path / "all.json"
    runs = tmp_path / "runs"
    toy = setting(stages, [], LEARNED)
    run(stages, toy, runs)
    run(stages, toy, runs, "more")
    run(stages, toy, runs, collect=out)
    before = json.loads(out.read_text())
    (runs / "toy-plain-3-s0.json").unlink()
    (runs / "toy-mofo-2-s1.json").unlink()
    run(stages, toy, runs, collect=out)
    found, gone = json.loads(out.read_text()), ["toy-plain-3-s0", "toy-mofo-2-s1"]
    assert found["missing"] == gone
    assert found["runs"] == [one for one in before["runs"] if one["run"] not in gone]
    (runs / "toy-holdfast-s0.json").unlink()  # without it the rule cannot choose
    run(stages, toy, runs, collect=out)
    again = json.loads(out.read_text())
    assert again["missing"] == ["toy-holdfast-s0", "toy-plain-3-s0"]
    assert len(again["runs"]) == len(found["runs"]) - 1


def test_a_plan_that_diverged_has_no_further_seeds(tmp_path, capsys):
    stages, made = load("_stages"), []
    toy = setting(stages, made, LEARNED, broken=("plain-2",))
    run(stages, toy, tmp_path)
    made.clear()
    run(stages, toy, tmp_path, "more")
    assert {plan for plan, _ in made} == {"holdfast", "plain-3", "plain-1", "mofo-2"}
    assert [seed for plan, seed in made if plan == "plain-3"] == [1, 2, 3, 4]


def test_targets_that_nobody_reaches_choose_by_what_is_kept():
    stages = load("_stages")
    base = {
        "plan": "pretrained", "chance": {"target_choose": 0.5, "old": 0.0},
        "points": {"base": {"old": 0.8, "samples": 1}},
    }  # fmt: skip
    runs = [
        {"plan": f"plain-{old}", "family": "plain", "points": {"tuned": point}}
        for old in (0.4, 0.9)
        for point in [{"target_choose": 0.5, "old": old}]
    ]
    found = stages.choices(load("_measures").Setting([base, *runs]))
    assert [(choice.target, choice.kept) for choice in found] == [(0.0, 50.0), (0.0, 100.0)]


def stages_of(script, name):
    return load(script).Lab.stages(Args(record=print, base_record=print, probe=print), name)


def test_all_rows_of_the_protocol_are_planned():
    pytest.importorskip("transformers")
    for target in load("sentence_encoders").TARGETS:
        texts = stages_of("sentence_encoders", target)
        assert len(texts.plans) == 1 + 5 + 4 * 2 + 4 + 3
        assert {"plain-0.0002", "recadam-5e-05", "lora-0.002"} < {*texts.plans}
        assert texts.final == (1, 2, 3, 4)
    ours = [f"rate-x{times}" for times in ("0.5", "2", "4")]
    rates = ("2e-05", "5e-05", "0.0001", "0.0002", "0.0005", "0.001", "0.002")
    plain = [f"{row}-{rate}" for row in ("plain", "plain-held") for rate in rates]
    others = [f"{row}-0.0005" for row in ("l2-sp", "recadam", "flow", "mofo")]
    for model in load("image_models").MODELS:
        pictures = stages_of("image_models", model)
        assert [*pictures.plans] == ["holdfast", *plain, *others, "sgd-0.01", *ours]
        assert {*pictures.once} == {"pretrained", "probe"}
        assert pictures.final == (1, 2)


def committed_settings():
    """The file of each setting, its runs with seed 0, and the rule for further seeds."""
    pytest.importorskip("transformers")
    models, stages = load("language_models"), load("_stages")

    def by_the_rule(most):
        return lambda setting: stages.further_seeds(stages.choices(setting), most)

    def of_two(setting):
        return dict.fromkeys(("holdfast", setting.best_plain), stages.THREE)

    def one_seed(setting):
        return {}

    for model, target in models.PLANNED:
        first = {"pretrained", *(f"{plan}-s0" for plan in models.plans(model, target))}
        rule = by_the_rule(stages.FIVE) if model == "smollm2" else of_two
        if model == "qwen-1.5b" or (model, target) == models.SATURATED:
            rule = one_seed
        yield f"{model}_{target}", "", first, rule
    for target in load("sentence_encoders").TARGETS:
        first = {*stages_of("sentence_encoders", target).first()}
        yield f"minilm_{target}", f"{target}-", first, by_the_rule(stages.FIVE)
    for model in load("image_models").MODELS:
        first = {*stages_of("image_models", model).first()}
        yield f"{model}_flowers102", f"{model}-", first, by_the_rule(stages.THREE)


def unaccounted(found, prefix, first, rule):
    """Planned runs that are neither there nor named as missing, and runs that are not planned.

    More seeds of a plan than the rule asks for may be there.
    """
    there, missing = {run["run"] for run in found["runs"]}, {*found["missing"]}
    runs = [r for r in found["runs"] if r.get("seed", 0) == 0 and r["plan"] != "probe"]
    seeds = rule(load("_measures").Setting(runs))
    planned = first | {f"{prefix}{plan}-s{s}" for plan, some in seeds.items() for s in some}
    others = {name for name in there - planned if f"{name.rpartition('-s')[0]}-s0" not in first}
    return planned - there - missing, others | (missing - planned) | (missing & there)


def test_the_committed_results_have_or_name_all_planned_runs():
    for name, *planned in committed_settings():
        found = json.loads((PROOF / "results" / f"{name}.json").read_text())
        assert unaccounted(found, *planned) == (set(), set()), name
        for run in found["missing"]:
            less = found | {"missing": [one for one in found["missing"] if one != run]}
            assert unaccounted(less, *planned) == ({run}, set())
        (*_, gone) = (run["run"] for run in found["runs"] if run["plan"] == "holdfast")
        less = found | {"runs": [run for run in found["runs"] if run["run"] != gone]}
        assert unaccounted(less, *planned) == ({gone}, set())


def test_weights_of_tensorflow_js_may_cross_shards(tmp_path):
    values = np.arange(10, dtype="<f4")
    for number, part in enumerate((values[:5], values[5:])):
        (tmp_path / f"{number}.bin").write_bytes(part.tobytes())
    weights = [
        {"name": "a", "shape": [2, 2], "dtype": "float32"},
        {"name": "b", "shape": [6], "dtype": "float32"},
    ]
    manifest = {"weightsManifest": [{"paths": ["0.bin", "1.bin"], "weights": weights}]}
    (tmp_path / "model.json").write_text(json.dumps(manifest))
    found = load("_image_models").tfjs_weights(tmp_path / "model.json")
    assert found["a"].tolist() == [[0, 1], [2, 3]]
    assert found["b"].tolist() == [4, 5, 6, 7, 8, 9]
    weights[0]["quantization"] = {"dtype": "uint8"}
    (tmp_path / "model.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="a is not in float32"):
        load("_image_models").tfjs_weights(tmp_path / "model.json")


def test_a_record_of_texts_has_both_parts_and_every_sample(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from small import WORDS, make_tokenizer

    script, samples = load("sentence_encoders"), load("_samples")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    make_tokenizer(cls_token="[CLS]", sep_token="[SEP]").save_pretrained(tmp_path / "model")
    (tmp_path / "glue").mkdir()
    words = WORDS.split()
    for name, count in (("rte-train", 32), ("rte-dev", 7), ("stsb-dev", 6)):
        with gzip.open(tmp_path / "glue" / f"{name}.jsonl.gz", "wt") as file:
            for i in range(count):
                pair = {"sentence1": words[i % 9], "sentence2": f"{words[i % 7]} {words[i % 5]}"}
                file.write(json.dumps(pair | {"label": int(i % 3 == 0)}) + "\n")
    args = Args(model=tmp_path / "model", data=tmp_path, choose=False, updates=2, limit=None)
    toy = script.Lab(args).stages("rte")
    base = toy.once["pretrained"]()
    assert base["rows"] == {"choose": 4, "report": 3, "stsb": 6}
    assert samples.unpack(base["labels"]["target_report"], 3).tolist() == [False, True, False]
    rates = {}
    for plan in ("plain-0.0002", "flow-0.0001", "lora-0.002", "holdfast", "rate-x0.5"):
        run = toy.plans[plan](0)
        rates[plan] = run["lr"]
        tuned, *merged = run["points"].values()
        right = samples.unpack(tuned["samples"]["target_report"], 3)
        assert tuned["target_report"] == pytest.approx(right.mean(), abs=1e-6)
        assert len(samples.unpack_numbers(tuned["samples"]["stsb"])) == 6
        assert len(merged) == (3 if plan.startswith("plain") else 0)
        assert not any("samples" in point for point in merged)
        assert run["distance"] > 0  # also of adapters, which are merged
    assert rates["rate-x0.5"] == rates["holdfast"] / 2


class Small(nn.Module):
    """An image model with BatchNorm."""

    def __init__(self, classes=1000):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 16, 16), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def test_a_record_of_images_has_both_parts_and_every_sample(monkeypatch, tmp_path):
    script, vision, images = load("image_models"), load("vision"), load("_images")
    samples = load("_samples")
    pretrained = load("_image_models").Pretrained(Small(), "head", (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setattr(vision, "load", lambda name, path: pretrained)
    monkeypatch.setattr(vision, "CLASSES", 3)
    args = Args(
        weights=None, efficientnet=None, resnet=None, epochs=2, cudnn_benchmark=False, runs=tmp_path
    )
    lab = script.Lab(args)
    generator = torch.Generator().manual_seed(0)
    lab.images = {
        name: images.Images(
            torch.randint(256, (count, 224, 224, 3), generator=generator, dtype=torch.uint8),
            torch.arange(count) % 3,
        )
        for name, count in (("train", 9), ("test", 7), ("imagenet", 6))
    }
    toy = lab.stages("mobilenet-v2")
    base, plain = toy.once["pretrained"](), toy.plans["plain-held-0.001"](0)
    assert base["rows"] == {"choose": 4, "report": 3, "imagenet": 6}
    assert set(base["points"]["base"]) == {"imagenet", "samples"}
    assert list(plain["points"]) == ["tuned", *(f"wise-ft-{a:g}" for a in script.ALPHAS)]
    tuned, *merged = plain["points"].values()
    right = samples.unpack(tuned["samples"]["target_report"], 3)
    assert tuned["target_report"] == pytest.approx(right.mean(), abs=1e-6)
    assert len(samples.unpack(tuned["samples"]["imagenet"], 6)) == 6
    assert not any("samples" in point for point in merged)
    ours = toy.plans["holdfast"](0)
    assert list(ours["points"]) == ["tuned"]
    assert ours["settings"]["recall"]["name"] == "features"
    assert ours["settings"]["merging"] == {"name": "wise-ft", "alpha": 0.7} | {
        "statistics": "interpolate"
    }
    twice = toy.plans["rate-x2"](0)
    assert twice["lr"] == 2 * ours["lr"]
    assert twice["settings"] == ours["settings"]
    assert stages_accept(base, [plain, ours, twice])
    # Nothing has changed the model that all runs start from.
    start = lab.start("mobilenet-v2")
    assert start.theta.distance(start.model).total == 0
    assert isinstance(start.theta, Reference)


def stages_accept(base, runs):
    found = load("_stages").choices(load("_measures").Setting([base, *runs]))
    return {choice.row for choice in found} == {"plain-held", "plain-held+wise-ft", "holdfast"}
