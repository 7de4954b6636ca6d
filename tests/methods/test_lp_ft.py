import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from holdfast.methods.linear_probe import LinearProbe
from holdfast.methods.lp_ft import LPFT
from methods.stand_ins import ResNet, bert, free, images, llama, make_run, same, state


def train(model, updates=3):
    x, y = images()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=0.05)
    for _ in range(updates):
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class TestLinearProbe:
    def test_only_the_head_changes(self):
        model = ResNet()
        model.layer1[0].bn1.running_mean.normal_()
        before = state(model)
        method = LinearProbe()
        assert method.prepare(make_run(model)) is model
        assert free(model) == {"fc.weight", "fc.bias"}
        train(model)
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == {"fc.weight", "fc.bias"}

    def test_the_features_are_the_pretrained_ones(self):
        model = ResNet()
        x = images()[0]
        seen = []
        model.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        model.eval()(x)
        LinearProbe().prepare(make_run(model))
        model.train()(x)
        assert torch.equal(*seen)
        assert model.fc.training
        assert not model.layer1.training
        assert not model.dropout.training

    def test_finish_puts_all_back(self):
        model = ResNet()
        method = LinearProbe()
        method.prepare(make_run(model))
        train(model, 1)
        assert method.finish(model) is model
        assert len(free(model)) == len(list(model.parameters()))
        before = model.layer1[0].bn1.running_mean.clone()
        model.train()(images()[0])
        assert all(m.training for m in model.modules())
        assert not torch.equal(model.layer1[0].bn1.running_mean, before)
        assert not model._forward_pre_hooks

    def test_copies_and_pickles_stay_frozen(self):
        model = ResNet()
        method = LinearProbe()
        method.prepare(make_run(model))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            before = other.layer1[0].bn1.running_mean.clone()
            other.train()(images()[0])
            assert torch.equal(other.layer1[0].bn1.running_mean, before)
            assert free(other) == {"fc.weight", "fc.bias"}
            method.finish(other)
            assert len(free(other)) == len(list(other.parameters()))
        assert model._forward_pre_hooks

    def test_which_head(self):
        model = bert()
        LinearProbe().prepare(make_run(model))
        assert free(model) == {"classifier.weight", "classifier.bias"}
        model = bert()
        LinearProbe().prepare(make_run(model, new=("classifier", "bert.pooler")))
        assert {n.rpartition(".")[0] for n in free(model)} == {"classifier", "bert.pooler.dense"}
        model = llama()
        LinearProbe(head="model.norm").prepare(make_run(model))
        assert free(model) == {"model.norm.weight"}
        model = llama()
        LinearProbe().prepare(make_run(model))
        assert free(model) == {"lm_head.weight"}

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"lm_head shares weights with model\.embed_tokens"):
            LinearProbe().prepare(make_run(llama(tie_word_embeddings=True)))
        with pytest.raises(ValueError, match="the head of Bilinear is not known"):
            LinearProbe().prepare(make_run(nn.Bilinear(2, 2, 2)))
        with pytest.raises(ValueError, match="no part 'top'; it has conv1, layer1"):
            LinearProbe(head="top").prepare(make_run(ResNet()))
        with pytest.raises(ValueError, match="must be a part of the model with parameters"):
            LinearProbe(head="dropout").prepare(make_run(ResNet()))
        with pytest.raises(ValueError, match="layer2 is new, but is not part of the head fc"):
            LinearProbe(head="fc").prepare(make_run(ResNet(), new=("layer2",)))


class TestLPFT:
    def test_the_head_is_fitted_then_all_may_change(self):
        model, data = ResNet(), TensorDataset(*images(60))
        before = state(model)
        run = make_run(model, data=data, new=("fc",))
        LPFT().fit(run)
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == {"fc.weight", "fc.bias"}
        assert len(free(model)) == len(list(model.parameters()))
        x, y = data.tensors
        logits = model.eval()(x)
        loss = F.cross_entropy(logits, y)
        gradient = torch.autograd.grad(loss, model.fc.bias)[0]
        assert gradient.abs().max() < 1e-4  # at the minimum

    def test_l2_is_used(self):
        sizes = []
        for l2 in (1e-4, 1.0):
            torch.manual_seed(0)
            model = ResNet()
            LPFT(l2=l2).fit(make_run(model, data=TensorDataset(*images(60))))
            sizes.append(model.fc.weight.norm().item())
        assert sizes[1] < sizes[0] / 2

    def test_a_transformer(self):
        model = bert(num_labels=3)
        before = state(model)
        data = [
            {"input_ids": torch.arange(6) + i, "labels": torch.tensor(i % 3)} for i in range(12)
        ]

        def collate(samples):
            return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}

        LPFT().fit(make_run(model, data=data, collate=collate))
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == {"classifier.weight", "classifier.bias"}

    def test_the_last_layer_of_a_head_of_several(self):
        transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
        config = transformers.RobertaConfig(
            vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_labels=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.RobertaForSequenceClassification(config)
        before = state(model)
        generator = torch.Generator().manual_seed(0)
        batches = [
            {"input_ids": torch.randint(2, 30, (8, 6), generator=generator),
             "labels": torch.randint(2, (8,), generator=generator)}
            for _ in range(2)
        ]  # fmt: skip
        LPFT().fit(make_run(model, data=batches, new=("classifier",)))
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == {"classifier.out_proj.weight", "classifier.out_proj.bias"}
        logits = torch.cat([model.eval()(b["input_ids"]).logits for b in batches])
        loss = F.cross_entropy(logits, torch.cat([b["labels"] for b in batches]))
        (gradient,) = torch.autograd.grad(loss, model.classifier.out_proj.bias)
        assert gradient.abs().max() < 1e-4  # at the minimum

    def test_new_parts_beside_the_head_stay_as_they_are(self):
        model, data = ResNet(), TensorDataset(*images(30))
        before = state(model)
        LPFT().fit(make_run(model, data=data, new=("layer2", "fc")))
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == {"fc.weight", "fc.bias"}

    def test_a_layer_that_does_not_compute_the_outputs(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
        with pytest.raises(ValueError, match="the outputs of Sequential are not those of the part"):
            LPFT(head="0").fit(make_run(model, data=data))

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"the task is causal_lm\. Leave it out"):
            LPFT().fit(make_run(llama(), task="causal_lm"))
        with pytest.raises(ValueError, match="the task is a function"):
            LPFT().fit(make_run(ResNet(), task=lambda model, batch: batch))
        with pytest.raises(ValueError, match="l2 must be a finite number"):
            LPFT(l2=-1)
        model = ResNet()
        before = state(model)
        with pytest.raises(ValueError, match="the data is empty"):
            LPFT().fit(make_run(model, data=[]))
        assert same(before, state(model))
