"""Runs that share a training: they differ only in merging, which acts after the last update."""

import json
from collections.abc import Sequence

from holdfast.comparison.plan import RunSpec
from holdfast.io import codec as _codec
from holdfast.recipe import Recipe


def trainings(specs: Sequence[RunSpec]) -> list[tuple[RunSpec, ...]]:
    """Group the runs of a plan by training, in the order of the first run of each group.

    The last run of a group trains. If a merging needs the pretrained weights, it is a run with such
    a merging, because others do not keep them. Its result is written last, so a stopped group
    resumes from the checkpoint of this run as long as any result is missing.
    """
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault(_training_of(spec), []).append(spec)
    ordered = (sorted(group, key=_training_run(group).__eq__) for group in groups.values())
    return [tuple(group) for group in ordered]


def _training_of(spec: RunSpec) -> str:
    """Text that is equal for runs with the same training."""
    if _depends_on_model(spec):
        return spec.id
    before = {stage: method for stage, method in spec.settings.items() if stage != "merging"}
    return json.dumps(_codec.encode([before, spec.seed, spec.training]), sort_keys=True)


def _depends_on_model(spec: RunSpec) -> bool:
    """Whether the model decides on the methods: the choice may depend on the merging."""
    return Recipe.from_dict(spec.settings).recall.depends_on_model


def _training_run(group: Sequence[RunSpec]) -> RunSpec:
    needing = (s for s in group if Recipe.from_dict(s.settings).merging.needs_reference)
    return next(needing, group[0])
