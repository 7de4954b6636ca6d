"""Load one model at a time, with everything needed to run it.

Sources are transformers models by directory or hub name, adapters on their base, GGUF files,
and modules in memory.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from holdfast._torch.batch import evaluating
from holdfast._torch.checks import NamedSettings, whole_number
from holdfast._torch.imports import require
from holdfast._torch.layers import head_parts
from holdfast._torch.lm_head import Split
from holdfast._torch.names import shorten
from holdfast._torch.vocabulary import vocabulary_size
from holdfast.io import heads
from holdfast.io.adapter import base_of, check_adapter, is_adapter, tokens_in
from holdfast.io.checkpoint import open_weights
from holdfast.io.files import first_line
from holdfast.io.heads import ModelSource, NewHead
from holdfast.io.pairing import check_not_packed
from holdfast.io.untrusted import from_pretrained

_TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "vocab.*", "spiece.model")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run: in eval mode, on its device."""

    model: nn.Module
    kind: heads.ModelKind
    tokenizer: Any  # or the image processor of an image classifier, or None
    limit: int  # of tokens in a sequence
    start_token: int | None = None  # the first token of a text, if the user sets it
    #: Of token sequences: the loss of each token after the first one, and whether it is the
    #: likeliest, for tests on the same sequences.
    losses: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def split(self) -> Split:
        """The body and the head of a causal language model, which all tests share."""
        return Split(self.model)

    def need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, but the model has none: save one next to the weights "
                "with save_pretrained, or in Python pass Loader(tokenizer=...)"
            )
        return self.tokenizer

    def first_token(self) -> int:
        """Return the first token of a text: ``start_token``, else BOS, else EOS."""
        config = getattr(self.model, "config", None)
        named = (
            getattr(holder, name, None)
            for name in ("bos_token_id", "eos_token_id")
            for holder in (self.tokenizer, config)
        )
        for token in (self.start_token, *named):
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
        raise ValueError("the model has no BOS or EOS token: pass Loader(start_token=...)")


