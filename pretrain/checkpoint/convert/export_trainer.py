"""Write a checkpoint as a folder checkpoint-N from which transformers.Trainer with DeepSpeed resumes."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState

from pretrain.checkpoint.convert.export_hf import conversion_text, write_hf
from pretrain.checkpoint.convert.new_folder import check_free_space, fill_new_folder
from pretrain.checkpoint.convert.plan_export import ExportPlan
from pretrain.checkpoint.convert.universal import LATEST, any_scheduler, universal_bytes, write_universal
from pretrain.checkpoint.format.hashed_files import FileRecord
from pretrain.checkpoint.load.find_checkpoint import run_folder_of
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_start

_ONLY_AT_THE_END = 10**9  # an interval of 0 here; the Trainer divides by it


def export_trainer(plan: ExportPlan) -> list[str]:
    """Write the files of `export_hf`, a universal checkpoint and the Trainer's state into the new folder `plan.out`.

    The Trainer (5.23, integrations/deepspeed.py, `deepspeed_load_checkpoint`) loads the newest checkpoint of DeepSpeed
    in the folder. With `"checkpoint": {"load_universal": true}` this is the one that `latest_universal` names.

    Return notes for the user. Raises ConfigError.
    """
    notes, intervals = list(plan.notes), _intervals(plan.folder)
    shown = ", ".join(f"{name} {value}" for name, value in intervals.items())
    notes.append(f"trainer_state.json has {shown}: a Trainer "
                 "that resumes uses them, and not those of its TrainingArguments; change them in this file")

    def write(temporary: Path) -> dict[str, FileRecord]:
        records = write_hf(plan, temporary, notes)
        name = f"global_step{plan.manifest.step}"
        (temporary / name).mkdir()
        write_universal(plan.folder, plan.manifest, temporary / name, plan.config)
        (temporary / LATEST).write_text(name)
        _write_state(plan, temporary, intervals)
        return records

    if not plan.out.exists():
        check_free_space(plan.out, plan.num_bytes + universal_bytes(plan.config))
    fill_new_folder(plan.folder, plan.out, f"trainer {conversion_text(plan)}", write)
    return notes


def _intervals(checkpoint: Path) -> dict[str, int]:
    """Return the steps between two lines of the log, evaluations and checkpoints, as the run of a checkpoint has them.

    TrainerState has 500 if its file has no number, and the Trainer (5.23) prefers the file to TrainingArguments.
    """
    flags: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        run = run_folder_of(checkpoint)
        flags = {} if run is None else newest_start(run)["flags"]
    found = {}
    for theirs, ours in (("logging_steps", "log_interval"), ("eval_steps", "eval_interval"),
                         ("save_steps", "save_interval")):
        value = flags.get(ours, getattr(RunArguments, ours))
        found[theirs] = value if isinstance(value, int) and value > 0 else _ONLY_AT_THE_END
    return found


def _write_state(plan: ExportPlan, folder: Path, intervals: dict[str, int]) -> None:
    """Write trainer_state.json, and scheduler.pt, which the Trainer reads if the JSON has no optimizer."""
    manifest, engine = plan.manifest, CheckpointReader(plan.folder).engine_state()
    micro_batch_size = engine["ds_config"].get("train_micro_batch_size_per_gpu")
    state = TrainerState(
        global_step=manifest.step, max_steps=manifest.step, num_train_epochs=1, **intervals,
        num_input_tokens_seen=manifest.consumed_samples * manifest.seq_length,
        train_batch_size=micro_batch_size if isinstance(micro_batch_size, int) else 1, total_flos=0,
        # without its entry, the first save after the resume ends with a KeyError (transformers 5.23, _save_checkpoint)
        stateful_callbacks=[TrainerControl()])
    state.save_to_json(str(folder / "trainer_state.json"))
    torch.save(any_scheduler(engine["global_steps"] - engine["skipped_steps"]), folder / "scheduler.pt")
