"""Small language models with output layers of all kinds, and what tests of their losses share."""

import weakref
from functools import partial

import peft
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from small import make_llama


def small(kind, vocab=30, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=1.0, pad_token_id=0, **more,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt2(vocab=30, **more):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=80, bos_token_id=0,
        eos_token_id=0, initializer_range=0.5, **more,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def with_bias(vocab=30):
    model = make_llama(vocab=vocab)
    head = nn.Linear(16, vocab)
    nn.init.normal_(head.bias)
    model.lm_head = head
    return model


def with_lora(vocab=30, targets=("q_proj", "lm_head"), **more):
    config = peft.LoraConfig(
        r=2, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **more
    )
    return peft.get_peft_model(make_llama(vocab=vocab), config)


class AddsToItsLogits(nn.Module):
    """As BART does."""

    def __init__(self, vocab=30):
        super().__init__()
        self.model = make_llama(vocab=vocab)
        self.bias = nn.Parameter(torch.randn(vocab))

    def get_output_embeddings(self):
        return self.model.lm_head

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask, use_cache=False).logits + self.bias


class Headless(AddsToItsLogits):
    def get_output_embeddings(self):
        return None


class AnotherCurve(AddsToItsLogits):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask).sin()


LEAN = {
    "gpt2": gpt2,
    "untied gpt2": partial(gpt2, tie_word_embeddings=False),
    "llama": make_llama,
    "tied llama": partial(make_llama, tie_word_embeddings=True),
    "soft-capped": partial(small, "Gemma3Text", head_dim=8, final_logit_softcapping=4.0),
    "divided": partial(small, "Granite", logits_scaling=3.0),
    "bias": with_bias,
    "lora": partial(with_lora, targets=["q_proj"]),
    "lora on the head": with_lora,
    "trained head beside lora": partial(with_lora, targets=["q_proj"], modules_to_save=["lm_head"]),
}
MODELS = LEAN | {
    "adds to its logits": AddsToItsLogits, "headless": Headless, "another curve": AnotherCurve
}  # fmt: skip


def exact(model):
    """A model in float64. The norms of transformers compute in float32 whatever their dtype."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, nn.RMSNorm(len(module.weight)))
    return model.double()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=tolerance, rtol=tolerance)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(
            self.numel, *(t.numel() for t in tree_leaves(out) if hasattr(t, "numel")), 0
        )
        return out


class Held(TorchDispatchMode):
    """The most bytes that new tensors held at a time."""

    now = most = 0

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen[key] = weakref.ref(storage, lambda _: self.free(key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def free(self, key, size):
        del self.seen[key]
        self.now -= size
