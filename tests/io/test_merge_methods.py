"""Every method that merges tensors: the checkpoint on disk is the model in memory, to the bit."""

import copy
import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import DARE, FAPM, SLERP, TIES, Keep, LiNeS, ModelStock, Reference, WiseFT
from holdfast._torch import slices as slicing
from holdfast.io.merge import merge_on_disk
from holdfast.registry import methods
from holdfast.stages import Where

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from small import make_llama, noisy, save  # noqa: E402

ALONE = [WiseFT(0.3), LiNeS(0.2, 0.7), TIES(0.3), DARE(0.6), FAPM(0.3), SLERP(0.4)]
SEVERAL = [TIES(0.3), DARE(0.6, lam=0.7), ModelStock()]


def kind(method):
    return type(method).__name__


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    """Slices in several threads, each with its own buffers."""
    monkeypatch.setattr(slicing, "SLICE", 100)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def files(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_all_methods_are_here():
    tensorwise = {e.cls for e in methods("merging") if e.cls().tensorwise}
    assert {type(m) for m in [*ALONE, *SEVERAL]} == tensorwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ALONE, ids=kind)
def test_disk_equals_memory(method, dtype, tmp_path):
    base = make_llama(tie_word_embeddings=False).to(dtype)
    tuned = noisy(base)
    save(base, tmp_path / "base")
    save(tuned, tmp_path / "tuned", max_shard_size="5KB")
    merge_on_disk(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", method)
    ours = method.merge(tuned, Reference.of(base)).state_dict()
    theirs = files(tmp_path / "out")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, ours[name]), name
    assert not torch.equal(ours["lm_head.weight"], base.lm_head.weight)


@pytest.mark.parametrize("method", SEVERAL, ids=kind)
def test_several_models(method, tmp_path):
    base = make_llama()
    save(base, tmp_path / "base")
    models = [noisy(base, seed=seed) for seed in (1, 2, 3)]
    folders = [save(m, tmp_path / f"tuned{i}") for i, m in enumerate(models)]
    merge_on_disk(tmp_path / "base", folders, tmp_path / "out", method)
    weights = [model.state_dict() for model in models]
    for name, tensor in files(tmp_path / "out").items():
        flat = [w[name].flatten() for w in weights]
        merged = method.merged(Where(name), base.state_dict()[name].flatten(), flat)
        assert torch.equal(tensor.flatten(), merged), name


