"""Write a checkpoint as a folder checkpoint-N from which transformers.Trainer with DeepSpeed resumes."""

from pathlib import Path

import torch
from transformers import TrainerControl, TrainerState

from pretrain.checkpoint.convert.export_hf import conversion_text, write_hf
from pretrain.checkpoint.convert.new_folder import check_free_space, fill_new_folder
from pretrain.checkpoint.convert.plan_export import ExportPlan
from pretrain.checkpoint.convert.universal import LATEST, any_scheduler, universal_bytes, write_universal
from pretrain.checkpoint.format.hashed_files import FileRecord
from pretrain.checkpoint.load.reader import CheckpointReader


def export_trainer(plan: ExportPlan) -> list[str]:
    """Write the files of `export_hf`, a universal checkpoint and the Trainer's state into the new folder `plan.out`.

    The Trainer (5.23, integrations/deepspeed.py, `deepspeed_load_checkpoint`) loads the newest checkpoint of DeepSpeed
    in the folder. With `"checkpoint": {"load_universal": true}` this is the one that `latest_universal` names.

    Return notes for the user. Raises ConfigError.
    """
    notes = list(plan.notes)

    def write(temporary: Path) -> dict[str, FileRecord]:
        records = write_hf(plan, temporary, notes)
        name = f"global_step{plan.manifest.step}"
        (temporary / name).mkdir()
        write_universal(plan.folder, plan.manifest, temporary / name, plan.config)
        (temporary / LATEST).write_text(name)
        _write_state(plan, temporary)
        return records

    if not plan.out.exists():
        check_free_space(plan.out, plan.num_bytes + universal_bytes(plan.config))
    fill_new_folder(plan.folder, plan.out, f"trainer {conversion_text(plan)}", write)
    return notes


def _write_state(plan: ExportPlan, folder: Path) -> None:
    """Write trainer_state.json, and scheduler.pt, which the Trainer reads if the JSON has no optimizer."""
    manifest, engine = plan.manifest, CheckpointReader(plan.folder).engine_state()
    micro_batch_size = engine["ds_config"].get("train_micro_batch_size_per_gpu")
    state = TrainerState(
        global_step=manifest.step, max_steps=manifest.step, num_train_epochs=1,
        num_input_tokens_seen=manifest.consumed_samples * manifest.seq_length,
        train_batch_size=micro_batch_size if isinstance(micro_batch_size, int) else 1, total_flos=0,
        # without its entry, the first save after the resume ends with a KeyError (transformers 5.23, _save_checkpoint)
        stateful_callbacks=[TrainerControl()])
    state.save_to_json(str(folder / "trainer_state.json"))
    torch.save(any_scheduler(engine["global_steps"] - engine["skipped_steps"]), folder / "scheduler.pt")
