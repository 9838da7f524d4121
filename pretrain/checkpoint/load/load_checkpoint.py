"""Load a checkpoint into an engine, in the layout that saved it or in any other."""

from copy import copy
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.rng_state import rng_file, set_rng_state
from pretrain.checkpoint.load.reshard import load_resharded, same_shards, set_loss_scale
from pretrain.checkpoint.load.resume import same_layout
from pretrain.checkpoint.save.file_engine import FileEngine
from pretrain.config.validate import Plan
from pretrain.patches import checkpoint as checkpoint_patch

_SETTINGS = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "loss_scale_config")  # attributes of the optimizer


def load_checkpoint(engine: DeepSpeedEngine, plan: Plan, folder: Path, manifest: Manifest) -> None:
    """Load weights, optimizer, schedule, loss scale, counters and RNG state; collective.

    In the layout that saved, the engine reads its own files, and training continues bit for bit. In another layout each
    rank reads the fragments that it needs.
    """
    if same_layout(manifest.layout, plan.layout) and same_shards(engine, folder):
        engine.checkpoint_engine = FileEngine()
        optimizer = engine.optimizer
        settings = {name: copy(getattr(optimizer, name)) for name in _SETTINGS if hasattr(optimizer, name)}
        checkpoint_patch.load_checkpoint(engine, folder.parent, folder.name)
        for name, value in settings.items():  # DeepSpeed restores the saved run's; this run's JSON applies
            setattr(optimizer, name, value)
        set_loss_scale(engine, manifest.loss_scale)
        set_rng_state(load_pickle(rng_file(folder, dist.get_rank())))
    else:
        load_resharded(engine, folder, manifest)
    assert engine.global_steps == manifest.step, (engine.global_steps, manifest.step)
