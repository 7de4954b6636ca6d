"""The same merges as mergekit's, where both define a method."""

import pytest
import torch
from safetensors.torch import load_file

from holdfast import DARE, SLERP, TIES, LiNeS, ModelStock, WiseFT
from holdfast.io.merge import merge_on_disk

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("mergekit", reason="mergekit is not installed: pip install mergekit")

from small import make_llama, make_tokenizer, noisy, save

pytestmark = pytest.mark.filterwarnings("ignore")  # its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base and two models that were tuned from it: both have moved, partly alike."""
    folder = tmp_path_factory.mktemp("models")
    base = make_llama(tie_word_embeddings=False)
    common = noisy(base, noise=0.3, seed=3)
    save(base, folder / "base", make_tokenizer())
    for seed, name in enumerate(("one", "two")):
        save(noisy(common, noise=0.2, seed=seed), folder / name, make_tokenizer())
    return folder


def theirs(folder, out, method, models, **parameters):
    """What mergekit writes. ``models`` are names, with parameters of each."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    listed = [{"model": str(folder / n), "parameters": given} for n, given in models.items()]
    config = {
        "merge_method": method, "models": listed, "parameters": parameters, "dtype": "float32",
        "base_model": str(folder / "base"),
    }  # fmt: skip
    if method == "linear":
        del config["base_model"]
    run_merge(MergeConfiguration.model_validate(config), str(out), MergeOptions(quiet=True))
    return load_file(next(out.glob("*.safetensors")))


def ours(folder, out, method, *tuned):
    merge_on_disk(folder / "base", [folder / name for name in tuned], out, method)
    return load_file(out / "model.safetensors")


def assert_same(mine, other, but=(), **tolerance):
    assert set(mine) == set(other)
    for name in mine:
        if not any(word in name for word in but):
            close = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
            assert torch.allclose(mine[name], other[name], **close), name


def test_wise_ft_is_linear(folder, tmp_path):
    models = {"base": {"weight": 0.7}, "one": {"weight": 0.3}}
    other = theirs(folder, tmp_path / "theirs", "linear", models)
    assert_same(ours(folder, tmp_path / "ours", WiseFT(0.3), "one"), other)


@pytest.mark.parametrize("names", [["one"], ["one", "two"]], ids=len)
@pytest.mark.parametrize(("density", "lam"), [(0.3, 1.0), (1.0, 0.7)])
def test_ties(folder, tmp_path, names, density, lam):
    models = {name: {"weight": 1.0, "density": density} for name in names}
    given = {"normalize": True, "lambda": lam}
    other = theirs(folder, tmp_path / "theirs", "ties", models, **given)
    assert_same(ours(folder, tmp_path / "ours", TIES(density, lam), *names), other)


@pytest.mark.parametrize("t", [0.3, 0.8])
def test_slerp(folder, tmp_path, t):
    other = theirs(folder, tmp_path / "theirs", "slerp", {"base": {}, "one": {}}, t=t)
    mine = ours(folder, tmp_path / "ours", SLERP(t), "one")
    assert_same(mine, other)


def test_model_stock(folder, tmp_path):
    other = theirs(folder, tmp_path / "theirs", "model_stock", {"one": {}, "two": {}})
    assert_same(ours(folder, tmp_path / "ours", ModelStock(), "one", "two"), other)


def test_dare_without_a_drop(folder, tmp_path):
    models = {name: {"weight": 1.0, "density": 1.0} for name in ("one", "two")}
    given = {"normalize": True, "lambda": 0.6}
    other = theirs(folder, tmp_path / "theirs", "dare_linear", models, **given)
    assert_same(ours(folder, tmp_path / "ours", DARE(0.0, 0.6), "one", "two"), other)


def test_dare_with_a_drop(folder, tmp_path):
    """The masks are drawn differently. mergekit rescales to the same L1 norm, not by 1/density."""
    models = {"one": {"weight": 1.0, "density": 0.5}}
    other = theirs(folder, tmp_path / "theirs", "dare_linear", models)
    mine = ours(folder, tmp_path / "ours", DARE(0.5), "one")
    base, tuned = (load_file(folder / name / "model.safetensors") for name in ("base", "one"))
    for name in mine:
        if mine[name].numel() >= 500:
            change = tuned[name] - base[name]
            factors = [(merged[name] - base[name]) / change for merged in (mine, other)]
            for factor in factors:
                assert 0.4 < (factor.abs() > 1e-3).float().mean() < 0.6
            kept = factors[1].abs() > 1e-3
            norm = change.abs().sum() / change[kept].abs().sum()
            assert torch.allclose(factors[1][kept], norm, rtol=1e-2)
            assert torch.allclose(factors[0][factors[0].abs() > 1e-3], torch.tensor(2.0), rtol=1e-2)


def test_lines_in_the_blocks(folder, tmp_path):
    """mergekit has no LiNeS, but its weights may be a gradient over the layers."""
    models = {"one": {"weight": [0.2, 0.9]}}
    given = {"normalize": False}
    other = theirs(folder, tmp_path / "theirs", "task_arithmetic", models, **given)
    mine = ours(folder, tmp_path / "ours", LiNeS(0.2, 0.7), "one")
    assert_same(mine, other, but=["embed_tokens", "lm_head", "model.norm"])
