"""One model at a time: what kind it is, and everything that is needed to run it.

Transformers' models by directory or hub name, LoRA adapters on their base, GGUF files, and modules
that are in memory already.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from holdfast._batch import evaluating
from holdfast._names import shorten

__all__ = ["Kind", "Loaded", "Loader", "Source"]

Source = str | os.PathLike[str] | nn.Module
Kind = Literal["causal_lm", "masked_lm", "classifier", "image_classifier", "other"]
_KINDS: dict[str, Kind] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classifier",
    "ForImageClassification": "image_classifier",
}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be run.

    Attributes:
        model: in eval mode, on its device.
        kind: what it predicts.
        tokenizer: None where it has none.
        limit: the longest sequence that it takes, and that the user wants.
        start: what a text begins with, if the user says so.
    """

    model: nn.Module
    kind: Kind
    tokenizer: Any
    limit: int
    start: int | None = None

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    def need_tokenizer(self, what: str) -> Any:
        """The tokenizer, or an error that says what it is needed for."""
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and none is beside the model's weights")
        return self.tokenizer

    def start_token(self, given: int | None = None) -> int:
        """What a text begins with: the BOS token, else EOS."""
        config = getattr(self.model, "config", None)
        for token in (
            given,
            self.start,
            getattr(self.tokenizer, "bos_token_id", None),
            getattr(config, "bos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
            getattr(config, "eos_token_id", None),
        ):
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
        raise ValueError("the model names no BOS or EOS token to begin with: pass start_token=")


@dataclass(frozen=True)
class Loader:
    """How models are loaded.

    Attributes:
        device: None takes an accelerator if there is one.
        dtype: None takes float32 on the CPU, and the checkpoint's own elsewhere.
        max_length: sequences are not longer than this, nor than the model's limit.
        tokenizer: to use instead of the one beside the weights.
        allow_pickle: read ``.bin`` files too. They are loaded as plain tensors.
        start: the token that texts begin with, where a model names none.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    max_length: int = 1024
    tokenizer: Any = None
    allow_pickle: bool = False
    start: int | None = None

    @contextlib.contextmanager
    def open(self, source: Source, base: Source | None = None) -> Iterator[Loaded]:
        """A model for a while; one that was loaded for it is let go afterwards.

        Args:
            source: the model.
            base: what a LoRA adapter sits on, if it does not say itself.
        """
        if isinstance(source, nn.Module):
            with evaluating(source):
                yield self.ready(source, self.tokenizer)
            return
        model = self.load(str(source), base)
        try:
            yield self.ready(model, self.tokenizer or self.tokenizer_of(str(source), base))
        finally:
            del model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def alike(self, base: Source, tuned: Source) -> Loader:
        """This loader with one length and one dtype for two models, so that they are comparable."""
        configs = []
        for source in (base, tuned):
            try:
                name = str(source)
                if isinstance(source, nn.Module) or (Path(name) / "adapter_config.json").is_file():
                    continue
                path = Path(name)
                inside = path.suffix in (".safetensors", ".gguf") and path.is_file()
                gguf = path.name if inside and path.suffix == ".gguf" else None
                configs.append(_config(str(path.parent) if inside else name, gguf))
            except (ImportError, ValueError):
                continue
        texts = [c.get_text_config() for c in configs]
        limits = [getattr(text, "max_position_embeddings", None) for text in texts]
        length = min([self.max_length, *(n for n in limits if isinstance(n, int) and n > 0)])
        dtype = self.dtype
        if dtype is None and configs and self._device().type != "cpu":
            dtype = getattr(configs[0], "dtype", None)
        return replace(self, max_length=length, dtype=dtype)

    def cannot_write(self, source: Source) -> str | None:
        """Why a model cannot be asked for texts, told without loading it; None if it can."""
        if isinstance(source, nn.Module):
            return None if kind_of(source) == "causal_lm" else "the model does not write texts"
        path = Path(source)
        if (path / "adapter_config.json").is_file() or path.suffix == ".gguf":
            return None
        try:
            config = _config(str(path.parent if path.is_file() else source), None)
        except (ImportError, ValueError) as error:
            return str(error)
        name = (config.architectures or ["a model of unknown class"])[0]
        return None if _kind(name) == "causal_lm" else f"{name} does not write texts"

    def load(self, source: str, base: Source | None = None) -> nn.Module:
        """A model of its own class, on the device, in eval mode; an adapter is merged into it."""
        transformers = _transformers()
        path = Path(source)
        if (path / "adapter_config.json").is_file():
            return self._adapted(path, base)
        options: dict[str, Any] = {"use_safetensors": None if self.allow_pickle else True}
        where = source
        if path.suffix == ".gguf":
            where, options = str(path.parent), {"gguf_file": path.name}
        elif path.suffix == ".safetensors" and path.is_file():
            if path.name != "model.safetensors":
                raise ValueError(
                    f"{path} is not where transformers looks for weights: put it into a directory "
                    "of its own as model.safetensors, with its config.json"
                )
            where = str(path.parent)
        config = _config(where, options.get("gguf_file"))
        name = (config.architectures or [None])[0]
        cls: Any = getattr(transformers, name or "", None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            gguf = "gguf_file" in options  # which names no class
            cls = transformers.AutoModelForCausalLM if gguf else transformers.AutoModel
        device = self._device()
        dtype = self.dtype or (torch.float32 if device.type == "cpu" else "auto")
        model: nn.Module
        try:
            model, info = cls.from_pretrained(
                where, dtype=dtype, output_loading_info=True, **options
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{source} cannot be loaded: {_first_sentence(error)}") from error
        if lacking := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
            raise ValueError(
                f"{source} lacks weights that a {type(model).__name__} has, or has them under "
                f"other names: {shorten(lacking)}. They would be random"
            )
        return model.to(device).eval()

    def _adapted(self, path: Path, base: Source | None) -> nn.Module:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError(
                f'{path} holds a LoRA adapter, which needs peft: pip install "holdfast[peft]"'
            ) from error
        own = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        under = own if base is None or isinstance(base, nn.Module) else base
        if not under:
            raise ValueError(f"{path} is an adapter and does not say where its base model lies")
        model: Any = PeftModel.from_pretrained(self.load(str(under), None), path)
        merged: nn.Module = model.merge_and_unload()
        return merged.eval()

    def tokenizer_of(self, source: str, base: Source | None = None) -> Any:
        """The tokenizer beside a model, or beside its base; None where there is none."""
        transformers = _transformers()
        path = Path(source)
        places: list[tuple[str, dict[str, str]]] = [(source, {})]
        if path.suffix == ".gguf":
            places = [(str(path.parent), {}), (str(path.parent), {"gguf_file": path.name})]
        elif path.is_file():
            places = [(str(path.parent), {})]
        if isinstance(base, str | os.PathLike):
            places.append((str(base), {}))
        for place, options in places:
            if Path(place).is_dir() and not options and not _has_tokenizer(Path(place)):
                continue
            try:
                return transformers.AutoTokenizer.from_pretrained(place, **options)
            except Exception as error:
                if Path(place).is_dir() and not options:  # it is there, and broken
                    raise ValueError(
                        f"the tokenizer in {place} cannot be loaded: {_first_sentence(error)}"
                    ) from error
        return None

    def ready(self, model: nn.Module, tokenizer: Any) -> Loaded:
        """A model with what is needed to run it."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        limits = [self.max_length]
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(limit := getattr(text, name, None), int) and limit > 0:
                limits.append(limit)
        for name, part in model.named_modules():
            # Positions that begin after the padding's, as RoBERTa's: the table says so itself.
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None):
                limits.append(part.num_embeddings - part.padding_idx - 1)
        return Loaded(model, kind_of(model), tokenizer, min(limits), self.start)

    def _device(self) -> torch.device:
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"device {self.device}: {_first_sentence(error)}") from error
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kind_of(model: nn.Module) -> Kind:
    """What a model predicts, by the name of its class."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    kind = _kind(type(inner).__name__)
    config = getattr(inner, "config", None)
    encodes = hasattr(inner, "bert") or hasattr(inner, "roberta")
    if kind == "causal_lm" and encodes and not getattr(config, "is_decoder", True):
        return "other"  # it sees what comes after
    return kind


def is_headless(model: nn.Module) -> bool:
    """Whether a transformers model is a body alone: its class is called ``…Model``."""
    name = type(model).__name__
    return name.endswith("Model") and _kind(name) == "other"


def _kind(name: str) -> Kind:
    if name.startswith("XLNet"):  # which does not read from left to right
        return "other"
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "other")


def _has_tokenizer(folder: Path) -> bool:
    known = (
        "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model",
        "spiece.model",
    )  # fmt: skip
    return any((folder / name).is_file() for name in known)


def _config(where: str, gguf_file: str | None) -> Any:
    transformers = _transformers()
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    if gguf_file is None and Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise ValueError(f"{where} has no config.json: of bare weights only the drift is measured")
    if Path(where).is_absolute() and not Path(where).exists():
        raise ValueError(f"there is no model in {where}: no such directory")
    try:
        return transformers.AutoConfig.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} is no model: {_first_sentence(error)}") from error


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'running the models needs transformers: pip install "holdfast[eval]"; without it '
            "only the drift of weights is measured"
        ) from error
    return transformers
