"""Adapters of every kind that PEFT has: which facts hold, and what follows from them."""

import copy
import re

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", reason="the peft extra is not installed")
pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import Adapter, Distill, RecAdamUpdate, Recipe, Run, WiseFT, adapters_off  # noqa: E402
from holdfast._torch.adapter_probe import adapter_layers, facts_of  # noqa: E402
from holdfast._torch.adapters import adapters_are_new, adapters_are_removable  # noqa: E402
from holdfast._torch.fingerprint import base_fingerprint  # noqa: E402
from holdfast.evaluate.watch import effective_distance  # noqa: E402
from holdfast.io.checkpoint import open_weights  # noqa: E402
from holdfast.methods.adapter import plain_config  # noqa: E402
from holdfast.reference import Reference  # noqa: E402
from loops import tune  # noqa: E402
from matrices import sampled  # noqa: E402
from methods.stand_ins import bert, gpt2, make_run  # noqa: E402
from small import make_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")

CONFIGS = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
#: Settings for the tiny model, where PEFT's defaults are too large.
SMALL = {
    "C3A": {"block_size": 4}, "FOURIERFT": {"n_frequency": 10}, "MISS": {"r": 4},
    "SHIRA": {"r": 2}, "PSOFT": {"r": 4}, "ROAD": {"group_size": 4}, "WAVEFT": {"n_frequency": 10},
    "VBLORA": {"vector_length": 4, "num_vectors": 16, "topk": 2}, "ADALORA": {"total_step": 9},
    "XLORA": {"hidden_size": 16, "adapters": {}},
}  # fmt: skip
ROWS = [[2 + (7 * i + j) % 25 for j in range(6)] for i in range(16)]
DATA = [{"input_ids": row, "labels": row} for row in ROWS]
IDS = torch.tensor(ROWS[:4])


def model(dtype=torch.float32):
    return make_llama(scale=0.2).to(dtype)


def adapter(kind, **settings):
    return Adapter({"peft_type": kind, **SMALL.get(kind, {}), **settings})


def trained(recipe, **options):
    given = {"lr": 1e-2, "max_updates": 4, "batch_size": 4, **options}
    return tune(model(), recipe, DATA, **given).eval()


def weights_of(net):
    weights = open_weights(net)
    return {name: weights.read(name).double() for name in weights}


@torch.no_grad()
def logits(net):
    return net(input_ids=IDS).logits


#: What is measured on each kind of adapter: the parameters that a pull leads to φ₀, and where
#: WiSE-FT interpolates. "refused": the adapter does not start at the pretrained model.
FACTS = {
    "LORA": ("lora_B", "in the run"), "BEFT": ("beft_bias", "in the run"),
    "BOFT": ("boft_R, boft_s", "on disk"), "C3A": ("refused", "refused"),
    "DEFT": ("deft_P, deft_R", "on disk"), "DELORA": ("delora_B", "on disk"),
    "FOURIERFT": ("refused", "refused"),
    "FROD": ("frod_lambda_l, frod_lambda_s_values", "in the run"),
    "GLORA": ("glora_A, glora_B", "in the run"), "GRALORA": ("gralora_B", "in the run"),
    "HIRA": ("hira_B", "in the run"), "HRA": ("hra_u", "on disk"), "IA3": ("ia3_l", "in the run"),
    "LILY": ("lily_B", "in the run"), "LN_TUNING": ("ln_tuning_layers", "in the run"),
    "LOHA": ("hada_w2_b", "in the run"), "LOKR": ("lokr_w1", "in the run"),
    "MISS": ("miss_block", "in the run"), "OFT": ("oft_R", "on disk"),
    "OSF": ("osf_svd_params", "on disk"), "PEANUT": ("peanut_B", "in the run"),
    "PSOFT": ("psoft_R", "on disk"), "PVERA": ("pvera_lambda_b", "in the run"),
    "RANDLORA": ("randlora_lambda", "in the run"), "ROAD": ("road_alpha, road_theta", "on disk"),
    "SHIRA": ("shira_weight", "in the run"), "SUPERTUNING": ("supertuning_values", "in the run"),
    "TINYLORA": ("tinylora_v", "in the run"), "UNILORA": ("refused", "refused"),
    "VBLORA": ("refused", "refused"), "VERA": ("vera_lambda_b", "in the run"),
    "WAVEFT": ("waveft_spectrum", "in the run"),
}  # fmt: skip


