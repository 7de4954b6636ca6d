import copy

import pytest
import torch
from torch import nn

from holdfast._torch.adapters import adapters_off
from holdfast.anneal import Constant
from holdfast.methods._adapting import linear_layers
from holdfast.methods.lora import LoRA
from holdfast.methods.wise_ft import WiseFT
from holdfast.optim import RecAdam
from methods.stand_ins import ResNet, bert, free, gpt2, images, llama, make_run, same, state

peft = pytest.importorskip("peft", reason="the peft extra is not installed")
transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

IDS = torch.arange(20).view(4, 5)


def logits(model, inputs=IDS):
    with torch.no_grad():
        out = model(inputs)
    return out if isinstance(out, torch.Tensor) else out.logits


def tuned(model):
    """As after training: no adapter is at its start."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))
    return model


def adapted(model):
    """The layers with adapters, by the model's own names."""
    found = {n.split(".lora_B.")[0] for n, _ in model.named_parameters() if ".lora_B." in n}
    return {name.removeprefix("base_model.model.") for name in found}


def groups(named):
    """A has no anchor, on purpose."""
    pulled = [(n, p) for n, p in named if "lora_B" in n]
    rest = [(n, p) for n, p in named if "lora_B" not in n]
    return [{"params": pulled}, {"params": rest, "anchored": False}]


def linear(model):
    kinds = (nn.Linear,)
    return {n for n, m in model.named_modules() if isinstance(m, kinds) or "Conv1D" in str(type(m))}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_causal_language_models(make):
    model = make()
    expected = linear(model) - {"lm_head"}
    before = logits(model.eval())
    weights = {name: p.clone() for name, p in model.named_parameters()}
    new = LoRA(r=4).prepare(make_run(model, task="causal_lm"))
    assert adapted(new) == expected
    assert all("lora_" in name for name in free(new))
    assert torch.equal(logits(new.eval()), before)  # B = 0
    assert isinstance(new, peft.PeftModelForCausalLM)
    tuned(new)
    assert not torch.allclose(logits(new), before)
    flags = free(new)
    with adapters_off(new) as base:
        assert torch.equal(logits(base), before)
    assert free(new) == flags
    assert not torch.allclose(logits(new), before)
    assert LoRA(r=4).finish(new) is new
    merged = new.merge_and_unload()
    assert weights.keys() == dict(merged.named_parameters()).keys()


def test_sequence_classification_with_a_new_head():
    model = bert()
    expected = linear(model) - {"classifier"}
    head = model.classifier.weight.clone()
    new = LoRA().prepare(make_run(model, new=("classifier",)))
    assert adapted(new) == expected
    full = {name for name in free(new) if "lora_" not in name}
    stem = "base_model.model.classifier.modules_to_save.default"
    assert full == {f"{stem}.weight", f"{stem}.bias"}
    assert torch.equal(new.get_submodule(stem).weight, head)
    assert adapted(LoRA().prepare(make_run(bert()))) == expected | {"classifier"}


