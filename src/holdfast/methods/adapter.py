"""Adapter: any adapter of PEFT that changes layers: OFT, IA³, VeRA, LoHa, LoKr, HRA and others.

Hugging Face, *PEFT: Parameter-Efficient Fine-Tuning*, https://huggingface.co/docs/peft. A layer
with an adapter computes f(x; W*, φ). W* is frozen, and φ is trained. For most adapters the initial
φ₀ changes nothing, so that the pretrained model is φ = φ₀:

    f(x; W*, φ₀) = W* x

What holdfast must know about an adapter is measured on its layers while it is new
(:mod:`holdfast._torch.adapter_probe`): whether φ₀ is the identity, which parameters a pull must
lead to φ₀, and whether the weights are linear in these parameters.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.adapter_probe import adapter_layers, facts_of
from holdfast._torch.adapters import adapter_parts, base_name, full_copies, unfit_kind
from holdfast._torch.checks import did_you_mean
from holdfast._torch.fingerprint import fingerprint
from holdfast._torch.imports import require
from holdfast._torch.layers import within
from holdfast._torch.names import shorten
from holdfast.methods._adapting import Adapting, exact_target, linear_layers
from holdfast.stages import Checks, Run

#: Fields of a configuration that say where it comes from, or that holdfast sets.
_NOT_SETTINGS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path",
    "revision", "inference_mode",
}  # fmt: skip


def plain_config(name: str, given: Any) -> dict[str, Any]:
    """A PEFT configuration as plain values: its type, and the settings that are not the defaults.

    >>> plain_config("config", "ia3"), plain_config("config", {"peft_type": "oft", "r": 8})
    ({'peft_type': 'IA3'}, {'peft_type': 'OFT', 'r': 8})
    """
    if isinstance(given, str):
        given = {"peft_type": given}
    elif dataclasses.is_dataclass(given) and hasattr(given, "peft_type"):
        given = {"peft_type": given.peft_type, **_changed(given)}
    if not isinstance(given, Mapping) or not isinstance(given.get("peft_type"), str):
        raise TypeError(
            f"{name} must be a PEFT configuration, a mapping such as "
            f'{{"peft_type": "OFT", "r": 8}}, or a name such as "oft", got {given!r}'
        )
    kind = _plain(given["peft_type"])
    settings = {str(n): _plain(x) for n, x in given.items() if n != "peft_type"}
    try:
        json.dumps(settings)
    except TypeError as error:
        raise TypeError(f"{name} must have plain values only: {error}") from error
    return {"peft_type": re.sub(r"\W+", "_", kind.strip()).upper(), **settings}


def _changed(config: Any) -> dict[str, Any]:
    """The settings of a configuration that differ from the defaults of its class."""
    found = {}
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = _plain(getattr(config, field.name))
        if field.init and field.name not in _NOT_SETTINGS and value != _plain(default):
            found[field.name] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, Mapping):
        return {str(n): _plain(x) for n, x in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value


@dataclass(frozen=True)
class Adapter(Adapting):
    """Train adapters of any PEFT configuration that adapts layers. The weights are frozen.

    New parts of the model are trained in full. The result is a PEFT model: ``save_pretrained``
    writes the adapters, ``merge_and_unload()`` merges them into the weights.

    Args:
        config: a ``peft.PeftConfig``, a mapping of its settings such as ``{"peft_type": "OFT",
            "r": 8}``, or the name of its type, such as ``"oft"``. Without ``target_modules``, all
            linear layers except the output embeddings and new parts are adapted; with
            ``LN_TUNING``, all norms. The settings that are not given are PEFT's defaults. C3A and
            FourierFT start at the pretrained model with ``init_weights: true`` only, which pulls,
            merging and a recall need.

    Example:
        >>> from holdfast import Adapter, Recipe
        >>> Recipe(trainable=Adapter("oft")).to_dict()["trainable"]
        {'name': 'adapter', 'config': {'peft_type': 'OFT'}}
    """

    checks: ClassVar[Checks] = {"config": plain_config}
    stands_alone: ClassVar[bool] = False  # its default is one of many

    config: Any = "LORA"

    def __hash__(self) -> int:
        return hash(json.dumps(self.config, sort_keys=True))

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        try:
            self._configured(require("peft", extra="peft", what="Adapter"))
        except ValueError as error:
            return str(error)
        return None

    def peft_config(self, peft: Any, run: Run) -> Any:
        config = self._configured(peft)
        if not config.target_modules:
            find = norm_layers if self._type == "LN_TUNING" else linear_layers
            config.target_modules = exact_target(find(run.model, run.new), run.model)
            if getattr(config, "feedforward_modules", ()) is None:
                config.feedforward_modules = []  # IA³ then scales the outputs of all layers
        return config

    def prepare(self, run: Run) -> nn.Module:
        """Add adapters, and check that with them off the model is the pretrained one."""
        before, own = _fingerprint_of_base(run.model), {*run.model.parameters()}
        try:
            adapted = super().prepare(run)
        except (TypeError, ValueError, NotImplementedError) as error:
            if ".tuners." not in _raised_in(error):
                raise
            raise ValueError(
                f"PEFT cannot add {self._type} adapters to {type(run.model).__name__}: {error} "
                "(settings and target_modules are in config)"
            ) from error
        if _fingerprint_of_base(adapted) != before:
            raise ValueError(
                f"this {self._type} configuration changes the model outside of its adapters, so "
                "that with them off it is not the pretrained one: use an initialization that "
                "leaves the base weights unchanged, or another kind of adapter"
            )
        trained = [n for n, p in adapted.named_parameters() if p.requires_grad and p in own]
        trained += [f"{part}.default" for part in full_copies(adapted)]
        if wrong := [n for n in map(base_name, trained) if not within(n, run.new)]:
            raise ValueError(
                f"this {self._type} configuration trains weights of the model itself "
                f"({shorten(wrong)}): leave out bias and modules_to_save, and name new parts in "
                "new="
            )
        self._check_start(adapted, run)
        return adapted

    @property
    def _type(self) -> str:
        kind: str = self.config["peft_type"]
        return kind

    def _configured(self, peft: Any) -> Any:
        """Build the configuration; raise ValueError if PEFT or holdfast cannot train with it."""
        if reason := unfit_kind(peft, self._type):
            kinds = [kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING]
            if self._type not in kinds:
                raise ValueError(f"{reason}{did_you_mean(self._type, kinds)}")
            raise ValueError(
                f"{reason}: use a configuration with fixed ranks that adapts layers, such as "
                "LORA, OFT, IA3 or VERA"
            )
        cls = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[self._type]
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        given = {n: copy.deepcopy(x) for n, x in self.config.items() if n != "peft_type"}
        for name in given:
            if name not in known:
                raise ValueError(f"{self._type} has no setting {name!r}{did_you_mean(name, known)}")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"PEFT refuses the {self._type} configuration: {error}") from error

    def _check_start(self, adapted: nn.Module, run: Run) -> None:
        """Check a layer of each kind, by its class: it acts on its input, and starts at θ*."""
        kinds = {type(layer): layer for layer in adapter_layers(adapted).values()}
        try:
            facts = [facts_of(layer) for layer in kinds.values()]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"the layers of {self._type} do not run with their input alone, or not on this "
                f"model ({error}; many kinds cannot be quantized): use another configuration, "
                "such as OFT, IA3 or VERA"
            ) from error
        if not facts or not any(fact.pulled or not fact.is_identity for fact in facts):
            raise ValueError(
                f"the adapters of {self._type} do not act on the layers that they adapt: use "
                "another configuration, such as OFT, IA3 or VERA"
            )
        others = [m for _, m in run.recipe if m is not self]
        using = [type(m).__name__ for m in others if m.uses_base or m.needs_reference]
        if using and not all(fact.is_identity for fact in facts):
            raise ValueError(
                f"this {self._type} configuration does not start at the pretrained model, which "
                f"{', '.join(using)} uses: choose an initialization that changes nothing (often "
                "init_weights=True in config), or leave out the others"
            )


def norm_layers(model: nn.Module, new: Any = ()) -> list[str]:
    """The names of all norms with weights, except new parts."""
    names = [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and not within(name, new)
    ]
    if not names:
        raise ValueError(f"{type(model).__name__} has no norms: name layers in target_modules")
    return names


def _fingerprint_of_base(model: nn.Module) -> str:
    added = [*adapter_parts(model), *full_copies(model)]
    named = {base_name(n): p for n, p in model.named_parameters() if not within(n, added)}
    return fingerprint(named[name] for name in sorted(named))


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
