"""The layers of a model, from input to output, and its head, found by its structure."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from holdfast._torch.names import plain_name

_CONTAINERS = (nn.ModuleList, nn.Sequential)
#: Names of the last layer in transformers, timm and torchvision.
_HEADS = ("lm_head", "classifier", "score", "qa_outputs", "fc", "head", "heads", "output", "out")


def layer_of(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter by name, counted from 0 at the input.

    Each child of an outermost ``ModuleList`` or ``Sequential`` container is a layer. The modules
    before, between and after the containers form one layer each (embeddings; the last norm and the
    head). The order of definition counts as the order of the layers.

    >>> body = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    >>> model = nn.ModuleDict({"embed": nn.Linear(3, 2), "body": body, "head": nn.Linear(2, 1)})
    >>> {name: n for name, n in layer_of(model).items() if name.endswith("weight")}
    {'embed.weight': 0, 'body.0.weight': 1, 'body.2.weight': 2, 'head.weight': 3}
    """
    layers: dict[str, int] = {}
    number, last = -1, None
    for name, block in block_of(model).items():
        if block != last or number < 0:
            number, last = number + 1, block
        layers[name] = number
    return layers


def block_of(model: nn.Module) -> dict[str, str | None]:
    """The child of an outermost container that has each parameter; None outside of containers.

    >>> body = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    >>> model = nn.ModuleDict({"body": body, "head": nn.Linear(2, 1, bias=False)})
    >>> block_of(model)
    {'body.0.weight': 'body.0', 'body.2.weight': 'body.2', 'head.weight': None}
    """
    containers = _outermost_containers(model)
    blocks: dict[str, str | None] = {}
    for name, _ in model.named_parameters():
        prefix = next((c for c in containers if name.startswith(c)), None)
        blocks[name] = None if prefix is None else prefix + name[len(prefix) :].split(".")[0]
    return blocks


def depth_of(names: Iterable[str]) -> dict[str, float | None]:
    """The depth of each tensor: 0 in the first block, 1 in the last, None outside of blocks.

    It reads only names, so it is the same for a model and for its checkpoint. A block is a numbered
    part with siblings, such as ``layers.7``; of nested ones, the outermost. An encoder and a
    decoder are two stacks of blocks; numbered stages (``layer1.0``, ``layer2.0``) are one.

    >>> depth_of(["embed.weight", "h.0.mlp.0.bias", "h.0.mlp.1.bias", "h.1.bias", "h.10.bias"])
    {'embed.weight': None, 'h.0.mlp.0.bias': 0.0, 'h.0.mlp.1.bias': 0.0, 'h.1.bias': 0.5, \
'h.10.bias': 1.0}
    """
    names = list(names)
    stacks: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        for stack, number in _numbered(name):
            stacks[stack].add(number)
    depths: dict[str, float | None] = dict.fromkeys(names)
    for name in names:
        for stack, number in _numbered(name):
            if len(blocks := sorted(stacks[stack])) > 1:
                depths[name] = blocks.index(number) / (len(blocks) - 1)
                break
    return depths


def _numbered(name: str) -> Iterable[tuple[str, tuple[int, ...]]]:
    """The numbered parts that a tensor is in, from outside: their stack, and their number in it."""
    for found in re.finditer(r"(?:^|(?<=\.))\d+(?=\.)", name):
        part = name[: found.end()]
        yield re.sub(r"\d+", "#", part), tuple(map(int, re.findall(r"\d+", part)))


