"""Train with any options of Run, train_loop and LoopSettings, given by name."""

import dataclasses
import inspect

import torch

from holdfast import LoopSettings, Run, train_loop

SETTINGS = {field.name for field in dataclasses.fields(LoopSettings)}
LOOP = set(inspect.signature(train_loop).parameters)


def tune(model, recipe, data, **options):
    """finetune_loop with flat options: each goes to the settings, the loop or the run."""
    settings = LoopSettings(**{n: options.pop(n) for n in SETTINGS & options.keys()})
    loop = {n: options.pop(n) for n in LOOP & options.keys()}
    was_training = model.training
    torch.manual_seed(options.get("seed", 0))
    run = Run(recipe, model, data, **({"cache": False, "progress": False} | options))
    train_loop(run, settings=settings, **loop)
    return run.finish().train(was_training)
