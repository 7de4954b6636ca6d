import pytest
import torch
from torch import nn

from holdfast import Reference, random_init

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}
MODELS = {
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(num_attention_heads=4, **SMALL)
    ),
    "llama-tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **SMALL
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=99)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_attention_heads=4,
            image_size=32,
            patch_size=16,
            **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        )
    ),
}


@pytest.fixture(params=MODELS)
def pretrained(request, tmp_path):
    """A model with every weight moved off its initial value, saved and loaded."""
    model = MODELS[request.param]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 + 0.1 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    return type(model).from_pretrained(tmp_path)


def test_transformers_own_initialiser_changes_nothing_by_itself(pretrained):
    """The trap this function exists for."""
    reference = Reference.of(pretrained)
    pretrained.init_weights()
    assert reference.distance(pretrained).total == 0.0


def test_every_tensor_changes_or_is_constant_by_design(pretrained):
    reference = Reference.of(pretrained)
    fresh = dict(type(pretrained)(pretrained.config).named_parameters())
    random_init(pretrained, seed=1)
    for name, p in pretrained.named_parameters():
        assert not torch.equal(p, reference[name]), name
        if (fresh[name] == fresh[name].flatten()[0]).all():  # biases at 0, norms at 1
            assert torch.equal(p, fresh[name]), name
        else:
            assert p.std().item() == pytest.approx(fresh[name].std().item(), rel=0.5), name


def test_tied_weights_stay_tied(tmp_path):
    model = MODELS["llama-tied"]()
    random_init(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_seeds(pretrained):
    state = torch.random.get_rng_state()
    one = Reference.of(random_init(pretrained, seed=1)).fingerprint()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert Reference.of(random_init(pretrained, seed=2)).fingerprint() != one
    assert Reference.of(random_init(pretrained, seed=1)).fingerprint() == one
    assert Reference.of(random_init(pretrained)).fingerprint() != one


def test_plain_modules():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.Embedding(5, 8),
    )
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5)
        net[1].running_mean.add_(3.0)
    reference = Reference.of(net)
    assert random_init(net) is net
    moved = reference.distance(net).per_parameter
    assert all(d > 0 for d in moved.values())
    assert net[1].running_mean.abs().max() == 0


def test_a_parameter_without_an_initialiser_is_refused_and_nothing_changes():
    class WithToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.ones(3))
            self.layer = nn.Linear(3, 3)

    net = WithToken()
    reference = Reference.of(net)
    with pytest.raises(ValueError, match=r"have no initializer, .*: token\. Add"):
        random_init(net)
    assert reference.distance(net).total == 0.0


def test_a_transformers_model_inside_another_module():
    inner = MODELS["bert"]()
    net = nn.Sequential(inner, nn.Linear(4, 4))
    random_init(net, seed=0)
    assert inner.bert.embeddings.word_embeddings.weight.std() < 0.03
    assert inner.bert.encoder.layer[0].attention.self.query.bias.abs().max() == 0


def test_what_the_initialiser_does_not_know_is_said():
    model = MODELS["bert"]()
    model.scale = nn.Parameter(torch.tensor([7.0, 8.0]))
    with pytest.warns(UserWarning, match="did not change 1 parameters: scale"):
        random_init(model)