def head_of(model: nn.Module) -> str | None:
    """The name of the module that computes the outputs; None if it cannot be found."""
    # The methods of transformers and timm.
    for method in ("get_output_embeddings", "get_classifier"):
        ask: Any = getattr(model, method, None)
        if isinstance(found := ask() if callable(ask) else None, nn.Module):
            return next((n for n, m in model.named_modules() if m is found), None)
    if after := _after_body(model):
        return after[-1]
    children = _parts(model)
    if children == [getattr(model, "base_model_prefix", None)]:  # transformers' wrapper of timm
        inner = head_of(model.get_submodule(children[0]))
        return inner and f"{children[0]}.{inner}"
    if isinstance(model, nn.Sequential):
        last = children[-1] if len(children) > 1 else None
        return last if last and isinstance(model.get_submodule(last), nn.Linear) else None
    return next((name for name in reversed(children) if name in _HEADS), None)


def head_parts(model: nn.Module) -> tuple[str, ...]:
    """The names of all parts of the head, from input to output; empty if none can be found.

    The head of a transformers model is everything outside of its base model: DistilBERT's has the
    parts ``pre_classifier`` and ``classifier``.
    """
    head = head_of(model)
    if (after := _after_body(model)) and (head is None or within(head, after)):
        return after
    return () if head is None else (head,)


def output_layer(model: nn.Module, parts: Collection[str]) -> str | None:
    """The last linear layer of some parts of a model, in the order of definition."""
    linear = (name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return next((name for name in reversed([*linear]) if within(name, parts)), None)


def submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        children = ", ".join(n for n, _ in model.named_children())
        raise ValueError(f"the model has no part {name!r}; it has {children}") from error


def within(name: str, parts: Collection[str]) -> bool:
    """Whether a parameter or module is one of the given parts of a model, or inside one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def category_of(path: str, module: nn.Module) -> str:
    """The category of a module, by its type and its path within the layer.

    >>> linear, norm, convolution = nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv2d(1, 1, 1)
    >>> category_of(".self_attn.q_proj", linear), category_of(".mlp.up_proj", linear)
    ('attention', 'feed-forward')
    >>> category_of(".attention.output.LayerNorm", norm), category_of("", convolution)
    ('norm', 'convolution')
    """
    if "norm" in type(module).__name__.lower():
        return "norm"
    if isinstance(module, _ConvNd):
        return "convolution"
    if all(p.dim() < 2 for p in module.parameters(recurse=False)):
        return "other"  # for example the scale of a residual branch
    attends = any(word in path.lower() for word in ("attn", "attention"))
    return "attention" if attends else "feed-forward"


def discriminative_groups(
    groups: list[dict[str, Any]], model: nn.Module, lr: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Split groups by layer, with learning rate lr / layer_decayᵈ at d layers below the top.

    The discriminative fine-tuning of ULMFiT, https://arxiv.org/abs/1801.06146.
    """
    if layer_decay == 1:
        return [{"lr": lr, **group} for group in groups]
    layers = {plain_name(name): layer for name, layer in layer_of(model).items()}
    top = max(layers.values())
    split = []
    for group in groups:
        where = {name: layers[plain_name(name)] for name, _ in group["params"]}
        for layer in sorted(set(where.values()), reverse=True):
            params = [(name, p) for name, p in group["params"] if where[name] == layer]
            rate = group.get("lr", lr) / layer_decay ** (top - layer)
            split.append({**group, "params": params, "lr": rate})
    return split


def _parts(model: nn.Module) -> list[str]:
    """The names of the children that have parameters."""
    return [name for name, child in model.named_children() if any(True for _ in child.parameters())]


def _after_body(model: nn.Module) -> tuple[str, ...]:
    """The parts of a transformers model outside of its base model."""
    body, parts = getattr(model, "base_model_prefix", None), _parts(model)
    return tuple(name for name in parts if name != body) if body in parts else ()


def _outermost_containers(model: nn.Module, prefix: str = "") -> list[str]:
    """The prefixes of containers that have at least two children with parameters."""
    found: list[str] = []
    if isinstance(model, _CONTAINERS):
        with_parameters = [c for c in model.children() if any(True for _ in c.parameters())]
        if len(with_parameters) > 1:
            return [prefix]
    for name, child in model.named_children():
        found += _outermost_containers(child, f"{prefix}{name}.")
    return found