@pytest.mark.parametrize("method", [TIES(0.3), FAPM(0.3), SLERP(0.4)], ids=kind)
def test_new_rows_stay_and_shared_rows_are_merged(method, tmp_path):
    base = make_llama(vocab=30, tie_word_embeddings=False)
    save(base, tmp_path / "base")
    tuned = copy.deepcopy(base)
    tuned.resize_token_embeddings(33)
    tuned = noisy(tuned)
    save(tuned, tmp_path / "tuned")
    merge_on_disk(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", method)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows, old = tuned.state_dict()[name], base.state_dict()[name]
        merged = files(tmp_path / "out")[name]
        assert torch.equal(merged[30:], rows[30:])
        expected = method.merged(Where(name), old.flatten(), [rows[:30].flatten()])
        assert torch.equal(merged[:30].flatten(), expected)
    reference = Reference.of(base)
    ours = method.merge(tuned, reference).state_dict()
    assert all(torch.equal(t, ours[n]) for n, t in files(tmp_path / "out").items())


@pytest.mark.parametrize("method", [TIES(0.3), DARE(0.6)], ids=kind)
def test_the_effective_weights_of_an_adapter(method, tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    base = make_llama()
    save(base, tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    model.save_pretrained(tmp_path / "adapter")
    merge_on_disk(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", method)
    whole = method.merge(model.merge_and_unload(), Reference.of(base)).state_dict()
    for name, tensor in files(tmp_path / "out").items():
        assert torch.allclose(tensor, whole[name], atol=1e-5), name
    with pytest.raises(ValueError, match="adapters are factors of their change"):
        method.merge(peft.get_peft_model(copy.deepcopy(base), config), None)


@pytest.mark.parametrize("method", [*ALONE[1:], WiseFT(0.3, statistics="keep")], ids=kind)
def test_statistics(method, tmp_path):
    """Of methods that do not interpolate, they are as tuned: a dropped variance has no meaning."""

    torch.manual_seed(0)
    base = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    )
    reference = Reference.of(base)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    base(torch.randn(8, 3) + 2)
    with torch.no_grad():
        for p in base.parameters():
            p.add_(0.1 * torch.randn_like(p))
    tuned = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    save_file(tuned, tmp_path / "tuned.safetensors")
    places = [tmp_path / f"{name}.safetensors" for name in ("base", "tuned")]
    out = files(merge_on_disk(*places, tmp_path / "out", method))
    ours = method.merge(base, reference).state_dict()
    assert all(torch.equal(out[name], ours[name]) for name in ours)
    kept = {n for n in tuned if "running" in n and torch.equal(ours[n], tuned[n])}
    assert len(kept) == (0 if isinstance(method, LiNeS) else 4)


def test_refused(tmp_path):
    base = {"layers.0.w": torch.ones(4), "layers.1.w": torch.ones(4)}
    names = ("base", "one", "two", "flat")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({}))
        save_file(base, tmp_path / name / "model.safetensors")
    save_file({"w": torch.ones(4)}, tmp_path / "flat" / "model.safetensors")
    start, one, two, flat = (tmp_path / name for name in names)
    out = tmp_path / "out"
    for tuned, method, words in [
        ([one, two], WiseFT(), "WiseFT merges 1 tuned model with its base, got 2"),
        (one, ModelStock(), "ModelStock merges 2 or more tuned models, got 1"),
        ([], TIES(), "TIES merges 1 or more tuned models, got 0"),
        (one, Keep(), "Keep does not merge"),
    ]:
        with pytest.raises(ValueError, match=words):
            merge_on_disk(start, tuned, out, method)
    with pytest.raises(TypeError, match=r"must be a method of the stage merging, got 0\.5"):
        merge_on_disk(start, one, out, 0.5)
    with pytest.raises(ValueError, match="no tensor's name has a number"):
        merge_on_disk(flat, flat, out, LiNeS())
    more = {**base, "layers.1.w": torch.ones(5), "layers.2.w": torch.ones(3)}
    save_file(more, two / "model.safetensors")
    with pytest.raises(ValueError, match=r"two and .*one differ in layers\.1\.w"):
        merge_on_disk(start, [one, two], out, TIES())
    assert not out.exists()


@pytest.mark.parametrize("method", [TIES(0.5), DARE(0.5), FAPM(0.5), SLERP(0.5)], ids=kind)
def test_a_tensor_without_weights(method):
    nothing = torch.zeros(0)
    assert method.merged(Where("weight"), nothing, [nothing.clone()]).shape == (0,)


@pytest.mark.parametrize("method", [TIES(0.25), FAPM(0.25)], ids=kind)
def test_infinite_weights(method):
    base = torch.tensor([-float("inf"), 1.0, 2.0, 3.0])
    tuned = torch.tensor([-float("inf"), 1.5, float("nan"), 3.0])
    merged = method.merged(Where("mask"), base, [tuned])
    assert not merged.isnan().any()
    assert merged[[0, 2, 3]].equal(base[[0, 2, 3]])


def test_a_full_disk_is_an_error(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of processes are POSIX's")
    base = make_llama()
    save(base, tmp_path / "base")
    save(noisy(base), tmp_path / "tuned")
    size = (tmp_path / "tuned" / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    held = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            merge_on_disk(tmp_path / "base", tmp_path / "tuned", tmp_path / "out", WiseFT(0.5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, held)
    assert not (tmp_path / "out" / "config.json").exists()
