"""Recipes in TRL's trainers that compute a loss of their own: the real ones, on a small Llama."""

import copy
import importlib
import types
import warnings
from dataclasses import dataclass, fields, replace
from itertools import product

import pytest
import torch

pytest.importorskip("trl", reason="the trl extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

import transformers  # noqa: E402
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from holdfast import AdamWUpdate, LoRA, Recipe, Run, SelfReplay  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer, WithRecipe  # noqa: E402
from holdfast.hosts.trl import HoldfastDPOTrainer, HoldfastGRPOTrainer  # noqa: E402
from holdfast.methods.self_replay import ReplayTerm  # noqa: E402
from holdfast.methods.sgd import SGDUpdate  # noqa: E402
from holdfast.optim import fisher_importance  # noqa: E402
from matrices import sampled  # noqa: E402
from small import make_llama, make_tokenizer  # noqa: E402

TOKENIZER = make_tokenizer()
PAIRS = [
    {"prompt": f"the {a} sat", "chosen": f" on the {b} .", "rejected": f" and {c} is four"}
    for a in ("cat", "dog")
    for b in ("mat", "log")
    for c in ("two", "three")
]
PROMPTS = [{"prompt": f"the {a} {b}"} for a in ("cat", "dog") for b in ("sat", "ran", "and", "is")]
JUDGED = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0}
    for i, row in enumerate(PAIRS)
]
TALKS = [
    {"messages": [{"role": "user", "content": row["prompt"]},
                  {"role": "assistant", "content": row["chosen"]}]}
    for row in PAIRS
]  # fmt: skip
CHAT = "{% for m in messages %}{{ m['content'] + ' </s> ' }}{% endfor %}"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    datasets.disable_progress_bars()


def make_model():
    return make_llama(vocab=len(TOKENIZER), scale=0.3)


def reward(completions, **_):
    return [float(text.count("cat")) + len(text) / 50 for text in completions]


def replay(**settings):
    return SelfReplay(**({"share": 1.0, "top": 8, "fewest": 1, "length": 16} | settings))


