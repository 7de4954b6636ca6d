import pytest
from torch import nn

from holdfast._torch.layers import block_of, head_of, head_parts, layer_of, output_layer, within
from methods.stand_ins import ResNet, bert, gpt2, llama


def layers(model):
    """Layer → the names of its modules, shortened."""
    found = {}
    for name, layer in layer_of(model).items():
        found.setdefault(layer, []).append(name)
    return found


def test_layers_of_transformers():
    found = layers(bert(3))
    assert len(found) == 5
    assert all(n.startswith("bert.embeddings") for n in found[0])
    assert all(n.startswith("bert.encoder.layer.1.") for n in found[2])
    assert {n.rpartition(".")[0] for n in found[4]} == {"bert.pooler.dense", "classifier"}
    assert layers(llama(2))[3] == ["model.norm.weight", "lm_head.weight"]
    assert layers(gpt2(2))[3] == ["transformer.ln_f.weight", "transformer.ln_f.bias"]  # tied


def test_layers_of_convolutional_nets():
    found = layers(ResNet())
    assert found[0] == ["conv1.weight", "conv1.bias"]
    assert found[5] == ["fc.weight", "fc.bias"]
    assert {n.split(".conv")[0] for n in found[3] if "conv" in n} == {"layer2.0"}


def test_a_container_of_one_is_no_numbering():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    assert block_of(model)["0.0.weight"] == "0.0"
    assert set(block_of(nn.Linear(2, 2)).values()) == {None}
    assert layer_of(nn.Linear(2, 2)) == {"weight": 0, "bias": 0}


def test_heads():
    assert head_of(bert()) == "classifier"
    assert head_of(llama()) == head_of(gpt2()) == "lm_head"
    assert head_of(ResNet()) == "fc"
    assert head_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Softmax(1))) == "1"
    assert head_of(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 1, 1))) is None
    assert head_of(nn.Linear(2, 2)) is None
    assert head_of(nn.ModuleDict({"a": nn.Linear(1, 1), "fc": nn.Dropout()})) is None


@pytest.mark.parametrize(
    ("name", "expected"), [("head", True), ("head.0.bias", True), ("header.bias", False)]
)
def test_within(name, expected):
    assert within(name, ["body", "head"]) is expected
    assert not within(name, [])


def test_timm_models_know_their_head():
    class Timm(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 1)

        def get_classifier(self):
            return self.last

    assert head_of(Timm()) == "last"


def test_the_head_of_a_transformer_is_all_outside_of_its_body():
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.DistilBertConfig(vocab_size=9, dim=4, hidden_dim=4, n_layers=1, n_heads=1)
    model = transformers.DistilBertForSequenceClassification(config)
    assert head_of(model) == "classifier"
    assert head_parts(model) == ("pre_classifier", "classifier")
    assert head_parts(bert()) == ("classifier",)
    assert head_parts(llama()) == ("lm_head",)
    assert head_parts(ResNet()) == ("fc",)
    assert head_parts(nn.Linear(2, 2)) == ()


def test_the_output_layer_is_the_last_linear_one():
    head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Softmax(1))
    model = nn.ModuleDict({"head": head, "body": nn.Linear(3, 3)})
    assert output_layer(model, ["head"]) == "head.2"
    assert output_layer(model, ["head", "body"]) == "body"
    assert output_layer(model, ["head.1"]) is None
