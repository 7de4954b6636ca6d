"""Dequantized weights of GGUF files, with the names that transformers gives them."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast._torch.imports import require
from holdfast.io.weights import LiveWeights, Scratch, Spec, Weights

#: Processors that merge several tensors into one, such as experts: these files are loaded whole.
_MANY_TO_ONE = ("Qwen2MoeTensorProcessor", "GptOssTensorProcessor", "MiniMaxM2TensorProcessor")


class GGUFWeights(Weights):
    """Weights in a GGUF file. A tensor is dequantized as a whole; the last one is cached."""

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], stored: Any, processor: Any, config: Any
    ) -> None:
        super().__init__(str(path), specs, config=config, path=path)
        self._stored, self._processor = stored, processor
        self._lock = threading.Lock()
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        with self._lock:
            if self._last[0] != name:
                self._last = (name, torch.empty(0))  # free the old tensor first
                self._last = (name, self._dequantized(name))
            return self._last[1][begin:end]

    def _dequantized(self, name: str) -> Tensor:
        from gguf import dequantize

        stored = self._stored[name]
        values = dequantize(stored.data, stored.tensor_type)
        aside: dict[str, dict[str, Tensor]] = {"tensors": {}}
        done = self._processor.process(
            weights=values, name=stored.name, tensor_key_mapping={}, parsed_parameters=aside
        )
        tensor = aside["tensors"].get(name)
        if tensor is None:
            tensor = torch.tensor(done.weights)
        if tuple(tensor.shape) != self[name].shape:
            raise ValueError(
                f"{name} in {self.label} has shape {tuple(tensor.shape)}, its model "
                f"{self[name].shape}"
            )
        return tensor.reshape(-1)


def open_gguf(path: Path) -> Weights:
    gguf = require("gguf", extra="gguf", what="reading GGUF files")
    transformers = require("transformers", extra="hf", what="reading GGUF files")
    names = require("transformers.modeling_gguf_pytorch_utils", extra="hf", what="GGUF files")
    try:
        reader = gguf.GGUFReader(path)
        config = names.load_gguf_checkpoint(str(path))["config"]
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(
            f"{path} is not a GGUF file that transformers can read: {error}"
        ) from error
    about = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(about, trust_remote_code=False)
    architecture = str(names.read_field(reader, "general.architecture")[0])
    processors: Any = names.TENSOR_PROCESSORS
    processor = processors.get(architecture, names.TensorProcessor)(config=config)
    config = {"architectures": [type(model).__name__], **about.to_dict(), **config}
    if type(processor).__name__ in _MANY_TO_ONE:
        loaded = names.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        return LiveWeights(str(path), loaded["tensors"], config=config)
    mapping = names.get_gguf_hf_weights_map(model, processor)
    stored = {mapping[t.name]: t for t in reader.tensors if t.name in mapping}
    shapes = model.state_dict()
    specs = {name: Spec(tuple(shapes[name].shape), torch.float32) for name in stored}
    return GGUFWeights(path, specs, stored, processor, config)