def test_plain_modules_with_names_that_end_alike():
    """PEFT takes "0" for the end of "1.0" too."""
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 4), body, nn.Linear(4, 4), nn.Linear(4, 2))
    new = LoRA(r=2).prepare(make_run(model, new=("1",)))
    assert adapted(new) == {"0", "2", "3"}
    full = {name for name in free(new) if "lora_" not in name}
    assert full == {f"base_model.model.1.modules_to_save.default.0.{k}" for k in ("weight", "bias")}
    new(torch.randn(3, 4)).sum().backward()

    model = nn.ModuleDict({"pre_head": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="PEFT cannot distinguish 'head' from pre_head"):
        LoRA().prepare(make_run(model, new=("head",)))


def test_settings_reach_peft(tmp_path):
    new = LoRA(r=4, target=("q_proj", "v_proj"), rslora=True, dropout=0.1).prepare(
        make_run(llama())
    )
    config = new.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (
        4,
        8,
        True,
        0.1,
    )
    assert {name.rpartition(".")[2] for name in adapted(new)} == {"q_proj", "v_proj"}
    new = LoRA(alpha=3.0, target=r".*layers\.0.*up_proj").prepare(make_run(llama()))
    assert adapted(new) == {"model.layers.0.mlp.up_proj"}
    assert new.peft_config["default"].lora_alpha == 3
    new.save_pretrained(tmp_path, save_embedding_layers=False)
    assert (tmp_path / "adapter_config.json").is_file()


def test_adapters_go_to_a_file_and_come_back(tmp_path):
    torch.manual_seed(1)
    model = bert()
    base = copy.deepcopy(model)
    new = tuned(LoRA(r=2).prepare(make_run(model, new=("classifier",)))).eval()
    new.save_pretrained(tmp_path, save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(new), logits(again))


def test_the_seed_is_the_runs():
    torch.manual_seed(0)
    model = llama()
    others = [copy.deepcopy(model) for _ in range(2)]
    now = torch.get_rng_state()
    one = LoRA().prepare(make_run(model, seed=1))
    assert torch.equal(torch.get_rng_state(), now)
    torch.rand(3)
    assert same(state(one), state(LoRA().prepare(make_run(others[0], seed=1))))
    assert not same(state(one), state(LoRA().prepare(make_run(others[1], seed=2))))


class TestAnchors:
    def test_they_are_zeros_without_memory(self):
        run = make_run(llama(), task="causal_lm")
        run.model = LoRA().prepare(run)
        anchors = LoRA().anchors(run)
        trained = free(run.model)
        assert set(anchors) == {name for name in trained if "lora_B" in name}
        for name, anchor in anchors.items():
            assert anchor.shape == run.model.get_parameter(name).shape
            assert anchor.untyped_storage().nbytes() == anchor.element_size()
            assert not anchor.any()
        assert anchors.distance(run.model).total == 0
        run.recipe.needs_reference = False
        assert LoRA().anchors(run) is None

    def test_dora_norms_stay_at_their_first_values(self):
        run = make_run(llama(), task="causal_lm")
        method = LoRA(dora=True)
        run.model = method.prepare(run)
        anchors = method.anchors(run)
        norms = {name: t for name, t in anchors.items() if "magnitude" in name}
        assert norms.keys() == {name for name in free(run.model) if "magnitude" in name}
        values = {name: t.clone() for name, t in norms.items()}
        tuned(run.model)
        assert same(values, norms)

    def test_the_pull_acts_on_b_and_leaves_a_alone(self):
        run = make_run(llama(), task="causal_lm")
        run.model = tuned(LoRA(r=2).prepare(run))
        anchors = LoRA().anchors(run)
        named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        before = {n: p.detach().clone() for n, p in named}
        optimizer = RecAdam(groups(named), anchors=anchors, lr=0.1, gamma=5.0, anneal=Constant(0.0))
        for _, p in named:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for name, p in named:
            expected = before[name] * 0.5 if "lora_B" in name else before[name]
            assert torch.allclose(p, expected), name


def test_statistics_of_the_base_do_not_move():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

        def forward(self, x):
            return self.head(self.body(x))

    x = torch.randn(8, 4) + 3
    model = Net()
    before = logits(model.eval(), x)
    method = LoRA(r=2)
    new = method.prepare(make_run(model, new=("head",)))
    new.train()(x).sum().backward()
    assert new.base_model.model.body[1].num_batches_tracked == 0
    assert new.base_model.model.head.modules_to_save["default"][0].num_batches_tracked == 1
    with adapters_off(new.eval()) as base:
        assert torch.equal(logits(base, x).cpu(), before)
    method.finish(new)
    new.train()(x)
    assert new.base_model.model.body[1].num_batches_tracked == 1


def test_adapters_off_inside_wrappers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    before = logits(model, x)
    new = tuned(LoRA(r=2).prepare(make_run(model)))
    wrapped = nn.DataParallel(new)
    with adapters_off(wrapped) as base:
        assert base is wrapped
        assert torch.equal(logits(base, x).cpu(), before)
    assert not torch.equal(logits(wrapped, x).cpu(), before)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(new):
        raise RuntimeError("inside")
    assert not torch.equal(logits(new, x), before)
    with pytest.raises(ValueError, match="Linear has no adapters"), adapters_off(nn.Linear(2, 2)):
        pass


def test_bad_input():
    with pytest.raises(ValueError, match="r must be at least 1"):
        LoRA(r=0)
    with pytest.raises(TypeError, match="r must be a whole number"):
        LoRA(r=1.5)
    with pytest.raises(ValueError, match="alpha must be a finite number > 0"):
        LoRA(alpha=0)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\]"):
        LoRA(dropout=2)
    with pytest.raises(ValueError, match="target must be"):
        LoRA(target=())
    assert LoRA(target=["q_proj"]) == LoRA(target=("q_proj",))
    with pytest.raises(ValueError, match="already has adapters"):
        LoRA().prepare(make_run(LoRA().prepare(make_run(llama()))))
    with pytest.raises(ValueError, match="new='header' must be a module"):
        LoRA().prepare(make_run(llama(), new=("header",)))
    with pytest.raises(ValueError, match="ResNet has no linear layer"):
        LoRA().prepare(make_run(ResNet(), new=("fc",)))
    with pytest.raises(ValueError, match="got embeddings"):
        LoRA(target=("embed_tokens",)).prepare(make_run(llama()))


