"""Recipes under DeepSpeed's ZeRO, stages 1 to 3.

ZeRO concatenates the weights of a group, gives each rank a flat float32 piece of them, and steps
the optimizer once per piece. Here, each piece has its own optimizer from the recipe, over the parts
of parameters in the piece and the same parts of θ*. This is exact for methods that treat each
weight by itself.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.layout import gathered, rank_and_world
from holdfast.reference import Reference, distance
from holdfast.run import Run
from holdfast.stages import Trainable


def check_deepspeed(accelerator: Any, run: Run) -> None:
    """Raise ValueError if DeepSpeed cannot train a run."""
    plugin, recipe = accelerator.deepspeed_plugin, run.recipe
    if plugin.zero_stage == 0:
        raise ValueError(
            "DeepSpeed's ZeRO stage 0 shards nothing: remove the DeepSpeedPlugin, or set "
            "zero_stage to 1, 2 or 3"
        )
    if plugin.get_value("zero_optimization.offload_optimizer.device") == "nvme":
        raise ValueError("offloading the optimizer to NVMe is not supported: offload it to the CPU")
    _, ranks = rank_and_world()
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"there are {ranks} ranks, but Accelerate sees {accelerator.num_processes}: it does "
            "not distribute work with DeepSpeed on CPUs. Use DistributedDataParallel there"
        )
    if any(hasattr(p, "ds_id") for p in run.model.parameters()):
        raise ValueError(
            "the weights were sharded before the run was built. Load the whole model on every "
            "rank: DeepSpeedPlugin(zero3_init_flag=False), and no deepspeed.zero.Init"
        )
    if whole := [type(m).__name__ for _, m in recipe if not m.elementwise]:
        raise ValueError(
            f"{', '.join(whole)} compares the weights of a whole matrix, and ZeRO gives the "
            "optimizer flat pieces. Shard with FSDP2 instead: "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if recipe.update.uses_loss:
        raise ValueError(
            f"{type(recipe.update).__name__} needs the loss before the step, but DeepSpeed makes "
            "the step within the backward pass. Use DistributedDataParallel or FSDP2"
        )
    if type(recipe.trainable).advance is not Trainable.advance:
        raise ValueError(
            f"{type(recipe.trainable).__name__} freezes parts for a while, but ZeRO updates all "
            "parameters. Use DistributedDataParallel or FSDP2"
        )


def settle_deepspeed(accelerator: Any, batch_size: int) -> None:
    """Make the settings of DeepSpeed and of the loop agree; "auto" takes the loop's."""
    plugin = accelerator.deepspeed_plugin
    ours = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "gradient_clipping": 0.0,  # DeepSpeed's own default is 1
    }
    for name, value in ours.items():
        if plugin.get_value(name, "auto") == "auto":
            plugin.deepspeed_config[name] = value
    accumulate = plugin.get_value("gradient_accumulation_steps")
    wanted = accelerator.gradient_accumulation_steps
    if wanted not in (1, accumulate):
        raise ValueError(
            f"gradient_accumulation_steps is {wanted} in the Accelerator and {accumulate} in "
            'DeepSpeed\'s configuration, whose default is 1: set it to "auto" there'
        )
    accelerator.gradient_accumulation_steps = accumulate


@dataclass(frozen=True)
class _Part:
    """A slice of a flattened parameter, and its position in the piece."""

    name: str
    begin: int
    size: int
    at: int

    def of_piece(self, flat: Tensor) -> Tensor:
        return flat.detach().narrow(0, self.at, self.size)

    def of_parameter(self, tensor: Tensor) -> Tensor:
        return tensor.flatten().narrow(0, self.begin, self.size)


@dataclass(frozen=True)
class _Piece:
    """A flat piece of weights, its parts of parameters, and the run that trains them."""

    parts: list[_Part]
    views: list[Tensor]
    run: Run
    optimizer: Optimizer

    def step(self, flat: Tensor, lr: float) -> None:
        for group in self.optimizer.param_groups:
            # With lr 0, an optimizer does not count an update whose gradients are all 0.
            group["lr"] = lr or math.ulp(0.0)
        for part, view in zip(self.parts, self.views, strict=True):
            view.data = part.of_piece(flat)  # DeepSpeed may have moved it
            view.grad = None if flat.grad is None else part.of_piece(flat.grad)
        self.optimizer.step()
        for view in self.views:
            view.grad = None  # so that DeepSpeed can free it

    def distance(self) -> float:
        """‖θ − θ*‖ over the weights that have anchors."""
        anchors: Mapping[str, Tensor] = self.run.anchors or {}
        pairs = [(view, part.name) for part, view in zip(self.parts, self.views, strict=True)]
        return math.hypot(*(distance(v, anchors[name]) for v, name in pairs if name in anchors))