@dataclass(frozen=True)
class Loader(NamedSettings):
    """How models are loaded and run.

    Attributes:
        device: if None, a GPU is used if there is one.
        dtype: if None, it is float32 on the CPU and the checkpoint's own dtype elsewhere.
        max_length: the maximum length of sequences in tokens. The model's own limit applies too.
        tokenizer: used instead of the one next to the weights; required for modules in memory.
        start_token: the first token of texts, for a model without a BOS token.
        bits: 4 or 8 quantizes the linear layers to so many bits (bitsandbytes), to train adapters.
        allow_pickle: also read pickled weights (``.bin``), restricted to tensors.
        trust_remote_code: run Python code that comes with a model. Only for authors you trust.

    Example:
        >>> Loader(device="cpu", max_length=256).max_length
        256
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    max_length: int = 1024
    tokenizer: Any = None
    start_token: int | None = None
    bits: Literal[4, 8] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        whole_number("max_length", self.max_length, 2)
        if self.bits not in (None, 4, 8):
            raise ValueError(f"bits must be 4, 8 or None, got {self.bits!r}")

    @contextlib.contextmanager
    def open(
        self, source: ModelSource, base: ModelSource | None = None, head: NewHead | None = None
    ) -> Iterator[Loaded]:
        """Load a model for the duration of the context; free its memory on exit.

        A module in memory is used as it is. ``base`` is the model under an adapter, if the
        adapter does not name it. ``head`` is a new head for the model.
        """
        if isinstance(source, nn.Module):
            with evaluating(source):
                yield self.ready(source, self.tokenizer)
            return
        model = self.load(str(source), base, head)
        try:
            yield self.ready(model, self.tokenizer or self.tokenizer_of(str(source), base))
        finally:
            del model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def ready(self, model: nn.Module, tokenizer: Any) -> Loaded:
        limits = [self.max_length, *_limits(getattr(model, "config", None))]
        for name, part in model.named_modules():
            # RoBERTa's positions start after the padding index, so its table is longer than the
            # longest sequence.
            padding = getattr(part, "padding_idx", None)
            if name.endswith("position_embeddings") and padding is not None:
                limits.append(part.num_embeddings - padding - 1)
        return Loaded(model, heads.model_kind(model), tokenizer, min(limits), self.start_token)

    def config_of(self, source: str | os.PathLike[str]) -> Any:
        return heads.config_of(source, trust_remote_code=self.trust_remote_code)

    def shared_by(self, base: ModelSource, tuned: ModelSource) -> Loader:
        """Return this loader with one maximum length and one dtype that suit both models."""
        configs = []
        for source in (base, tuned):
            if not isinstance(source, nn.Module) and not is_adapter(source):
                with contextlib.suppress(ImportError, ValueError):
                    configs.append(self.config_of(source))
        length = min([self.max_length, *(n for config in configs for n in _limits(config))])
        dtype = self.dtype
        if dtype is None and configs and self.target_device().type != "cpu":
            dtype = getattr(configs[0], "dtype", None)
        return replace(self, max_length=length, dtype=dtype)

    def cannot_generate(self, source: ModelSource) -> str | None:
        """Return why a model cannot generate texts, without loading it; None if it can."""
        name = "the model"
        if isinstance(source, nn.Module):
            kind = heads.model_kind(source)
        elif is_adapter(source) or Path(source).suffix == ".gguf":
            return None
        else:
            try:
                config = self.config_of(source)
            except (ImportError, ValueError) as error:
                return str(error)
            kind, name = heads.model_kind(config), (config.architectures or [name])[0]
        return None if kind == "causal_lm" else f"{name} does not generate texts"

    def target_device(self) -> torch.device:
        if self.device is not None:
            try:
                if torch.zeros(1, device=self.device).is_meta:
                    raise RuntimeError("it holds no values; choose another one, such as cpu")
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"device {self.device}: {first_line(error)}") from error
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load(
        self, source: str, base: ModelSource | None = None, head: NewHead | None = None
    ) -> nn.Module:
        """Load a model of the class in its configuration; an adapter is merged into its base."""
        if head is not None:
            return self.load_with_head(source, head)[0]
        if is_adapter(source):
            return self._load_adapted(Path(source), base)
        device, config = self.target_device(), self.config_of(source)
        where, options = self.location(source)
        self._check_weights(source, config)
        dtype = self.dtype or (torch.float32 if device.type == "cpu" else "auto")
        options |= {"dtype": dtype, "output_loading_info": True, **self._quantization(device)}
        model: nn.Module
        model, info = from_pretrained(self._class_for(config, options), where, **options)
        _refuse_random(source, model, [*info["missing_keys"], *info["mismatched_keys"]])
        return self._placed(model)

    def _quantization(
        self, device: torch.device, skeleton: nn.Module | None = None
    ) -> dict[str, Any]:
        """Return the options to quantize weights while they are loaded, onto their device.

        The head of the ``skeleton`` of a model, which is new, is not quantized.
        """
        if self.bits is None:
            return {}
        require("bitsandbytes", extra="quantized", what=f"a model in {self.bits} bits")
        settings = {"load_in_8bit": True} if self.bits == 8 else {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32 if device.type == "cpu" else torch.bfloat16,
        }  # fmt: skip
        # It would warn in each call that inputs are cast.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        whole = [*head_parts(skeleton), "pooler"] if skeleton is not None else None
        config = heads.import_transformers().BitsAndBytesConfig(
            **settings, llm_int8_skip_modules=whole
        )
        return {"quantization_config": config, "device_map": {"": device}}

    def _placed(self, model: nn.Module) -> nn.Module:
        if not self.bits:
            return model.to(self.target_device()).eval()
        # On some CPUs, bitsandbytes turns weights into a form without a gradient when a model runs
        # in eval mode, and leaves them so.
        packs = "support_avx512bf16_for_cpu"
        for module in model.modules():
            if hasattr(module, packs):
                setattr(module, packs, False)
        return model.eval()

    def skeleton(self, source: str, head: NewHead | None = None) -> nn.Module:
        """Return a model without the values of its weights, as its configuration describes it."""
        transformers = heads.import_transformers()
        if is_adapter(source):
            source = base_of(Path(source))
        config, (_, options) = self.config_of(source), self.location(source)
        cls = self._class_for(config, options)
        if head is not None:
            config.update(head.settings())
            cls = transformers.AutoModelForSequenceClassification
            if head.images:
                cls = transformers.AutoModelForImageClassification
        try:
            trust = {"trust_remote_code": self.trust_remote_code}
            with torch.device("meta"):
                made = getattr(cls, "from_config", None)  # of the classes that choose another one
                model: Any = made(config, **trust) if made else cls(config)
            stored = getattr(config, "quantization_config", None)
            model.is_quantized = self.bits is not None or stored is not None
            return cast(nn.Module, model)
        except Exception as error:  # values that do not fit each other raise many types
            if head is not None:
                raise _no_head(source, head, config, error) from error
            raise ValueError(f"{source} cannot be built: {first_line(error)}") from error

    def load_with_head(self, source: str, head: NewHead) -> tuple[nn.Module, tuple[str, ...]]:
        """Load a model with a new head; also return the names of its new modules."""
        transformers = heads.import_transformers()
        config = self.config_of(source)
        where, options = self.location(source)
        self._check_weights(source, config)
        auto = transformers.AutoModelForSequenceClassification
        if head.images:
            auto = transformers.AutoModelForImageClassification
        options |= {"dtype": self.dtype or torch.float32, "output_loading_info": True}
        if self.bits is not None:
            options |= self._quantization(self.target_device(), self.skeleton(source, head))
        options |= {"ignore_mismatched_sizes": True, **head.settings()}
        try:
            with _no_warnings(transformers):
                model, info = from_pretrained(auto, where, **options)
        except ValueError as error:
            raise _no_head(source, head, config, error) from error
        missing = [str(key) for key in info["missing_keys"]]
        missing += [str(k[0] if isinstance(k, tuple) else k) for k in info["mismatched_keys"]]
        _refuse_random(source, model, [key for key in missing if heads.in_body(key, model)])
        new = heads.new_parts(model, missing, heads.body_of(model))
        heads.draw_weights(model, new)
        return self._placed(model), new

    def location(self, source: str) -> tuple[str, dict[str, Any]]:
        """Return where transformers finds a model, and the options to load it with."""
        where, gguf = heads.locate(source)
        trust = {"trust_remote_code": self.trust_remote_code}
        if gguf:
            return where, {**trust, **gguf}
        path = Path(source)
        if path.is_file() and where != str(source) and path.name != "model.safetensors":
            raise ValueError(
                f"transformers loads only files named model.safetensors: rename {source} to "
                "model.safetensors and move it to a separate directory, together with config.json"
            )
        return where, {**trust, "use_safetensors": None if self.allow_pickle else True}

    def _class_for(self, config: Any, options: Mapping[str, Any]) -> Any:
        """Return the class that a configuration names, of transformers or of the model itself."""
        transformers = heads.import_transformers()
        name = (config.architectures or [""])[0]
        cls: Any = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
        if "gguf_file" in options:  # it names no class
            return transformers.AutoModelForCausalLM
        own = getattr(config, "auto_map", None) or {}
        autos = (auto for auto, cls in own.items() if str(cls).endswith(f".{name}"))
        return getattr(transformers, next(autos, "AutoModel"), transformers.AutoModel)

    def _check_weights(self, source: str, config: Any) -> None:
        """Read the headers of local weights; quantized ones need the settings of their format."""
        path = Path(source)
        if path.exists() and path.suffix != ".gguf":
            weights = open_weights(path, allow_pickle=self.allow_pickle)
            if getattr(config, "quantization_config", None) is None:
                check_not_packed(weights)

    def _load_adapted(self, path: Path, base: ModelSource | None) -> nn.Module:
        peft = require("peft", extra="peft", what=f"the adapter {path}")
        under = base_of(path) if base is None or isinstance(base, nn.Module) else base
        # A config.json next to the adapter describes the head that its base lacks, if finetune
        # wrote it, or is a copy of the base's configuration, if another trainer did.
        trust = self.trust_remote_code
        head = heads.head_like(under, path, trust_remote_code=trust)
        body = self.load(str(under), head=head)
        modules = (name for name, _ in body.named_modules())
        check_adapter(path, modules, peft)
        if (tokens := tokens_in(path)) and tokens != vocabulary_size(body):
            resized: Any = body
            resized.resize_token_embeddings(tokens, mean_resizing=False)
        try:
            adapted, loaded = _with_adapter(peft, body, path)
        except Exception as error:  # settings that do not fit the model raise many types
            raise ValueError(
                f"the adapter {path} does not fit {under}: {first_line(error)}"
            ) from error
        _refuse_misfit(adapted, loaded, path, under)
        try:
            merged: nn.Module = adapted.merge_and_unload()
        except Exception as error:  # kinds that cannot be merged raise many types
            raise ValueError(
                f"PEFT cannot merge the adapter {path}: {first_line(error)}"
            ) from error
        return merged.eval()

    def tokenizer_of(self, source: str, base: ModelSource | None = None) -> Any:
        """Return the tokenizer or image processor of a model or its base; None if there is none."""
        transformers = heads.import_transformers()
        where, gguf = heads.locate(source)
        places: list[tuple[str, dict[str, str]]] = [(where, {})]
        if gguf:
            places.append((where, gguf))
        if isinstance(base, str | os.PathLike):
            places.append((str(base), {}))
        for place, options in places:
            local = Path(place).is_dir() and not options
            for auto, known, what in (
                (transformers.AutoTokenizer, _TOKENIZER_FILES, "tokenizer"),
                (transformers.AutoImageProcessor, _PROCESSOR_FILES, "image processor"),
            ):
                there = any(any(Path(place).glob(pattern)) for pattern in known)
                timm = known is _PROCESSOR_FILES and heads.is_timm(place)
                if local and not there and not timm:
                    continue
                try:
                    return from_pretrained(
                        auto, place, trust_remote_code=self.trust_remote_code, what=what, **options
                    )
                except (OSError, ValueError):
                    if local:  # the files exist but are damaged
                        raise
        return None


def _limits(config: Any) -> list[int]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    found = (getattr(text, name, None) for name in names)
    return [limit for limit in found if isinstance(limit, int) and limit > 0]


def _refuse_random(source: str, model: nn.Module, missing: Iterable[Any]) -> None:
    if names := sorted(map(str, missing)):
        raise ValueError(
            f"{source} is missing weights of {type(model).__name__}, and they would be initialized "
            f"randomly: {shorten(names)}"
        )


def _with_adapter(peft: Any, body: nn.Module, path: Path) -> tuple[Any, Any]:
    """A model with an adapter, and which of their tensors had no counterpart in the other."""
    mapping = getattr(body, "_checkpoint_conversion_mapping", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # they are an error here
        adapted = peft.PeftModel.from_pretrained(body, path)
    # It returns no such list. A second load does.
    return adapted, adapted.load_adapter(path, adapted.active_adapter, key_mapping=mapping)


def _refuse_misfit(adapted: nn.Module, loaded: Any, path: Path, base: Any) -> None:
    """Raise if an adapter has values that its model lacks, or lacks values, which are random."""
    cause = "pass the base model that the adapter was trained on"
    # Beside a resized embedding that is trained in full, PEFT saves a second copy.
    if others := [n for n in loaded.unexpected_keys if ".modules_to_save." not in n]:
        names = shorten(sorted({n.removeprefix("base_model.model.") for n in others}))
        raise ValueError(f"{path} adapts {names}, which {base} does not have: {cause}")
    state = adapted.state_dict()
    missing = {n: state[n].data_ptr() for n in loaded.missing_keys if n in state}
    shared = {tensor.data_ptr() for name, tensor in state.items() if name not in missing}
    if absent := sorted(n for n, place in missing.items() if place not in shared):
        names = shorten([n.removeprefix("base_model.model.") for n in absent])
        raise ValueError(f"{path} has no values of {names}, which {base} has: {cause}")


@contextlib.contextmanager
def _no_warnings(transformers: Any) -> Iterator[None]:
    """Suppress the warning about new weights, which are intended here."""
    verbosity = transformers.utils.logging
    before = verbosity.get_verbosity()
    verbosity.set_verbosity_error()
    try:
        yield
    finally:
        verbosity.set_verbosity(before)


def _no_head(source: str, head: NewHead, config: Any, error: Exception) -> ValueError:
    reason = first_line(error)
    if "Unrecognized configuration class" in reason:
        what = "image" if head.images else "text"
        reason = f"transformers has no {what} classifier for {config.model_type} models"
    return ValueError(f"{source} cannot get a new head ({head}): {reason}")