def test_peft_is_asked_for(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install \"holdfast\[peft\]\""):
        LoRA().prepare(make_run(nn.Sequential(nn.Linear(2, 2))))


def test_convolutional_nets_adapt_their_linear_layers():
    new = LoRA(r=2).prepare(make_run(ResNet()))
    assert adapted(new) == {"fc"}
    new(images()[0]).sum().backward()


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_stays_as_it_is(bits, tmp_path):
    """QLoRA: the base is never unpacked, and it is all that is needed for θ*."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is needed for a quantised base")
    import transformers

    llama().save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu"
    ).train()
    before = logits(model)  # not eval(): for that bitsandbytes packs anew on some CPUs
    packed = {name: p.detach().clone() for name, p in model.named_parameters()}
    kinds = {p.dtype for p in packed.values()}
    assert kinds == {torch.uint8 if bits == 4 else torch.int8, torch.float32}

    run = make_run(model, task="causal_lm")
    run.model = LoRA(r=4).prepare(run)
    anchors = LoRA().anchors(run)
    assert adapted(run.model) == {n.removesuffix(".weight") for n in packed if "_proj" in n}
    named = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
    optimizer = RecAdam(groups(named), anchors=anchors, lr=1e-2, gamma=1.0, anneal=Constant(0.5))
    losses = []
    for _ in range(6):
        loss = run.model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    with adapters_off(run.model) as base:
        assert torch.equal(logits(base), before)
    assert not torch.equal(logits(run.model), before)
    b = {n: p.detach().clone() for n, p in named if "lora_B" in n}
    WiseFT(alpha=0.25).merge(run.model, None)
    for name, p in run.model.named_parameters():
        if name in b:
            assert torch.allclose(p, 0.25 * b[name])
    WiseFT(alpha=0.0).merge(run.model, None)
    assert torch.equal(logits(run.model), before)
    for name, p in run.model.get_base_model().named_parameters():
        if (plain := name.replace(".base_layer", "")) in packed:
            assert p.dtype == packed[plain].dtype
            assert torch.equal(p, packed[plain]), name


def test_a_mamba_layer_gets_an_adapter_that_its_fused_kernels_do_not_miss():
    config = transformers.MambaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    model = transformers.MambaForCausalLM(config)
    assert linear_layers(model) == ["backbone.layers.0.mixer.in_proj"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (llama, {"gate_proj", "up_proj", "down_proj"}),
        (gpt2, {"c_fc", "c_proj"}),
        (bert, {"intermediate.dense", "output.dense"}),
    ],
)
def test_only_the_feed_forward_layers(make, words):
    names = adapted(LoRA(target="mlp").prepare(make_run(make())))
    assert len(names) == 2 * len(words)  # of two layers
    assert not any("att" in name for name in names)
    assert all(any(name.endswith(word) for word in words) for name in names)


def test_a_model_without_feed_forward_layers():
    with pytest.raises(ValueError, match="has no feed-forward layers"):
        LoRA(target="mlp").prepare(make_run(nn.Sequential(nn.Flatten(), ResNet().fc)))