def measured(kind):
    """The facts of a kind of adapter: pull, WiSE-FT."""
    run = Run(Recipe(trainable=adapter(kind)), model(), lr=0.1, task="causal_lm", progress=False)
    before = logits(model())
    facts = [facts_of(layer) for layer in adapter_layers(run.model).values()]
    with adapters_off(run.model) as base:
        assert torch.equal(logits(base), before)
    if not all(fact.is_identity for fact in facts):
        return "refused", "refused"
    pulled = sorted({name.split(".")[0] for fact in facts for name in fact.pulled})
    linear = all(fact.is_linear for fact in facts)
    return ", ".join(pulled), "in the run" if linear else "on disk"


QUICK = ["LORA", "OFT", "IA3", "VERA", "HRA", "C3A"]


@pytest.mark.filterwarnings("ignore")  # PEFT's own, which differ by kind
@pytest.mark.parametrize("kind", sampled(FACTS, QUICK))
def test_the_facts_of_a_kind_are_what_is_measured(kind):
    assert measured(kind) == FACTS[kind]


def test_the_facts_have_every_adapter_that_can_be_trained():
    found = []
    for kind in CONFIGS:
        try:
            Adapter({"peft_type": kind.value, **SMALL.get(kind.value, {})})._configured(peft)
        except ValueError:
            continue
        found.append(kind.value)
    at_prepare = {"POLY", "SHADOW"}  # which are refused by their layers
    assert sorted(FACTS) == sorted({*found} - at_prepare)


class TestConfig:
    @pytest.mark.parametrize("kind", [kind.value for kind in CONFIGS])
    def test_it_survives_a_recipe_file(self, kind):
        cls = CONFIGS[kind]
        known = {"target_modules": ["q_proj", "v_proj"]} if hasattr(cls, "target_modules") else {}
        task = {"task_type": "CAUSAL_LM"} if kind == "CPT" else {}
        config = cls(**known, **task, **SMALL.get(kind, {}))
        recipe = Recipe(trainable=Adapter(config))
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        assert hash(recipe.trainable) == hash(Adapter(config))
        plain = recipe.trainable.config
        assert plain["peft_type"] == kind
        if not task:
            again = cls(**{name: x for name, x in plain.items() if name != "peft_type"})
            assert again.to_dict() == config.to_dict()

    def test_only_settings_that_are_not_the_defaults_are_kept(self):
        config = peft.OFTConfig(oft_block_size=16, target_modules={"v_proj", "q_proj"})
        wanted = {"peft_type": "OFT", "oft_block_size": 16, "target_modules": ["q_proj", "v_proj"]}
        assert plain_config("config", config) == wanted
        assert Adapter(config) == Adapter(wanted)
        assert plain_config("config", "ln-tuning") == {"peft_type": "LN_TUNING"}

    def test_the_presets(self):
        assert Recipe.preset("oft").trainable == Adapter("oft")
        assert Recipe(trainable=Adapter("vera")).name == "vera"
        assert Recipe(trainable=Adapter({"peft_type": "vera", "r": 8})).name == "adapter"
        assert Recipe.preset("dora+l2-sp").trainable.dora

    def test_changes_of_a_copy_do_not_reach_the_recipe(self):
        saved = Recipe.preset("oft").to_dict()
        saved["trainable"]["config"]["r"] = 3
        assert Recipe.preset("oft").trainable.config == {"peft_type": "OFT"}
        pattern = Adapter({"peft_type": "lora", "rank_pattern": {"q_proj": 2}})
        pattern._configured(peft).rank_pattern["v_proj"] = 4
        assert pattern.config["rank_pattern"] == {"q_proj": 2}

    @pytest.mark.parametrize("given", [3, None, {"r": 8}, ["oft"], {"peft_type": 4}])
    def test_what_is_no_configuration(self, given):
        with pytest.raises(TypeError, match="config must be a PEFT configuration"):
            Adapter(given)

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ("otf", "PEFT has no adapter OTF; did you mean .*'OFT'"),
            ({"peft_type": "oft", "rr": 8}, "OFT has no setting 'rr'"),
            ("prompt-tuning", "changes what the model reads, not its layers"),
            ("prefix-tuning", "changes what the model reads, not its layers"),
            ("adaption-prompt", "changes what the model reads, not its layers"),
            ("xlora", "changes what the model reads, not its layers"),
            ("trainable-tokens", "changes what the model reads, not its layers"),
            ({"peft_type": "adalora", "total_step": 9}, "changes its ranks in calls between"),
            ({"peft_type": "loha", "layers_pattern": "h"}, "PEFT refuses the LOHA configuration"),
        ],
    )
    def test_what_cannot_be_trained_is_told_before_weights_are_loaded(self, given, reason):
        assert re.search(reason, Adapter(given).unfit(nn.Linear(2, 2), False))

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ("poly", "the layers of POLY do not run with their input alone"),
            ({"peft_type": "lora", "init_lora_weights": "pissa"}, "outside of its adapters"),
            ({"peft_type": "lora", "init_lora_weights": "olora"}, "outside of its adapters"),
            ({"peft_type": "oft", "target_modules": ["embed_tokens"]}, "got embeddings"),
            ({"peft_type": "miss", "r": 999}, "PEFT cannot add MISS adapters to LlamaForCausalLM"),
            ({"peft_type": "oft", "target_modules": ["nothing"]}, "nothing"),
            (
                {"peft_type": "oft", "modules_to_save": ["norm"]},
                r"of the model itself \(.*model\.norm",
            ),
        ],
    )
    def test_what_cannot_be_trained_is_told_before_training(self, given, reason):
        with pytest.raises(ValueError, match=reason):
            Run(Recipe(trainable=Adapter(given)), model(), lr=0.1, task="causal_lm", progress=False)