class ZeroOptimizer(Optimizer):
    """The optimizer that DeepSpeed gets for a run whose model is not sharded yet."""

    def __init__(self, run: Run, total_updates: int) -> None:
        self.run, self.total_updates = run, total_updates
        made = run.make_optimizer(total_updates)
        named = [list(zip(g["param_names"], g["params"], strict=True)) for g in made.param_groups]
        self._names = {p: name for group in named for name, p in group}
        self._anchors = self._of_parameters(run.anchors)
        self._importance = {m: self._of_parameters(found) for m, found in run.importance.items()}
        self._pieces: dict[Tensor, _Piece] = {}
        groups = [
            {"params": params, "lr": group["lr"], "weight_decay": group["weight_decay"]}
            for params, group in zip(named, made.param_groups, strict=True)
        ]
        super().__init__(groups, {})

    def take_over(self, zero: Any) -> None:
        """Build the optimizers of the pieces, once DeepSpeed has cut them."""
        # Each would repeat the warnings of the run's optimizer.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, flat, parts in _pieces_of(zero, self._names):
                if parts:
                    self._pieces[flat] = self._piece(flat, parts, self.param_groups[number])
        pulled = [piece for piece in self._pieces.values() if piece.run.anchors]
        self.run.optimizer = pulled[0].optimizer if pulled else self
        self.run.log = self.log  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for flat in group["params"]:
                if flat in self._pieces:
                    self._pieces[flat].step(flat, group["lr"])

    def state_dict(self) -> dict[str, Any]:
        pieces = [piece.optimizer.state_dict() for piece in self._pieces.values()]
        return {"state": {}, "param_groups": [], "pieces": pieces, "run": self.run.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was saved on the same number of ranks."""
        # First, because the anchors of a piece may differ on some ranks only.
        self.run.check_identity(state_dict["run"], "the checkpoint")
        for piece, state in zip(self._pieces.values(), state_dict["pieces"], strict=True):
            piece.optimizer.load_state_dict(state)

    def log(self, *, distance: bool = False) -> dict[str, float]:
        """Like :meth:`holdfast.Run.log`, over the pieces of all ranks. All ranks must call it."""
        pulled = [piece for piece in self._pieces.values() if piece.run.anchors]
        mine = [Run.log(piece.run) for piece in pulled]
        distances = [piece.distance() for piece in pulled] if distance else []
        everyone = gathered((mine, distances))
        values = self.run.recipe.recall.log(self.run)  # it has no pieces
        for row in (row for rows, _ in everyone for row in rows):
            for name, value in row.items():
                if name.startswith("penalty/"):
                    values[name] = values.get(name, 0.0) + value
                else:  # of the first group that is pulled, as without ZeRO
                    values.setdefault(name, value)
        if distance and self.run.anchors is not None:
            values["distance"] = math.hypot(*(d for _, found in everyone for d in found))
        return values

    def _of_parameters(self, reference: Reference | None) -> dict[str, Tensor]:
        """The tensors of a reference by the names of the parameters."""
        if reference is None:
            return {}
        found = reference.match(list(self._names), list(self._names.values()))
        pairs = zip(self._names.values(), found, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def _piece(self, flat: Tensor, parts: list[_Part], group: dict[str, Any]) -> _Piece:
        run = copy.copy(self.run)
        run.optimizer = run.penalties = None
        pulled = [part for part in parts if part.name in self._anchors]
        run.anchors = _cut(self._anchors, pulled)
        run.importance = {
            method: _cut(found, pulled, missing=1.0 if method is run.recipe.update else 0.0)
            if self.run.importance[method] is not None
            else None
            for method, found in self._importance.items()
        }
        views = [part.of_piece(flat) for part in parts]
        settings = {
            "params": [(part.name, view) for part, view in zip(parts, views, strict=True)],
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "initial_lr": max(g["lr"] for g in self.param_groups),  # penalties scale with it
        }
        optimizer = run.recipe.update.optimizer([settings], run, self.total_updates)
        if pulled:
            run.use_optimizer(optimizer, self.total_updates)
        else:
            run.optimizer = optimizer
            run.recall.attach(run)
        return _Piece(parts, views, run, optimizer)


def whole_model(engine: Any) -> nn.Module:
    """Gather the model of a DeepSpeed engine on every rank, and destroy the engine."""
    import deepspeed

    model: nn.Module = engine.module
    whole: dict[Tensor, nn.Parameter] = {}
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters([p]):
            whole[p] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    engine.destroy()
    for module in model.modules():
        module._parameters = {
            name: None if p is None else whole[p] for name, p in module._parameters.items()
        }
    return model


def _pieces_of(zero: Any, names: dict[Tensor, str]) -> Iterator[tuple[int, Tensor, list[_Part]]]:
    """The pieces of this rank: the number of the group, the flat tensor, and its parts."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        flats = zero.fp32_partitioned_groups_flat
        for number, (params, flat) in enumerate(zip(zero.fp16_groups, flats, strict=True)):
            parts, at = [], 0
            for p in params:
                share = p.ds_tensor.ds_numel  # equal on all ranks; the last is padded
                begin = share * torch.distributed.get_rank(p.ds_process_group)
                size = min(share, p.ds_numel - begin)
                if size > 0:
                    parts.append(_Part(names[p], begin, size, at))
                at += share
            yield zero.sub_group_to_group_id[number], flat, parts
    elif hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2
        flats = zero.single_partition_of_fp32_groups
        for number, (params, flat) in enumerate(zip(zero.bit16_groups, flats, strict=True)):
            parts = []
            for p in params:
                if (found := p._hp_mapping) is not None:
                    here, there = found.lp_fragment_address, found.hp_fragment_address
                    parts.append(_Part(names[p], here.start, here.numel, there.start))
            yield number, flat, parts
    else:
        raise ValueError(
            f"DeepSpeed uses its {type(zero).__name__} for these settings, which is not "
            "supported: set zero_stage to 2 or 3"
        )


def _cut(tensors: dict[str, Tensor], parts: list[_Part], missing: float | None = None) -> Reference:
    """The same parts of other tensors; ``missing`` fills absent ones."""
    found = {}
    for part in parts:
        if part.name in tensors:
            found[part.name] = part.of_parameter(tensors[part.name]).clone()
        elif missing is not None:
            found[part.name] = torch.tensor(missing).expand(part.size)
    return Reference(found)
