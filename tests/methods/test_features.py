"""Kept features, and the outputs of an old head, against literal twins."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset, default_collate

from golden import distill as golden_distill
from golden import features as golden
from holdfast import Distill, Features, LoRA, PretrainedHead, Recipe, Run, pad_collate
from holdfast.methods._base_model import Frozen, adapters_off_base
from holdfast.methods._varied import varied
from holdfast.methods.features import pooled_features, relative_distance
from methods.runs import gradient, loss_of, make_run, moved, recalled


class ImageNet(nn.Module):
    """Statistics, a head that begins with dropout, and classes of the old task."""

    def __init__(self, classes=5, statistics=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6) if statistics else nn.GroupNorm(2, 6)
        self.pool = nn.Sequential(nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, classes))

    def body(self, x):
        return self.pool(self.norm(self.stem(x)))

    def forward(self, x):
        return self.head(self.body(x))


def make_images(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ImageNet(**options).double()
        x = torch.randn(8, 3, 7, 7, dtype=torch.float64)
        model(2 * x + 1)  # the statistics of pretraining
        old = PretrainedHead.of(model, "head")
        model.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    return model, old, TensorDataset(x, torch.arange(8) % 3)


def make_texts(kind="BertForSequenceClassification", **options):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40}
    config = kind.removesuffix("ForSequenceClassification") + "Config"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, config)(**(sizes | options))
        model = getattr(transformers, kind)(config).double().eval()
        rows = [torch.randint(3, 40, (3 + 3 * i,)).tolist() for i in range(6)]
    return model, [{"input_ids": ids, "labels": i % 2} for i, ids in enumerate(rows)]


def prepared(recall, model, data, **fields):
    collate = default_collate if isinstance(data, TensorDataset) else pad_collate
    return recalled(recall, make_run(model, data, "classification", collate=collate, **fields))


@pytest.mark.parametrize("inputs", ["varied", "target"])
class TestTheLossIsTheLiteralOne:
    def test_of_an_encoder(self, inputs):
        model, samples = make_texts()
        base = copy.deepcopy(model)
        criterion = prepared(Features(0.7, inputs), model, samples)
        moved(model).train()
        ours = loss_of(criterion, model, pad_collate, update=3)
        model.eval()  # the model has dropout; the features are compared without
        features, of_base, losses = [], [], []
        for sample in samples:
            row = {"input_ids": torch.tensor([sample["input_ids"]])}
            seen = row["input_ids"]
            if inputs == "varied":
                piece = varied(row, 0, 3, 0)
                seen = piece["input_ids"][:, : int(piece["attention_mask"].sum())]
            for net, found in ((model, features), (base, of_base)):
                found.append(golden.pooled(net.bert(seen).last_hidden_state[0], seen.shape[1]))
            losses.append(F.cross_entropy(model(**row).logits, torch.tensor([sample["labels"]])))
        # Dropout acts in the task's loss: compare what is added to it.
        uniform = prepared(Features(0.0), model, samples)
        plain = loss_of(uniform, model, pad_collate)
        theirs = golden.loss(losses, of_base, features, 0.7)
        torch.testing.assert_close(plain, sum(losses) / len(losses))
        added = loss_of(criterion, model, pad_collate, update=3)
        torch.testing.assert_close(added, theirs, rtol=1e-10, atol=0)
        found, expected = gradient(added, model), gradient(theirs, model)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
        assert ours != added

    def test_of_an_image_model_with_changing_statistics(self, inputs):
        model, _, data = make_images()
        base = copy.deepcopy(model).eval()
        criterion = prepared(Features(0.7, inputs), model, data, new=("head",))
        moved(model).train()
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        ours = loss_of(criterion, model, default_collate, update=3)
        found = gradient(ours, model)

        x, y = data.tensors
        torch.manual_seed(1)
        losses = F.cross_entropy(twin(x), y, reduction="none")  # changes the statistics
        twin.eval()
        seen = varied(x, 0, 3) if inputs == "varied" else x
        theirs = golden.loss(losses, base.body(seen).detach(), twin.body(seen), 0.7)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, gradient(theirs, twin), rtol=1e-9, atol=1e-13)
        for name, buffer in twin.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
        assert model.head[0].training

    def test_of_an_old_head(self, inputs):
        model, old, data = make_images()
        base = copy.deepcopy(model).eval()
        recall = Distill(0.7, 3.0, head="old", inputs=inputs)
        criterion = prepared(recall, model, data, new=("head",), old_head=old)
        moved(model).eval()
        ours = loss_of(criterion, model, default_collate, update=3)
        x, y = data.tensors
        seen = varied(x, 0, 3) if inputs == "varied" else x
        outputs = [old.head.eval()(net.body(seen)) for net in (model, base)]
        apart = [
            9 * golden_distill.kl([*b.detach()], [*z], 3.0) for z, b in zip(*outputs, strict=True)
        ]
        theirs = F.cross_entropy(model(x), y) + 0.7 * sum(apart) / len(apart)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
        expected = gradient(theirs, model)
        torch.testing.assert_close(gradient(ours, model), expected, rtol=1e-8, atol=1e-12)
        assert model.head[1].out_features == 3  # put back


def test_the_old_head_is_frozen_and_the_new_one_is_put_back_after_an_error():
    model, old, data = make_images()
    recall = Distill(head="old", inputs="varied")
    criterion = prepared(recall, model, data, new=("head",), old_head=old)
    loss_of(criterion, moved(model), default_collate).backward()
    assert all(p.grad is None for p in old.head.parameters())
    head = model.head
    with pytest.raises(RuntimeError):
        criterion.recall.outputs(model, torch.zeros(2, 4, 7, 7, dtype=torch.float64))
    assert model.head is head


def test_distill_of_the_outputs_on_varied_inputs():
    model, _, data = make_images()
    base = copy.deepcopy(model).eval()
    criterion = prepared(Distill(0.7, 3.0, inputs="varied"), model, data)
    moved(model).eval()
    x, y = data.tensors
    outputs = [net(varied(x, 0, 1)) for net in (model, base)]
    apart = [9 * golden_distill.kl([*b], [*z], 3.0) for z, b in zip(*outputs, strict=True)]
    theirs = F.cross_entropy(model(x), y) + 0.7 * sum(apart) / len(apart)
    torch.testing.assert_close(loss_of(criterion, model, default_collate), theirs)


@pytest.mark.parametrize("kind", ["texts", "images"])
@pytest.mark.parametrize("parts", [4, 6])
def test_cutting_an_update_changes_nothing(kind, parts):
    model, data = make_texts() if kind == "texts" else make_images(statistics=False)[::2]
    criterion = prepared(Features(), model, data, new=("head",) if kind == "images" else ())
    moved(model).eval()
    collate = pad_collate if kind == "texts" else default_collate
    count = torch.tensor(float(len(data)))
    whole = loss_of(criterion, model, collate, num_targets=count)
    cut = [
        loss_of(criterion, model, collate, some.tolist(), num_targets=count)
        for some in torch.arange(len(data)).tensor_split(parts)
    ]
    torch.testing.assert_close(sum(cut), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_it_costs_nothing_to_stay(kind):
    model, data = make_texts() if kind == "texts" else make_images()[::2]
    new = ("head",) if kind == "images" else ("classifier",)
    criterion = prepared(Features(100.0), model, data, new=new)
    plain = prepared(Features(0.0), model, data)
    collate = pad_collate if kind == "texts" else default_collate
    losses = [loss_of(c, model.eval(), collate).item() for c in (criterion, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_with_lora_the_base_is_the_model_without_adapters(kind):
    pytest.importorskip("peft", reason="the peft extra is not installed")
    model, data = make_texts() if kind == "texts" else make_images()[::2]
    new = "classifier" if kind == "texts" else "head"
    trainable = LoRA(r=2, target="all-linear" if kind == "texts" else ("stem",))
    recipe = Recipe(trainable=trainable, recall=Features())
    collate = pad_collate if kind == "texts" else default_collate
    options = {"lr": 0.1, "new": new, "task": "classification", "progress": False}
    run = Run(recipe, model, data, collate=collate, **options)
    assert run.recall.base.func is adapters_off_base
    frozen = Frozen(run.model, run.recall.outputs)
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.3 * torch.randn_like(p) * p.requires_grad
    inputs = collate([data[i] for i in range(len(data))])
    inputs = inputs[0] if kind == "images" else {n: inputs[n] for n in inputs if n != "labels"}
    with torch.no_grad():
        ours, theirs = (base(run.model, inputs) for base in (run.recall.base, frozen))
        frozen.model.load_state_dict(run.model.state_dict())
        tuned = frozen(run.model, inputs)
    torch.testing.assert_close(ours, theirs)
    assert (tuned - ours).abs().max() > 1e-3
    assert ours.shape == (len(data), 16 if kind == "texts" else 6)


class TestPooledFeatures:
    @pytest.mark.parametrize(
        "kind", ["BertForSequenceClassification", "RobertaForSequenceClassification",
                 "LlamaForSequenceClassification"],
    )  # fmt: skip
    def test_of_texts_they_are_the_mean_of_the_last_hidden_states(self, kind):
        model, samples = make_texts(kind)
        batch = pad_collate(samples)
        inputs = {n: batch[n] for n in ("input_ids", "attention_mask")}
        found = pooled_features(model, ("classifier",))(model, inputs)
        for row, sample in zip(found, samples, strict=True):
            alone = model.base_model(input_ids=torch.tensor([sample["input_ids"]]))
            torch.testing.assert_close(row, alone.last_hidden_state[0].mean(0))

    @pytest.mark.parametrize("new", ["head", "head.1", ""])
    def test_of_images_they_are_what_the_head_reads(self, new):
        model, _, data = make_images()
        model.eval()
        found = pooled_features(model, (new,) if new else ())(model, data.tensors[0])
        torch.testing.assert_close(found, model.body(data.tensors[0]))
        assert not model.head[1]._forward_pre_hooks

    def test_a_head_that_pools(self):
        class Head(nn.Sequential):
            def forward(self, x):
                return super().forward(x).mean((2, 3))

        model = nn.Sequential(nn.Conv2d(3, 4, 1), Head(nn.Conv2d(4, 2, 1)))
        x = torch.randn(5, 3, 6, 6)
        found = pooled_features(model, ("1",))(model, x)
        torch.testing.assert_close(found, model[0](x).mean((2, 3)))

    @pytest.mark.parametrize("new", [("stem", "head"), ("stem",), ("head.1", "stem")])
    def test_a_new_stem_is_no_head(self, new):
        model, _, data = make_images()
        model.eval()
        found = pooled_features(model, new)(model, data.tensors[0])
        torch.testing.assert_close(found, model.body(data.tensors[0]))

    @pytest.mark.parametrize("new", [("1",), ("1.2",), ("1.0", "1.2")])
    def test_a_head_of_several_layers(self, new):
        head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        model, x = nn.Sequential(nn.Linear(3, 4), head), torch.randn(6, 3)
        found, features = pooled_features(model, new)(model, x), model[0](x)
        torch.testing.assert_close(found, head[:2](features) if new == ("1.2",) else features)

    def test_a_model_whose_head_is_not_known(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        with pytest.raises(ValueError, match=r"head of Sequential is not known.*new="):
            pooled_features(model, ())

    def test_a_head_that_does_not_run_last(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        with pytest.raises(ValueError, match="did not run 0 after all other layers"):
            pooled_features(model, ("0",))(model, torch.zeros(1, 3))


def test_features_that_are_0_do_not_count():
    base, z = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.ones(2, 2, requires_grad=True)
    apart = relative_distance(base, z)
    assert apart.tolist() == [0.0, 0.5]
    apart.sum().backward()
    assert z.grad.isfinite().all()


class TestRefused:
    def test_a_loss_function(self):
        model, _, data = make_images()
        with pytest.raises(ValueError, match="task="):
            recalled(Features(), make_run(model, data, lambda model, batch: None))

    def test_an_old_head_that_nobody_kept(self):
        model, _, data = make_images()
        with pytest.raises(ValueError, match=r"PretrainedHead\.of.*old_head="):
            prepared(Distill(head="old"), model, data)

    def test_an_old_head_of_another_model(self):
        model, old, data = make_images()
        old.name = "fc"
        with pytest.raises(ValueError, match="no part 'fc'"):
            prepared(Distill(head="old"), model, data, old_head=old)

    @pytest.mark.parametrize("settings", [{"inputs": "varied"}, {"head": "old"}])
    def test_outputs_per_token(self, settings):
        model, _ = make_texts()
        old = PretrainedHead.of(model, "classifier")
        run = make_run(model, [], "token_classification", old_head=old)
        with pytest.raises(ValueError, match="one row of outputs per sample, but token_class"):
            recalled(Distill(**settings), run)

    @pytest.mark.parametrize(
        "settings", [{"strength": -1.0}, {"inputs": "old"}], ids=["strength", "inputs"]
    )
    def test_bad_settings(self, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Features(**settings)