@pytest.mark.parametrize("kind", ["oft", "hra", "loha", "lokr"])
def test_layers_that_a_kind_does_not_know(kind):
    with pytest.raises(ValueError, match=rf"cannot add {kind.upper()} adapters .*Conv1D"):
        Run(Recipe.preset(kind), gpt2(), lr=0.1, task="causal_lm", progress=False)


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_the_biases_of_the_model_cannot_be_trained(bias):
    """With the adapters off, they would stay tuned."""
    config = {"peft_type": "lora", "bias": bias, "target_modules": ["c_attn"]}
    recipe = Recipe(trainable=Adapter(config), recall=Distill(cache=False))
    with pytest.raises(ValueError, match=r"of the model itself \(.*c_attn.bias"):
        Run(recipe, gpt2(), lr=0.1, task="causal_lm", progress=False)


KINDS = ["oft", "ia3", "vera", "hra", "lokr"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_at_the_pretrained_model_and_can_return_to_it(kind):
    before = logits(model())
    fingerprint = base_fingerprint(model())
    run = Run(Recipe.preset(kind), model(), lr=0.1, task="causal_lm", progress=False)
    assert torch.allclose(logits(run.model.eval()), before, atol=1e-6)
    assert adapters_are_new(run.model)
    assert adapters_are_removable(run.model)
    assert base_fingerprint(run.model) == fingerprint
    tuned = trained(Recipe.preset(kind))
    assert not adapters_are_new(tuned)
    assert base_fingerprint(tuned) != fingerprint
    assert not torch.allclose(logits(tuned), before, atol=1e-4)
    with adapters_off(tuned) as base:
        assert torch.equal(logits(base), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strong_pull_leads_back(kind):
    recipe = Recipe(trainable=Adapter(kind), update=RecAdamUpdate())
    free, pulled = trained(Recipe.preset(kind)), trained(recipe, max_updates=8)
    run = Run(recipe, model(), lr=0.1, task="causal_lm", progress=False)
    assert run.anchors.distance(run.model).total == 0
    named = dict(pulled.named_parameters())
    with torch.no_grad():
        for name, value in run.anchors.items():
            named[name].copy_(value)
    # Whatever the other parameters of the adapters have become.
    assert torch.allclose(logits(pulled), logits(model()), atol=1e-5)
    assert not torch.allclose(logits(free), logits(model()), atol=1e-4)


@pytest.mark.parametrize("kind", ["ia3", "vera", "loha", "lokr"])
def test_wise_ft_interpolates_the_weights(kind):
    base, tuned = weights_of(model()), weights_of(trained(Recipe.preset(kind)))
    merged = weights_of(trained(Recipe(trainable=Adapter(kind), merging=WiseFT(0.4))))
    for name in base:
        wanted = base[name] + 0.4 * (tuned[name] - base[name])
        assert torch.allclose(merged[name], wanted, atol=1e-6), name


@pytest.mark.parametrize("kind", ["oft", "hra", {"peft_type": "lora", "use_dora": True}])
def test_wise_ft_is_refused_before_training_where_the_weights_are_not_linear(kind):
    with pytest.raises(ValueError, match=r"not linear in its parameters.*'holdfast merge'"):
        trained(Recipe(trainable=Adapter(kind), merging=WiseFT(0.4)))


@pytest.mark.filterwarnings("ignore:PEFT")
@pytest.mark.parametrize("kind", ["vera", "tinylora"])
def test_wise_ft_needs_the_values_of_the_adapters_themselves(kind):
    """Also where layers share parameters, and under the names of a wrapped model."""
    run = Run(Recipe(trainable=Adapter(kind), merging=WiseFT(0.4)), model(), lr=0.1,
              task="causal_lm", progress=False)  # fmt: skip
    pulled = {name: p for name, p in run.model.named_parameters() if name in run.anchors}
    with torch.no_grad():
        for p in pulled.values():
            p.add_(0.1)
    with pytest.raises(ValueError, match="the values at which it changes nothing are not known"):
        WiseFT(0.4).merge(run.model, Reference.of(model()))
    wanted = [p.lerp(run.anchors[name], 0.6) for name, p in pulled.items()]
    WiseFT(0.4).merge(torch.compile(run.model), Reference({**run.anchors}))
    for p, value in zip(pulled.values(), wanted, strict=True):
        assert torch.allclose(p, value, atol=1e-6)


def test_b_of_another_adapter_is_not_loras():
    """AdaLoRA adds B·diag(E)·A with E = 0 at the start, while B is random."""
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, init_r=4)
    new = peft.get_peft_model(model(), config)
    assert adapters_are_new(new)
    run = Run(Recipe(update=RecAdamUpdate()), new, lr=0.1, task="causal_lm", progress=False)
    assert all("lora_E" in name for name in run.anchors)


@pytest.mark.parametrize("kind", ["oft", "ia3", {"peft_type": "lora", "use_dora": True}])
def test_the_effective_distance(kind):
    tuned = trained(Recipe(trainable=Adapter(kind)))
    base, after = weights_of(model()), weights_of(tuned)
    wanted = sum(float((after[name] - base[name]).square().sum()) for name in base) ** 0.5
    found = effective_distance(tuned, Reference.of(model()))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_what_does_not_start_at_the_pretrained_model():
    trained(Recipe(trainable=adapter("C3A")), max_updates=1)
    for recipe in (
        Recipe(trainable=adapter("C3A"), update=RecAdamUpdate()),
        Recipe(trainable=adapter("C3A"), recall=Distill()),
    ):
        with pytest.raises(ValueError, match="does not start at the pretrained model, which"):
            trained(recipe)
    trained(Recipe(trainable=adapter("C3A", init_weights=True), update=RecAdamUpdate()))


def test_adapters_of_the_user_are_pulled_too_if_they_are_new():
    """A model with adapters, trained without a method of stage 1."""
    new = peft.get_peft_model(model(), peft.IA3Config(target_modules=["k_proj"]))
    recipe = Recipe(update=RecAdamUpdate())
    run = Run(recipe, new, lr=0.1, task="causal_lm", progress=False)
    assert len(run.anchors) == 2
    assert all(value.eq(1).all() for value in run.anchors.values())
    with torch.no_grad():
        for p in new.parameters():
            if p.requires_grad:
                p.add_(0.1)
    with pytest.raises(ValueError, match=r"\(IA3\) do not start at the pretrained model"):
        Run(recipe, new, lr=0.1, task="causal_lm", progress=False)


@pytest.mark.parametrize("kind", ["LORA", "LOHA", "HRA"])
def test_random_parts_of_new_adapters_are_not_the_pretrained_model(kind):
    identities = []
    for seed, moved in ((1, 0.0), (2, 0.0), (2, 0.1)):
        config = peft.get_peft_config({"peft_type": kind, "target_modules": ["q_proj"]})
        base = model()
        torch.manual_seed(seed)
        new = peft.get_peft_model(base, config)
        with torch.no_grad():
            for p in new.parameters():
                p.add_(torch.randn_like(p), alpha=moved * p.requires_grad)
        run = Run(Recipe(recall=Distill()), new, lr=0.1, task="causal_lm", progress=False)
        identities.append(run.identity()["pretrained"])
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # of norms, by PEFT
def test_new_parts_are_trained_in_full():
    run = make_run(bert(), new=("classifier",), recipe=Recipe())
    new = Adapter("ia3").prepare(run)
    full = {n for n, p in new.named_parameters() if p.requires_grad and "ia3_" not in n}
    stem = "base_model.model.classifier.modules_to_save.default"
    assert full == {f"{stem}.weight", f"{stem}.bias"}
    assert not adapters_are_removable(new)
    norms = Adapter("ln-tuning").prepare(make_run(bert(), recipe=Recipe()))
    trained = {n for n, p in norms.named_parameters() if p.requires_grad}
    assert trained
    assert all("LayerNorm" in name for name in trained)


def test_the_seed_is_the_runs():
    nets = [copy.deepcopy(model()) for _ in range(3)]
    runs = [
        make_run(net, seed=seed, recipe=Recipe()) for net, seed in zip(nets, (1, 1, 2), strict=True)
    ]
    one, two, other = (Adapter("hra").prepare(run).state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
