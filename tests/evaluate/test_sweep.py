"""WiSE-FT at several α: measured, recommended, shown."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast  # noqa: E402
from holdfast import TIES, ModelStock, WiseFT  # noqa: E402
from holdfast.evaluate.measure import measure_many  # noqa: E402
from holdfast.evaluate.probes import Text  # noqa: E402
from holdfast.evaluate.report import Estimate  # noqa: E402
from holdfast.evaluate.sweep import Sweep, sweep  # noqa: E402
from holdfast.io.merge import merge_on_disk  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from report.sample_sweep import RETAINED, TARGET, sample_sweep  # noqa: E402
from small import make_llama, make_tokenizer, noisy, save  # noqa: E402

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 20)
ROWS = [{"question": "two plus two is", "answer": "four"}, {"question": "the", "answer": "cat ."}]


@pytest.fixture
def folders(tmp_path):
    base = make_llama()
    save(base, tmp_path / "base", make_tokenizer())
    save(noisy(base), tmp_path / "tuned", make_tokenizer())
    return tmp_path


def options(**more):
    return {
        "text": {"t": TEXT},
        "target": {"rows": ROWS},
        "context_free": 4,
        "progress": False,
        **more,
    }


def test_every_point_is_what_measure_says(folders):
    base, tuned = folders / "base", folders / "tuned"
    found = sweep(base, tuned, WiseFT(), [1, 0, 0.5, 0.5], **options())
    assert [point.settings["alpha"] for point in found.points] == [0, 0.5, 1]
    first, half, last = (point.report for point in found.points)
    assert (first.drift.total.distance, first.scores[0].change.value) == (0, 0)
    assert replace(last, settings={}) == replace(
        holdfast.measure(base, tuned, **options()), settings={}
    )
    merge_on_disk(base, tuned, folders / "half", WiseFT(0.5))
    again = holdfast.measure(base, folders / "half", **options())
    assert not any("command" in point.report.settings for point in found.points)
    assert replace(half, tuned="", settings={}) == replace(again, tuned="", settings={})
    assert half.tuned == f"{tuned}, α = 0.5"
    assert half.drift.total.distance == pytest.approx(last.drift.total.distance / 2, rel=1e-5)
    assert sorted(p.name for p in folders.iterdir()) == ["base", "half", "tuned"]


def test_a_training_signal_is_named_at_every_point(folders):
    base, tuned = folders / "base", folders / "tuned"
    (tuned / "holdfast_recipe.yaml").write_text(holdfast.Recipe.preset("self-replay").to_yaml())
    found = sweep(base, tuned, WiseFT(), [0, 0.5, 1], **options(text={}))
    signals = [[d.trained_on for d in point.report.divergences] for point in found.points]
    assert signals == [[False, False], [True, False], [True, False]]  # not on the target's rows
    assert "own texts was a training signal: it is no evidence" in found.to_markdown()
    (tuned / "holdfast_recipe.yaml").write_text("recall: unheard-of")  # of a newer version
    (point,) = sweep(base, tuned, WiseFT(), [1], **options(text={})).points
    assert not any(d.trained_on for d in point.report.divergences)


@pytest.mark.parametrize(
    ("recall", "signal"),
    [
        (holdfast.SelfReplay(), True),
        (holdfast.SelfReplay(strength=0.0), False),
        (holdfast.Auto(), True),
        (holdfast.Auto(strength=0.0), False),
        (holdfast.SelfReplay(texts="mine.txt"), False),
        (holdfast.Distill(), False),
    ],
)
def test_a_recipe_can_be_named(recall, signal):
    base, recipe = make_llama(), holdfast.Recipe(recall=recall)
    report = holdfast.measure(base, noisy(base), context_free=2, recipe=recipe, progress=False)
    assert [d.trained_on for d in report.divergences] == [signal]


def test_the_base_is_tested_once_and_one_checkpoint_is_there_at_a_time(folders, monkeypatch):
    """By what the tests see: the base, then a model for each α but 0."""
    seen, run, load = [], Text.run, Loader.load

    def counted(self, loaded, *, progress):
        merged = sorted(p.name for p in folders.joinpath("out").glob(".*"))
        seen.append((loaded.model.model.embed_tokens.weight[0, 0].item(), len(merged)))
        return run(self, loaded, progress=progress)

    loaded, alive = [], []

    def watched(self, source, *more):
        gc.collect()
        assert [model for model in alive if model() is not None] == []
        model = load(self, source, *more)
        loaded.append(source)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Text, "run", counted)
    monkeypatch.setattr(Loader, "load", watched)
    base = str(folders / "base")
    sweep(base, folders / "tuned", WiseFT(), [0, 0.5, 1], out=folders / "out", **options())
    values = [value for value, _ in seen]
    assert len(set(values)) == len(values) == 3
    assert {count for _, count in seen} == {0, 1}
    assert loaded.count(base) == 2  # and once for the divergence of α = 0, which is 0
    assert list((folders / "out").iterdir()) == []


def test_merged_checkpoints_can_be_kept(folders):
    sweep(folders / "base", folders / "tuned", WiseFT(), [0, 0.3, 1], out=folders / "out",
          keep_models=True, context_free=0, progress=False)  # fmt: skip
    assert [p.name for p in (folders / "out").iterdir()] == ["alpha-0.3"]
    kept = transformers.LlamaForCausalLM.from_pretrained(folders / "out" / "alpha-0.3")
    ends = [make_llama().state_dict(), noisy(make_llama()).state_dict()]
    for name, value in kept.state_dict().items():
        assert torch.allclose(value, torch.lerp(ends[0][name], ends[1][name], 0.3), atol=1e-6)
    with pytest.raises(FileExistsError, match="not empty"):
        sweep(folders / "base", folders / "tuned", WiseFT(), [0.3], out=folders / "out",
              keep_models=True, progress=False)  # fmt: skip


def test_a_lora_adapter(folders):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    base = transformers.LlamaForCausalLM.from_pretrained(folders / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folders / "adapter")
    found = sweep(folders / "base", folders / "adapter", WiseFT(), [0, 0.5, 1], **options())
    moved = [point.report.drift.total.distance for point in found.points]
    assert moved[0] == 0
    assert moved[1] == pytest.approx(moved[2] / 2, rel=1e-4)
    kl = [point.report.divergences[0].kl.value for point in found.points]
    assert kl[0] == 0 < kl[1] < kl[2]


def test_a_model_that_fails_leaves_nothing(folders, monkeypatch):
    def broken(self, loaded, *, progress):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Text, "run", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        sweep(
            folders / "base", folders / "tuned", WiseFT(), [0.5], out=folders / "out", **options()
        )
    assert list((folders / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"values": []}, ValueError, "at least one value of alpha"),
        ({"values": [0, 1.5]}, ValueError, r"alpha must be in \[0, 1\], got 1.5"),
        ({"values": [float("nan")]}, ValueError, "alpha must be"),
        ({"keep_models": True}, ValueError, "keep_models=True needs out="),
        ({"tuned": torch.nn.Linear(1, 1)}, ValueError, "save_pretrained"),
        ({"tuned": "nowhere"}, OSError, "nowhere"),
        ({"txt": "a"}, TypeError, "did you mean 'text'"),
        ({"limit": 0}, ValueError, "limit must be at least 1"),
    ],
)
def test_bad_input_is_told_before_a_model_is_loaded(folders, monkeypatch, change, error, words):
    monkeypatch.setattr(Loader, "load", None)
    given = {
        "base": folders / "base", "tuned": folders / "tuned", "method": WiseFT(), "values": [0.5],
        "progress": False, **change,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        sweep(**given)


def test_models_are_taken_when_it_is_their_turn():
    base, made = make_llama(), []

    def models():
        for seed in (1, 2):
            made.append(seed)
            yield f"seed {seed}", noisy(base, seed=seed)

    asked = measure_many(base, models(), context_free=2, progress=False)
    assert made == []
    assert (next(asked).tuned, made) == ("seed 1", [1])
    assert [report.tuned for report in asked] == ["seed 2"]


def test_json_comes_back():
    found = sample_sweep()
    assert Sweep.from_json(found.to_json()) == found
    for text, words in [
        ("{", "not the JSON of a sweep"),
        ("[]", "not a sweep"),
        (found.points[0].report.to_json(), "the key 'points' is missing"),
        (found.to_json().replace('"schema_version": 2', '"schema_version": 9'), "update holdfast"),
        (found.to_json().replace('"alpha": 1.0', '"alpha": 0.1'), "increase"),
    ]:
        with pytest.raises(ValueError, match=words):
            Sweep.from_json(text)


def test_files(tmp_path, capsys):
    found = sample_sweep()
    for name in ("s.json", "s.md", "s.html"):
        found.save(tmp_path / name)
    assert Sweep.load(tmp_path / "s.json") == found
    assert (tmp_path / "s.md").read_text() == found.to_markdown()
    assert "<h1>Take α = 0.75" in (tmp_path / "s.html").read_text()
    found.to_terminal()
    assert "Take α = 0.75" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: this is not"):
        Sweep.load(tmp_path / "bad.json")


def changed(found, alpha, name, value, interval=None):
    """The sweep with another score at an α."""
    low, high = interval or (None, None)
    points = []
    for point in found.points:
        scores = tuple(
            replace(
                s,
                after=Estimate(value, None, None, 9),
                change=Estimate(value - s.before.value, low, high, 9),
            )
            if (point.settings["alpha"], s.name) == (alpha, name)
            else s
            for s in point.report.scores
        )
        points.append(replace(point, report=replace(point.report, scores=scores)))
    return replace(found, points=tuple(points))


def test_the_command_names_each_model_and_all_digits():
    (point,) = (p for p in sample_sweep().points if p.settings == {"alpha": 0.75})
    found = replace(sample_sweep(), models=("a, b", "c"), fixed={"seed": 1234567, "beta": 0.5})
    assert found.command(point) == ""  # WiSE-FT has no beta
    found = replace(found, method="DARE", points=(replace(point, settings={"drop": 0.25}),))
    found = replace(found, fixed={"seed": 1234567})
    (point,) = found.points
    assert found.command(point) == (
        "holdfast merge HuggingFaceTB/SmolLM2-135M 'a, b' c --method dare --seed 1234567 "
        "--drop 0.25 --out merged-drop-0.25"
    )
    assert replace(found, models=("a", "--overwrite")).command(point) == ""
    forged = replace(point, settings={"trust-remote-code": 1.0})
    assert replace(found, points=(forged,)).command(forged) == ""
    assert replace(found, models=()).command(point) == ""  # of an earlier version


def test_the_rule():
    found = sample_sweep()
    said = found.recommendation()
    assert said.settings == {"alpha": 0.75}  # 98.4 % of the best gain
    assert said.headline == (
        "Take α = 0.75: of the 2 values of α that learned at least 95 % as much as the best (the "
        "tuned model), it forgot least."
    )
    assert said.at == {0.9: "α = 0.75", 0.98: "α = 0.75", 0.99: "the tuned model"}
    assert "The tuned model learned most and forgot more (lost " in str(said)
    assert said.next == (
        "holdfast merge HuggingFaceTB/SmolLM2-135M runs/smollm2-gsm8k --method wise-ft "
        "--alpha 0.75 --out merged-alpha-0.75"
    )
    assert found.recommendation(0.99).settings == {"alpha": 1}
    saved = Sweep.from_json(replace(found, learn_at_least=0.8).to_json())
    assert saved.recommendation().settings == {"alpha": 0.5}
    far = changed(found, 0.75, "GSM8K", 0.84)
    said = far.recommendation()
    assert (said.settings, said.next) == ({"alpha": 1}, "")
    assert said.headline.startswith("Keep the tuned model: no other α learned at least 95 % as")
    alone = replace(far, points=far.points[-1:])
    assert "it is the only α, and better than" in alone.recommendation().headline
    best = changed(found, 0.25, "GSM8K", 0.7)
    assert best.recommendation().settings == {"alpha": 0.25}
    broken = changed(found, 0.75, "LAMBADA", float("nan"))
    assert broken.recommendation().settings == {"alpha": 1}  # what is broken is not the least loss
    with pytest.raises(ValueError, match="learn_at_least must be"):
        replace(found, learn_at_least=0)


def test_a_target_that_tuning_made_worse():
    worse = {**RETAINED, "GSM8K": ("acc", 0.4, -0.1, False, "target", 1, 0.001)}
    said = sample_sweep(worse).recommendation()
    assert (said.settings, said.headline[:13]) == ({"alpha": 0}, "Keep the base")
    said = sample_sweep(worse, (0.5, 1.0)).recommendation()
    assert (said.settings, said.headline[:13]) == (None, "Keep the base")


def test_of_equals_the_best_on_the_target():
    flat = {"PIQA": ("acc", 0.6, 0.02, False, "retained", 1, 0.01), **TARGET}
    said = sample_sweep(flat).recommendation()
    assert said.settings == {"alpha": 1}
    assert said.headline.endswith("it learned most of those that forgot least.")


def test_what_was_not_tested_is_said():
    said = sample_sweep(RETAINED).recommendation()
    assert said.settings is None
    assert "no target was tested" in said.headline
    assert "The tuned model: Much forgotten" in str(said)
    said = sample_sweep(TARGET).recommendation()
    assert said.settings == {"alpha": 0.75}
    assert "it stayed closest to the base" in said.headline
    assert "test tasks that the model should keep" in str(said)
    assert sample_sweep({}).recommendation().settings is None
    nan = sample_sweep(TARGET, (0.5,))
    nan = changed(nan, 0.5, "GSM8K", float("nan"))
    assert "not a finite number" in nan.recommendation().headline


def limited(found, **limits):
    return replace(found, **limits).recommendation()


def test_limits():
    """PIQA is 0.684 and loses 0.031·α²; GSM8K is best at α = 1; the divergence grows with α²."""
    found = sample_sweep()
    kept = {a: 1 - max(0.031 * a**2 / 0.684, 0.063 * a**2.6 / 0.429, 2.07 * a**2.2 / 16.49)
            for a in (0.25, 0.5, 0.75, 1)}  # fmt: skip
    for retain in (0.80, 0.95, 0.98, 0.999):
        best = max([a for a, share in kept.items() if share >= retain], default=0)
        said = limited(found, retain=retain, learn_at_least=1.0)
        assert said.settings == {"alpha": best}
        level = [a for a in kept if 1 - (1 - a) ** 3 >= 0.95 * (1 - (1 - best) ** 3)]
        assert limited(found, retain=retain).settings == {"alpha": min(level) if best else 0}
    said = limited(found, retain=0.98)
    assert said.headline == (
        "Take α = 0.25: it keeps 98 % of every retained score, and it is the only α within the "
        "limit, and better than the pretrained model."
    )
    said = limited(found, retain=0.8)
    assert "and of the 2 values of α within the limit that learned at least 95 %" in said.headline
    merged = replace(found, points=found.points[1:])
    said = limited(merged, retain=0.9999)
    assert said.settings is None
    assert said.headline == (
        "No α keeps 99.99 % of every retained score: keep the base, or try smaller changes of the "
        "weights."
    )
    assert "The nearest is α = 0.25: it keeps" in said.sentences[0]


def test_a_limit_of_the_divergence():
    found = sample_sweep(RETAINED)
    kls = [
        next(d.kl.value for d in point.report.divergences if d.name == "context-free")
        for point in found.points
    ]
    said = limited(found, max_kl=kls[2])
    assert said.settings == {"alpha": 0.5}  # without a target, the farthest from the base
    assert "farthest from the base (no target was tested)" in said.headline
    both = limited(found, max_kl=kls[2], retain=0.9999)
    assert both.settings == {"alpha": 0}  # only the base is within
    assert both.headline.startswith("No α keeps 99.99 % of every retained score and has a context")
    assert both.sentences[0].startswith("The nearest is α = 0.25")
    untested = limited(sample_sweep({}), max_kl=kls[2])
    assert not any(line.endswith(": ") for line in untested.lines)  # a label without figures
    bare = replace(sample_sweep({}), points=tuple(
        replace(p, report=replace(p.report, divergences=())) for p in found.points))  # fmt: skip
    bare = replace(bare, points=tuple(
        replace(p, report=replace(p.report, scores=())) for p in bare.points))  # fmt: skip
    assert "neither a retained score nor" in limited(bare, max_kl=1.0).headline


def test_several_models_and_settings(folders):
    save(noisy(make_llama(), seed=5), folders / "other", make_tokenizer())
    tuned = [folders / "tuned", folders / "other"]
    found = sweep(folders / "base", tuned, TIES(), {"density": [1, 0.5], "lam": [1]},
                  context_free=2, progress=False)  # fmt: skip
    assert [point.settings for point in found.points] == [
        {"density": 0.5, "lam": 1}, {"density": 1, "lam": 1},
    ]  # fmt: skip
    assert all(point.kind == "merged" for point in found.points)  # several are not one of them
    assert found.document().kind == "sweep over density and λ"
    assert found.tuned == f"{tuned[0]}, {tuned[1]}"
    one = sweep(folders / "base", tuned[0], TIES(), [1], context_free=0, progress=False)
    assert [point.kind for point in one.points] == ["tuned"]
    with pytest.raises(ValueError, match="ModelStock has no setting to sweep"):
        sweep(folders / "base", tuned, ModelStock(), [1], progress=False)
