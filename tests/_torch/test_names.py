import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._torch.names import align as find_alignment
from holdfast._torch.names import plain_name


def align(names, anchor_names):
    alignment = find_alignment(names, anchor_names)
    return {n: alignment(n) for n in names if alignment(n) is not None}


BODY = ["emb.weight", "layer.0.weight", "layer.0.bias", "layer.1.weight", "layer.1.bias"]
HEAD = ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("ours", ["", "bert."])
@pytest.mark.parametrize("theirs", ["", "bert."])
def test_wrappers_and_base_model_prefixes(wrapper, ours, theirs):
    names = [wrapper + ours + n for n in BODY] + [wrapper + n for n in HEAD]
    anchors = [theirs + n for n in BODY]
    assert align(names, anchors) == {wrapper + ours + n: theirs + n for n in BODY}
    assert align(anchors, names) == {theirs + n: wrapper + ours + n for n in BODY}


def test_wrappers_inside_a_name():
    assert plain_name("layer._orig_mod.0._checkpoint_wrapped_module.w") == "layer.0.w"
    assert plain_name("net.module.w") == "net.module.w"
    assert plain_name("module") == "module"


def test_nothing_in_common():
    assert align(BODY, ["foreign.a", "foreign.b"]) == {}


def test_a_chance_agreement_does_not_make_a_prefix():
    assert align(BODY, ["x.0.weight", "0.weight", "a", "b", "c", "d"]) == {}


def test_no_prefix_is_preferred():
    names = ["w", "encoder.w"]
    assert align(names, ["w"]) == {"w": "w"}


def test_two_prefixes_that_fit_equally_are_refused():
    towers = [f"{tower}.{n}" for tower in ("query", "document") for n in BODY]
    with pytest.raises(ValueError, match=r"'document\.' and 'query\.' match"):
        align(towers, BODY)


def test_duplicates_are_refused():
    with pytest.raises(ValueError, match="duplicate"):
        align(["module.w", "w"], ["w"])


def test_exact_names_have_precedence():
    names = ["a.w", "a.b", "enc.a.w", "enc.a.b", "enc.c.w"]
    assert align(names, ["a.w", "a.b", "c.w"]) == {"a.w": "a.w", "a.b": "a.b"}


def test_one_name_is_no_prefix():
    assert align(["classifier.weight", "body.w", "body.b"], ["weight"]) == {}
    assert align(["classifier.weight"], ["weight"]) == {"classifier.weight": "weight"}


def test_berts_first_checkpoints():
    names = ["bert.emb.LayerNorm.weight", "bert.emb.LayerNorm.bias", "bert.gamma"]
    old = ["bert.emb.LayerNorm.gamma", "bert.emb.LayerNorm.beta", "bert.gamma"]
    assert align(names, old) == dict(zip(names, old, strict=True))


parts = st.sampled_from(["a", "b", "weight", "0", "layer"])
names = st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), unique=True, max_size=8)


@given(names)
def test_names_align_with_themselves(n):
    assert align(n, n) == {name: name for name in n}


@given(names)
def test_a_prefix_is_found(n):
    found = align([f"p.{name}" for name in n], n)
    assert found == {f"p.{name}": name for name in n}
