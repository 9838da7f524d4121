"""Checkpoints of strangers' programs, and the commands that read them: see tests/foreign_files/commands.py."""

import json
from pathlib import Path
from typing import Any

FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "trainer": {"config.json": (), "checkpoint-2/trainer_state.json": (), "checkpoint-2/config.json": (),
                "checkpoint-2/latest": (), "checkpoint-2/generation_config.json": ()},
    "foreign": {"latest": ()}}
PICKLES: dict[str, tuple[str, ...]] = {
    "trainer": ("checkpoint-2/training_args.bin", "checkpoint-2/scheduler.pt"),
    "foreign": ("global_step2/mp_rank_00_model_states.pt",)}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    out = f"{world.out}/adopted"
    return {"foreign": {"import": ["import", str(world.foreign), "--model", f"{world.data}/gpt2.json", "--save", out]},
            "trainer": {"import": ["import", str(world.trainer), "--save", out]}}


def write_files(world: Path) -> None:
    """Train a plain DeepSpeed loop and a Trainer, whose checkpoints are foreign files."""
    import numpy as np

    from tests.extensions.adopt.test_deepspeed_files import GPT2, plain, trainer
    from tests.support.cases import config
    from tests.support.launch import run_worker

    (world / "data/gpt2.json").write_text(json.dumps(GPT2))
    np.save(world / "samples.npy", np.random.default_rng(0).integers(1, 131, (16, 17)))
    shared = {"model": GPT2, "samples": "samples.npy", "steps": 2, "save_at": 2}
    run_worker("other_programs.py", [
        {**plain(GPT2, config(1, micro=4), groups=True), **shared, "name": "foreign"},
        {**trainer(2, bf16=True), **shared, "name": "trainer"}], 1, world)