def build(cls, config, recipe, folder, rows, given=None, tokenizer=TOKENIZER, **options):
    settings = {
        "output_dir": str(folder), "learning_rate": 1e-2, "max_steps": 3, "seed": 3,
        "per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "optim": "adamw_torch", "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    given = {"model": make_model(), **(given or {})}
    if recipe is not None:
        given["recipe"] = recipe
    return cls(
        args=config(**(settings | options)), train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, **given,
    )  # fmt: skip


def make_dpo(recipe, folder, cls=HoldfastDPOTrainer, given=None, repeat=1, **options):
    given = {"ref_model": make_model(), **(given or {})}
    cls = DPOTrainer if recipe is None else cls
    return build(cls, DPOConfig, recipe, folder, PAIRS * repeat, given, **options)


def make_grpo(recipe, folder, cls=HoldfastGRPOTrainer, given=None, repeat=1, **options):
    given = {"reward_funcs": reward, **(given or {})}
    options = {"num_generations": 2, "max_completion_length": 8} | options
    cls = GRPOTrainer if recipe is None else cls
    return build(cls, GRPOConfig, recipe, folder, PROMPTS * repeat, given, **options)


MAKE = {"dpo": make_dpo, "grpo": make_grpo}
BOTH = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def trained(trainer):
    trainer.train()
    return dict(trainer.model.named_parameters())


def furthest(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize(
    ("host", "steps"), sampled(product(MAKE, [1, 2]), [("dpo", 1), ("grpo", 2)])
)
def test_the_neutral_recipe_is_the_trainer_to_the_bit(host, steps, tmp_path):
    options = {"gradient_accumulation_steps": steps}
    trainers = []
    for recipe in (Recipe(), None):  # one after the other: TRL sets the seed when it is built
        trainers.append(MAKE[host](recipe, tmp_path, **options))
        trainers[-1].train()
    ours, theirs = trainers
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert furthest(dict(ours.model.named_parameters()), dict(make_model().named_parameters())) > 0


@BOTH
def test_a_recall_counts_once_per_update(make, tmp_path):
    """The same updates in one and in two micro-batches, with a recall that outweighs the loss."""
    found = []
    for strength, size in ((20.0, 8), (20.0, 4), (0.0, 8)):
        recipe = Recipe(recall=replay(strength=strength), update=SGDUpdate())
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        found.append(trained(make(recipe, tmp_path, **options)))
    whole, parts, without = found
    assert furthest(whole, parts) < 1e-4 * furthest(whole, without)


@pytest.mark.parametrize(
    ("steps", "per_generation", "iterations"),
    sampled([(1, 2, 1), (1, 1, 2), (2, 2, 2), (2, 4, 1)], [(1, 1, 2), (2, 4, 1)]),
)
def test_several_updates_per_generation(steps, per_generation, iterations, tmp_path, monkeypatch):
    planned, advanced, shares, generated = [], [], [], []
    plan, beside, advance = ReplayTerm.plan, ReplayTerm.beside, Run.advance

    def on_plan(self, model, update, samples, micro_batches):
        planned.append((update, samples, micro_batches))
        plan(self, model, update, samples, micro_batches)

    def on_beside(self, model):
        shares.append(self._update)
        return beside(self, model)

    monkeypatch.setattr(ReplayTerm, "plan", on_plan)
    monkeypatch.setattr(ReplayTerm, "beside", on_beside)
    monkeypatch.setattr(Run, "advance", lambda run, n: (advanced.append(n), advance(run, n)))
    trainer = make_grpo(
        Recipe(recall=replay()), tmp_path, max_steps=4, gradient_accumulation_steps=steps,
        steps_per_generation=per_generation, num_iterations=iterations,
        given={"reward_funcs": lambda completions, **_: generated.append(1) or reward(completions)},
    )  # fmt: skip
    trainer.train()
    assert planned == [(update, 4 * steps, steps) for update in (1, 2, 3, 4)]
    assert advanced == [1, 2, 3, 4]
    assert shares == [update for update in (1, 2, 3, 4) for _ in range(steps)]
    assert len(generated) == 4 * steps // (per_generation * iterations)
    assert len(logged(trainer, "kl")) == 4


def test_generated_samples_are_counted(tmp_path):
    options = {"max_steps": -1, "num_train_epochs": 2, "num_iterations": 3}
    run = make_grpo(Recipe(), tmp_path, **options).run
    assert run.visits == 2 * len(PROMPTS) * 2 * 3
    assert run.update_size == 4


@BOTH
@pytest.mark.parametrize("lr", [None, 1e-4])
def test_the_trainers_learning_rate_is_kept(make, lr, tmp_path):
    config = DPOConfig if make is make_dpo else GRPOConfig
    default = next(f.default for f in fields(config) if f.name == "learning_rate")
    trainer = make("holdfast", tmp_path, learning_rate=lr or default)
    assert trainer.run.lr == trainer.args.learning_rate == (lr or 1e-6)
    assert not trainer.run.needs_warm_up
    if lr is None:  # the rate of a recipe is one that the user has set
        recipe = Recipe(update=AdamWUpdate(lr=5e-6))
        assert make(recipe, tmp_path, learning_rate=default).args.learning_rate == 5e-6


def test_a_loss_of_your_own_keeps_the_learning_rate(tmp_path):
    class Mine(HoldfastTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for cls, rate in ((Mine, args.learning_rate), (HoldfastTrainer, None)):
        trainer = cls(model=make_llama(), recipe="holdfast", args=replace(args))
        assert (trainer.run.lr == args.learning_rate) == (rate is not None)


def reference_of(trainer):
    rows = [{k: v for k, v in row.items() if k.endswith("_ids")} for row in trainer.train_dataset]
    batch = trainer.data_collator(rows)
    return torch.stack(trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch))


@pytest.mark.parametrize(
    "names", sampled(["lora", "lora+recadam+wise-ft"], ["lora+recadam+wise-ft"])
)
def test_the_reference_of_dpo_is_the_pretrained_model(names, tmp_path):
    expected = reference_of(make_dpo(None, tmp_path))
    adapted = make_dpo(Recipe.preset(names), tmp_path, given={"ref_model": None})
    assert adapted.ref_model is None
    assert torch.equal(reference_of(adapted), expected)
    moved = trained(adapted)
    assert torch.allclose(reference_of(adapted), expected, atol=1e-6)
    assert any(bool(p.any()) for name, p in moved.items() if "lora_B.default" in name)
    assert list(adapted.model.peft_config) == ["default"]

    options = {"given": {"ref_model": None}, "precompute_ref_log_probs": True}
    before = make_dpo(Recipe.preset(names), tmp_path, **options)
    kept = [before.train_dataset[name] for name in ("ref_chosen_logps", "ref_rejected_logps")]
    assert torch.allclose(torch.tensor(kept), expected, atol=1e-6)
    assert furthest(trained(before), moved) < 1e-5


def test_the_reference_of_trained_adapters_is_their_copy(tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)  # B is not 0
    given = {"model": peft.get_peft_model(make_model(), config), "ref_model": None}
    trainer = make_dpo("self-replay", tmp_path, given=given)
    assert list(trainer.model.peft_config) == ["default", "ref"]
    expected = reference_of(trainer)
    trainer.train()
    assert torch.equal(reference_of(trainer), expected)


def test_the_reference_is_precomputed_before_the_weights_become_random(tmp_path):
    expected = reference_of(make_dpo(None, tmp_path))
    options = {"given": {"ref_model": None}, "precompute_ref_log_probs": True}
    trainer = make_dpo("random-init+recadam", tmp_path, **options)
    kept = [trainer.train_dataset[name] for name in ("ref_chosen_logps", "ref_rejected_logps")]
    assert torch.allclose(torch.tensor(kept), expected, atol=1e-6)
    assert furthest(dict(trainer.model.named_parameters()), dict(make_model().named_parameters()))


@BOTH
def test_peft_configurations(make, tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    given = {"peft_config": config} | ({"ref_model": None} if make is make_dpo else {})
    trainer = make("l2-sp+self-replay+wise-ft", tmp_path, given=given)
    weights = trained(trainer)
    assert {n for n, p in weights.items() if p.requires_grad} == {
        n for n in weights if "lora_" in n
    }
    assert logged(trainer, "distance")[-1] > 0
    with pytest.raises(ValueError, match="two sets of adapters"):
        make(Recipe(trainable=LoRA()), tmp_path, given=given)


RESUMED = [(make, name) for make in MAKE for name in ("holdfast+recadam", "lora+l2-sp", "hft+sfa")]


@pytest.mark.parametrize(("host", "names"), sampled(RESUMED, [RESUMED[0], RESUMED[4]]))
def test_a_resumed_run_is_exact(host, names, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    if host == "dpo" and "lora" in names:
        options["given"] = {"ref_model": None}
    whole = trained(MAKE[host](names, tmp_path, **options))
    again = MAKE[host](names, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert furthest(dict(again.model.named_parameters()), whole) == 0
    other = MAKE[host](names.replace("l2-sp", "l1-sp") + "+wise-ft", tmp_path, **options)
    with pytest.raises(ValueError, match="another recipe"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@BOTH
@pytest.mark.parametrize("name", ["flow", "distill", "features", "rehearsal"])
def test_methods_that_change_the_loss_are_refused(make, name, tmp_path):
    with pytest.raises(ValueError, match=r"Trainer\.compute_loss computes another loss than that"):
        make(name, tmp_path)


def test_dpo_reads_the_chosen_completions(tmp_path):
    trainer = make_dpo("ewc", tmp_path)
    found = trainer.run.importance[trainer.run.recipe.penalties[0]]
    rows = [(row["prompt_ids"], row["chosen_ids"]) for row in trainer.train_dataset]
    samples = [{"input_ids": p + c, "labels": [-100] * len(p) + c} for p, c in rows]
    expected = fisher_importance(
        make_model(), samples, seed=3, batch_size=8, normalize=True, progress=False
    )
    assert furthest(dict(found), dict(expected)) < 1e-4
    trainer.train()
    assert logged(trainer, "penalty/EWC")[-1] > 0


class Bare(WithRecipe, DPOTrainer):
    """DPO by the mixin alone."""


@pytest.mark.parametrize("make", [make_grpo, lambda *a: make_dpo(*a, cls=Bare)], ids=MAKE)
def test_importance_needs_labels(make, tmp_path):
    with pytest.raises(ValueError, match="EWC reads samples with labels before training"):
        make("ewc", tmp_path)


@dataclass
class Settings(transformers.TrainingArguments):
    """Arguments of a trainer, as TRL's trainers have their own."""


class Own(transformers.Trainer):
    """A trainer that names its arguments."""

    def __init__(self, model, args: Settings | None = None, **options):
        super().__init__(model, args, **options)


def test_without_arguments_the_trainers_own_are_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cls = types.new_class("Mine", (WithRecipe, Own))
    assert type(cls(model=make_model(), recipe="standard").args) is Settings


def make_other(name, recipe, folder):
    """One of TRL's other trainers, with the mixin or, if the recipe is None, as it is."""
    tokenizer, options, given = TOKENIZER, {}, {}
    rows = {"kto": JUDGED, "rloo": PROMPTS, "online_dpo": PROMPTS, "gkd": TALKS}.get(name, PAIRS)
    stable = {"kto": (KTOTrainer, KTOConfig), "reward": (RewardTrainer, RewardConfig),
              "rloo": (RLOOTrainer, RLOOConfig)}  # fmt: skip
    if name in stable:
        cls, config = stable[name]
    else:
        module = importlib.import_module(f"trl.experimental.{name}")
        stem = {"online_dpo": "OnlineDPO"}.get(name, name.upper())
        cls, config = getattr(module, f"{stem}Trainer"), getattr(module, f"{stem}Config")
    if name in ("kto", "online_dpo"):
        given["ref_model"] = make_model()
    if name in ("rloo", "online_dpo"):
        given["reward_funcs"] = reward
    if name == "rloo":
        options = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0}
    if name == "online_dpo":
        options = {"max_new_tokens": 8}
    if name in ("orpo", "cpo"):
        options = {"max_length": 32}
    if name == "gkd":
        given["teacher_model"], tokenizer = make_model(), copy.deepcopy(TOKENIZER)
        tokenizer.chat_template = CHAT
    if name == "reward":
        torch.manual_seed(0)
        config_of = make_model().config.to_dict() | {"num_labels": 1}
        given["model"] = transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**config_of)
        )
    if recipe is not None:
        cls = types.new_class(f"My{cls.__name__}", (WithRecipe, cls))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, about what it will change
        return build(cls, config, recipe, folder, rows, given, tokenizer, **options)


OTHERS = ["kto", "reward", "rloo", "orpo", "cpo", "online_dpo", "gkd"]


@pytest.mark.filterwarnings("ignore")  # TRL's, about what it will change
@pytest.mark.parametrize("name", sampled(OTHERS, ["kto", "online_dpo"]))
def test_other_trainers(name, tmp_path):
    plain = trained(make_other(name, None, tmp_path))
    assert furthest(trained(make_other(name, Recipe(), tmp_path)), plain) == 0
    pulled = make_other(name, "recadam+l2-sp+wise-ft", tmp_path)
    assert furthest(trained(pulled), plain) > 0
    if name == "reward":  # texts cannot be drawn from a classifier
        with pytest.raises(ValueError, match=r"RewardTrainer\.compute_loss computes another loss"):
            make_other(name, "holdfast", tmp_path)
        return
    recalling = make_other(name, Recipe(recall=replay(strength=10.0)), tmp_path)
    recalling.train()
    theirs = name == "kto"  # it logs a kl of its own
    assert logged(recalling, "holdfast/kl" if theirs else "kl")[-1] > 0
    for method in ("flow", "distill"):
        with pytest.raises(ValueError, match="computes another loss than that of samples"):
            make_other(name, method, tmp_path)
