"""Load a checkpoint into an engine, in the layout of the run that wrote it or in another one."""

from copy import copy
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.pickles import load_pickle, rng_file, set_rng_state
from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.checkpoint.load.init_from import InitialWeights
from pretrain.checkpoint.load.reader import open_weights
from pretrain.checkpoint.load.reshard import (
    fill_weights,
    load_resharded,
    same_shards,
    seed_generators,
    set_loss_scale,
    update_16bit_weights,
)
from pretrain.checkpoint.load.resume import same_layout
from pretrain.checkpoint.save.file_engine import FileEngine
from pretrain.config.validate import Plan
from pretrain.engine.optimizer import restore_settings
from pretrain.engine.patches import pipeline as pipeline_patches
from pretrain.engine.recipe import set_recipe_states

# attributes of DeepSpeed's optimizer that come from the JSON; its load_state_dict overwrites them with saved values
_JSON_SETTINGS = ("clip_grad", "loss_scaler", "dynamic_loss_scale", "loss_scale_config")


def load_checkpoint(engine: DeepSpeedEngine, plan: Plan, folder: Path, manifest: Manifest) -> None:
    """Load weights, optimizer states, schedule, loss scale and counters; collective.

    If layout and shards are those of the run that wrote the checkpoint, DeepSpeed reads its own files, and the states
    of the random number generators are restored. With the same batch sizes and data, training then continues bit for
    bit. Otherwise each rank reads the fragments that it needs, and `load_resharded` seeds the generators again. The
    optimizer's settings (rates, betas, weight decay ...) are those of the plan.
    """
    if same_layout(manifest.layout, plan.layout) and same_shards(engine, folder):
        engine.checkpoint_engine = FileEngine()
        optimizer = engine.optimizer
        settings = {name: copy(getattr(optimizer, name)) for name in _JSON_SETTINGS if hasattr(optimizer, name)}
        pipeline_patches.load_checkpoint(engine, folder.parent, folder.name)
        engine.checkpoint_engine = FileEngine()  # release the content of the last file
        for name, value in settings.items():  # this run's JSON applies, not the saved run's
            setattr(optimizer, name, value)
        if manifest.expert_parallel_size > 1 and manifest.zero_stage < 3:
            # DeepSpeed 0.19.8 (runtime/engine.py, _save_moe_checkpoint) writes the model's weights of the first rank
            # only, so the other ranks have loaded its experts; their own are in the optimizer's files
            update_16bit_weights(engine)
        set_loss_scale(engine, manifest.loss_scale)
        set_rng_state(load_pickle(rng_file(folder, dist.get_rank())))
    else:
        load_resharded(engine, folder, manifest)
    if plan.args.seed != manifest.seed:  # --override seed
        seed_generators(plan.args.seed, manifest.step)
    restore_settings(engine)
    set_recipe_states(engine, manifest.recipe_states)
    assert engine.global_steps == manifest.step, (engine.global_steps, manifest.step)


def load_weights(engine: DeepSpeedEngine, weights: InitialWeights) -> None:
    """Fill the weights. Optimizer, schedule, counters and random numbers remain those of a new run. Collective."""
    source = weights.source
    fill_weights(engine, lambda: open_weights(source if isinstance(source, HFFolder) else source[0]))


def load_checkpoint_weights(engine: DeepSpeedEngine, folder: Path) -> None:
    """Fill the weights from a checkpoint, and load nothing else of it. Collective."""
    fill_weights(engine, lambda: open_weights(folder))
