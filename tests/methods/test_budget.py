"""A forgetting budget holds for the model that the user gets, on texts that nobody has seen."""

import copy
import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import LoopSettings, LoRA, Recipe, Reference, Run, SelfReplay, WiseFT, train_loop
from holdfast.data import pad_collate
from holdfast.methods._budget import BudgetController, Estimate, estimate, keep_within
from holdfast.scoring.pool import draw_pool
from holdfast.scoring.starts import default_starts
from loops import tune
from small import make_llama

LENGTH, BUDGET = 12, 0.01


def base(dtype=torch.float64, **options):
    return make_llama(**({"vocab": 40, "scale": 0.2} | options)).to(dtype)


def samples(n=32):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 40, (5 + i % 4,), generator=generator).tolist() for i in range(n)]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows]


def replay(budget=BUDGET, **settings):
    return SelfReplay(budget=budget, **({"length": LENGTH, "top": 40, "share": 1.0} | settings))


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory):
    """The texts of a model are drawn once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make_run(recipe, model=None, **options):
    options = {"lr": 0.02, "progress": False, "collate": pad_collate} | options
    recipe = recipe if isinstance(recipe, Recipe) else Recipe(recall=recipe)
    return Run(recipe, model or base(), samples(), **options)


def train(run, updates=12, **options):
    settings = LoopSettings(max_updates=updates, log_every=1)
    train_loop(run, batch_size=8, settings=settings, **options)
    return run


def everything(term):
    return torch.arange(len(term.held_out))


@torch.no_grad()
def on_fresh_texts(model, original=None, texts=768):
    """KL(base ‖ model) per token over the whole vocabulary, and by the drawn tokens alone."""
    original = original or base()
    pool = draw_pool(
        original, texts, starts=default_starts(original), length=LENGTH, top=None, seed=99,
        progress=False,
    )  # fmt: skip
    batch = pool.batch(range(texts), "cpu")
    text, at = batch.where.nonzero(as_tuple=True)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    p, q = (net.eval()(**inputs).logits.log_softmax(-1)[text, at] for net in (original, model))
    drawn = (p - q).gather(1, batch.input_ids[text, at + 1][:, None])
    return (p.exp() * (p - q)).sum(1).mean().item(), drawn.mean().item()


@pytest.mark.parametrize("budget", [0.002, 0.01])
def test_the_model_is_within_it_on_fresh_texts(budget):
    log = []
    run = train(make_run(replay(budget)), log=log.append)
    before = run.recall.measure(run.model, everything(run.recall)).value
    kl, ratio = on_fresh_texts(run.finish())
    assert before > budget  # so it binds
    assert 0.7 * budget <= kl <= 1.05 * budget
    # The log-ratio of one token has about the variance 2·KL; here are over 7,000 tokens.
    assert ratio == pytest.approx(kl, abs=4 * math.sqrt(2 * kl / 7000))
    assert {"strength", "lr_factor", "held_out_kl", "kl"} <= log[-1].keys()
    assert log[-1]["lr_factor"] < 1 < log[-1]["strength"]
    assert 0 < run.recall.alpha < 1


def test_a_merge_shrinks_only_once():
    """Merge first: what WiSE-FT leaves may use the whole budget."""
    within = {}
    for name, merging in {"alone": {}, "merged": {"merging": WiseFT(0.95)}}.items():
        run = train(make_run(Recipe(recall=replay(), **merging)))
        run.finish()
        within[name] = run.recall.measure(run.model, everything(run.recall)).value
        assert run.recall.alpha < 1
    assert within["merged"] == pytest.approx(within["alone"], rel=0.03)


def test_a_merged_model_within_the_budget_stays():
    run = train(make_run(Recipe(recall=replay(0.05), merging=WiseFT(0.01))))
    tuned = copy.deepcopy(run.model)
    kept = run.finish()
    assert run.recall.alpha == 1
    expected = WiseFT(0.01).merge(tuned, run.anchors)
    assert all(map(torch.equal, kept.parameters(), expected.parameters()))


def test_a_budget_that_is_not_needed_changes_nothing():
    options = {"lr": 0.01, "batch_size": 8, "max_updates": 5, "collate": pad_collate}
    one, other = (
        tune(base(), Recipe(recall=replay(budget)), samples(24), **options)
        for budget in (None, 1e6)
    )
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_lora_returns_by_its_b():
    run = train(make_run(Recipe(trainable=LoRA(r=4), recall=replay()), base(torch.float32)))
    a = [p.detach().clone() for n, p in run.model.named_parameters() if ".lora_A." in n]
    kept = run.finish()
    assert run.recall.alpha < 1
    after = [p for n, p in kept.named_parameters() if ".lora_A." in n]
    assert all(map(torch.equal, a, after))
    kl, _ = on_fresh_texts(kept, base(torch.float32))
    assert 0.7 * BUDGET <= kl <= 1.05 * BUDGET


def adapted(**options):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], **options)
    return peft.get_peft_model(base(torch.float32), config)


def test_adapters_of_ones_own_return_to_the_model_without_them():
    run = train(make_run(replay(), adapted(), lr=0.3), 8)
    kept = run.finish()
    assert run.recall.alpha < 1
    kl, _ = on_fresh_texts(kept, base(torch.float32))
    assert 0.7 * BUDGET <= kl <= 1.05 * BUDGET


class TestRefused:
    def test_adapters_that_have_learned_before(self):
        with pytest.raises(ValueError, match=r"do not start there: merge them"):
            make_run(replay(), adapted(init_lora_weights=False))

    def test_dora(self):
        with pytest.raises(ValueError, match=r"SelfReplay scales B .* use dora=False"):
            Recipe(trainable=LoRA(dora=True), recall=replay())
        Recipe(trainable=LoRA(dora=True), recall=replay(None))

    def test_parts_that_cannot_return(self):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
        model = peft.get_peft_model(base(torch.float32), config)
        with pytest.raises(ValueError, match=r"norm.* have none: freeze them"):
            make_run(replay(), model)

    def test_the_weights_of_another_model(self):
        with pytest.raises(ValueError, match="does not start there"):
            make_run(replay(), reference=Reference.of(base(seed=1)))


def test_a_search_measures_models_within_the_budget(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="the cli extra is not installed")
    from comparison.small_plan import make_plan
    from holdfast.comparison import search, worker

    budget, terms, found = 1e-5, [], []
    inner, prepare = worker.Worker.measure, SelfReplay.prepare

    def prepared(self, run):
        terms.append(prepare(self, run))
        return terms[-1]

    def measure(self, name, model, recipe):
        found.append(sum(terms[-1].measure(model, everything(terms[-1]))))
        return inner(self, name, model, recipe)

    monkeypatch.setattr(SelfReplay, "prepare", prepared)
    monkeypatch.setattr(worker.Worker, "measure", measure)
    recipe, file = Recipe(recall=replay(budget, top=8), merging=WiseFT()), tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    plan = make_plan(tmp_path, recipes=(str(file),), seeds=(0,), updates=2)
    tuning = search.Tuning(str(file), trials=1, alphas=(1.0,))
    search.Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "a").run()
    assert len(found) == 4  # two values of α, on two halves
    assert 0.7 * budget <= max(found) <= budget


class TestKeepWithin:
    @staticmethod
    def distance_from(start):
        """Quadratic in α, without an error."""
        return lambda m: Estimate(float((m.weight.detach() - start).square().sum()), 0.0)

    def moved(self, by=1.0):
        model = torch.nn.Linear(2, 2)
        reference, start = Reference.of(model), model.weight.detach().clone()
        with torch.no_grad():
            model.weight.add_(by)
        return model, reference, start

    def test_it_needs_few_measurements(self):
        model, reference, start = self.moved()
        calls, measure = [], self.distance_from(start)

        def counted(m):
            calls.append(measure(m))
            return calls[-1]

        alpha, found = keep_within(0.04, model, reference, counted)
        assert len(calls) == 2
        assert 0.98 * 0.04 <= found <= 0.04
        assert alpha == pytest.approx(math.sqrt(found / 4))

    def test_it_leaves_room_for_the_error(self):
        model, reference, start = self.moved()
        measure = self.distance_from(start)
        _, found = keep_within(0.04, model, reference, lambda m: Estimate(measure(m)[0], 0.01))
        assert found == pytest.approx(0.03, rel=0.03)

    def test_nan_goes_back(self):
        model, reference, start = self.moved(math.nan)
        with pytest.warns(UserWarning, match="nothing is left of the training"):
            alpha, _ = keep_within(
                0.1, model, reference,
                lambda m: estimate((m.weight.detach() - start).flatten(), torch.ones(4)),
            )  # fmt: skip
        assert alpha == 0
        assert torch.equal(model.weight, start)

    def test_what_cannot_be_kept_is_said(self):
        model = torch.nn.Linear(2, 2)
        with pytest.warns(UserWarning, match=r"cannot be kept: .* measured as 40 even"):
            found = keep_within(0.1, model, Reference.of(model), lambda _: Estimate(40.0, 0.0))
        assert found == (0.0, 40.0)


def test_the_error_is_that_of_a_ratio():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 20, (1000, 64), generator=generator).double()
    sums = counts * (1 + torch.rand(counts.shape, generator=generator, dtype=torch.float64))
    found = [estimate(*rows) for rows in zip(sums, counts, strict=True)]
    values = torch.tensor([row.value for row in found])
    assert values.mean() == pytest.approx(1.5, rel=0.01)
    assert sum(row.error for row in found) / 1000 == pytest.approx(values.std().item(), rel=0.1)


@pytest.mark.parametrize("texts", [3, 16, 40])
def test_few_texts_have_an_error_too(texts):
    run = train(make_run(replay()), 2)
    assert run.recall.measure(run.model, torch.arange(texts), 8).error > 0


def test_nan_is_not_within_it():
    model = base()
    run = make_run(replay(0.1), model)
    model.lm_head.weight.data.fill_(math.nan)
    assert run.recall.measure(model, torch.arange(4)) == (math.inf, math.inf)


def test_a_divergence_measured_as_zero_ends_the_search():
    """Rounding may make a small divergence 0 or less."""
    model, base = nn.Linear(2, 2), nn.Linear(2, 2)
    found = iter([Estimate(1.0, 0.1)])
    alpha, kl = keep_within(
        0.5, model, Reference.of(base), lambda _: next(found, Estimate(-0.1, 0.1))
    )
    assert 0 < alpha < 1
    assert kl <= 0


def test_schedules_do_not_see_the_factor():
    run = make_run(replay(1e-6), lr=0.01)
    optimizer = run.make_optimizer(10)
    run.recall.controller.u = 1.0
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    before = next(run.model.parameters()).detach().clone()
    optimizer.step()
    moved = (next(run.model.parameters()) - before).abs().max().item()
    assert moved == pytest.approx(0.01 / math.e, rel=1e-4)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_the_strength_never_falls_below_its_default():
    controller = BudgetController(0.1)
    for kl in (0.01, 1.0, 5.0, math.inf, 0.0, 0.0, 0.0, -0.1):
        controller.observe(kl, 0.5)
        assert controller.strength_factor >= 1 >= controller.lr_factor > 0
