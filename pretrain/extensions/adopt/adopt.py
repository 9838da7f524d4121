"""Write a run of another program as a run folder with one ordinary checkpoint. One tensor is in memory at a time.

The tensors are in safetensors files. Each file has the flat tensors "fp32", "exp_avg" ... of some parameters, which
have the same settings in the optimizer. The shard index locates them, so that a resume in any layout reads them.
"""

import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.convert.new_folder import check_free_space, new_folder
from pretrain.checkpoint.convert.write_weights import CHUNK_NUMEL, PlannedTensor, write_shards
from pretrain.checkpoint.format.fragments import FileLocation, Fragment
from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of
from pretrain.checkpoint.format.manifest import MANIFEST, AdoptedRecord, Manifest
from pretrain.checkpoint.format.shard_index import BUFFERS, FP32, index_name, index_text, tensor_entry
from pretrain.checkpoint.format.verify import damaged_entry
from pretrain.checkpoint.load.hf_folder import HFFolder, HFTokenizer, find_hf_tokenizer
from pretrain.checkpoint.load.reader import all_finite, chunks_of
from pretrain.checkpoint.save.commit import write_latest
from pretrain.checkpoint.save.save_checkpoint import save_pickle
from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.flags.check_flags import RECIPE_FLAGS
from pretrain.config.model_of_run import Origin
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import OMISSIONS, ForeignRun, Omission
from pretrain.extensions.adopt.mapping import OurRun
from pretrain.extensions.adopt.optimizers import WeightDecay, weight_decay_of
from pretrain.extensions.adopt.run_files import ds_config_of, optimizer_of, run_files
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.monitor.environment import versions
from pretrain.progress import ProgressBar

SOURCE_RECORD = "imported_from.json"  # program and folder; size and SHA-256 of each file that was read
_ENGINE_STATE = "mp_rank_00_model_states.pt"  # read by `CheckpointReader.engine_state`
_SHARD_BYTES = 5 * 10**9
_TORCH_SAVE = (".pt", ".pth", ".bin")  # endings of files that torch.save writes
_ADAM = OPTIMIZERS["adamw"].family  # torch's AdamW is one of its classes
_FIRST_BATCH = -1  # `last_batch_iteration` of DeepSpeed's schedulers before the first step


@dataclass(frozen=True)
class Adoption:
    """A run of another program that can be adopted, and what that takes from it."""

    run: ForeignRun
    config: ModelConfig
    ours: OurRun
    states: tuple[str, ...]  # optimizer states that are taken over
    decay: WeightDecay
    omissions: tuple[Omission, ...]  # all of them accepted
    tokenizer: HFTokenizer | None
    unknown: tuple[str, ...]  # fields of the manifest that the source does not record
    notes: tuple[str, ...]


def plan_adoption(run: ForeignRun, accepted: frozenset[str]) -> Adoption:
    """Check that a run can be adopted. Raises ConfigError, with all omissions that `accepted` does not name.

    Args:
        accepted: names in OMISSIONS.
    """
    config = model_config_from(run.config, f"{run.folder}: config.json")
    ours = OurRun(run, config)
    is_matrix = {name: parameter.is_matrix for name, parameter in config.named_parameters()}
    decay = weight_decay_of(run.weight_decay, ours.sources, is_matrix,
                            optimizer_of(run).get("params", {}).get("weight_decay"))
    omissions = _omissions(run, config, decay)
    missing = [omission for omission in omissions if omission.name not in accepted]
    if missing:
        names = ",".join(dict.fromkeys(omission.name for omission in missing))
        raise ConfigError(str(run.folder), problem="this cannot be taken over: "
                          + "; ".join(f"{omission.name} ({omission.reason})" for omission in missing),
                          remedy=f"--accept_without {names} adopts the run without it")
    notes = [*run.notes, *(f"--accept_without {name} has no effect: nothing of it is lost"
                           for name in sorted(accepted - {omission.name for omission in omissions}))]
    has_states = "optimizer" not in {omission.name for omission in omissions}
    return Adoption(run, config, ours, run.states if has_states else (), decay, tuple(omissions),
                    _tokenizer(run, config), tuple(_unknown(run)), tuple(notes))


def _omissions(run: ForeignRun, config: ModelConfig, decay: WeightDecay) -> list[Omission]:
    """Return what the source has and lacks that the reader has reported, and what follows from its values."""
    found = [omission for omission in run.omissions if omission.name != "rng"]
    found += _omitted_buffers(run, config)
    named = {omission.name for omission in found}
    assert named <= OMISSIONS.keys(), named
    kind = str(run.optimizer.get("type", ""))
    implied = {
        "optimizer": "it has no states of the optimizer" if not run.states else
        f"this program has no optimizer {kind or 'of an unknown type'}" if kind.lower() not in OPTIMIZERS else "",
        "data_position": "" if run.consumed_samples is not None else
        "it does not record how many samples the run has consumed" if run.consumed_tokens is None else
        f"it records {run.consumed_tokens} consumed tokens: --seq_length N makes samples of them",
        "loss_scale": "it is a run in fp16 without the state of its loss scaler"
        if run.precision == "fp16" and run.loss_scale is None else "",
        "weight_decay": decay.problem,
        "rng": "the model has dropout, and continues with other random numbers"
        if config.implementation.has_dropout(config) else ""}
    return found + [Omission(name, reason) for name, reason in implied.items() if reason and name not in named]


def _omitted_buffers(run: ForeignRun, config: ModelConfig) -> list[Omission]:
    """Return the buffers that the model does not have, and those that the source does not have."""
    expected = {theirs for _, theirs, _ in config.named_buffers()}
    cases = (run.buffers.keys() - expected, "the buffers {}, which are not parameters"), \
        (expected - run.buffers.keys(), "the source does not have the buffers {}, which begin with their first values")
    return [Omission("other_states", text.format(shorten(", ".join(sorted(names))))) for names, text in cases if names]


def _buffers(run: ForeignRun, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the buffers under our names. Raises ConfigError for one of another shape, or that is not finite."""
    result = {}
    for ours, theirs, buffer in config.named_buffers():
        if theirs in run.buffers:
            result[ours] = run.buffers[theirs].float().clone()
            if tuple(result[ours].shape) != buffer.shape or not all_finite(result[ours].flatten()):
                raise ConfigError(f"{run.folder}: {theirs}", problem="this buffer has another shape than the model's, "
                                  "or values that are NaN or infinite", remedy="adopt another checkpoint of the run")
    return result


def _unknown(run: ForeignRun) -> Iterator[str]:
    """Yield the fields of the manifest that the source does not record."""
    yield from ("data_fingerprint", "scheduler", "schedule")
    for name, value in (("optimizer", run.optimizer), ("global_batch_size", run.global_batch_size),
                        ("seed", run.seed), ("seq_length", run.seq_length)):
        if not value and value != 0:
            yield name


def _tokenizer(run: ForeignRun, config: ModelConfig) -> HFTokenizer | None:
    """Return the tokenizer in the checkpoint's folder or next to it; None: there is none."""
    for folder in (run.folder, run.folder.parent):
        found = find_hf_tokenizer(HFFolder(folder, config, (), {}))
        if found is not None:
            return found
    return None


def adopt(plan: Adoption, out: Path) -> Manifest:
    """Write the run folder `out`: the checkpoint, run.yaml, ds_config.json, the tokenizer. Raises ConfigError."""
    run, states = plan.run, (FP32, *plan.states)
    shards = _shards(plan)
    check_free_space(out, sum(4 * len(states) * numel for _, numel in _sizes(shards, plan)))
    source = _hash_sources(run)
    with new_folder(out) as temporary:
        folder = temporary / "checkpoints" / f"global_step{run.step}"
        folder.mkdir(parents=True)
        planned = {file: [PlannedTensor(state, "fp32", (numel,)) for state in states]
                   for (file, _), numel in ((shard, numel) for shard, numel in _sizes(shards, plan))}
        records = write_shards(folder, planned, _chunks(plan, [names for _, names in shards], states))
        for name, text in ((index_name(0), _index(plan, shards)), (SOURCE_RECORD, json.dumps(source, indent=1))):
            (folder / name).write_text(text, encoding="utf-8")
        with open(folder / _ENGINE_STATE, "wb") as file:
            save_pickle({**_engine_state(run, ds_config_of(run)[0]), BUFFERS: _buffers(run, plan.config)}, file)
        for name in (index_name(0), SOURCE_RECORD, _ENGINE_STATE):
            records[name] = FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
        origin = Origin(str(run.folder.absolute()), str(run.folder.absolute()), records[SOURCE_RECORD].sha256)
        manifest = replace(_manifest(plan), files=records, origin=asdict(origin))
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        write_latest(folder)
        for name, text in run_files(run, plan.decay, out).items():
            (temporary / name).write_text(text, encoding="utf-8")
        if plan.tokenizer is not None:
            (temporary / "tokenizer").mkdir()
            for path in plan.tokenizer.files:
                shutil.copyfile(path, temporary / "tokenizer" / path.name)
    return manifest


Shard = tuple[str, list[str]]  # file, and our parameters in it


def _shards(plan: Adoption) -> list[Shard]:
    """Divide the parameters into files, so that those of a file have the same weight decay."""
    per_element = 4 * (1 + len(plan.states))
    shards: list[list[str]] = []
    for decayed in (True, False):
        used = _SHARD_BYTES
        for name, rule in plan.ours.rules.items():
            if plan.decay.decays[name] != decayed:
                continue
            if used + prod(rule.shape) * per_element > _SHARD_BYTES:
                shards.append([])
                used = 0
            shards[-1].append(name)
            used += prod(rule.shape) * per_element
    return [(f"adopted-{number:05d}-of-{len(shards):05d}.safetensors", names)
            for number, names in enumerate(shards, 1)]


def _sizes(shards: Sequence[Shard], plan: Adoption) -> list[tuple[Shard, int]]:
    """Return the shards with their numbers of weights."""
    return [((file, names), sum(prod(plan.ours.rules[name].shape) for name in names)) for file, names in shards]


def _chunks(plan: Adoption, shards: Sequence[Sequence[str]], states: Sequence[str]) -> Iterator[torch.Tensor]:
    """Yield the flat values of all states in the order of the files. Raises ConfigError for NaN and infinity."""
    for names in shards:
        for state in states:
            for name in names:
                flat = plan.ours.tensor(name, state).view(-1)
                if not all_finite(flat):
                    raise ConfigError(f"{plan.run.folder}: {', '.join(plan.ours.sources[name][:1])} {state}",
                                      problem="it has values that are NaN or infinite",
                                      remedy="adopt an earlier checkpoint of the run")
                for start, length in chunks_of(flat.numel(), CHUNK_NUMEL):
                    yield flat[start:start + length]
                del flat


def _index(plan: Adoption, shards: Sequence[Shard]) -> str:
    """Return the text of the shard index."""
    scalars = {"step": float(plan.run.optimizer_step)} if plan.states else {}
    entries = []
    for file, names in shards:
        fragments, offset = [], 0
        for name in names:
            shape = plan.ours.rules[name].shape
            fragments.append(Fragment(name, shape, 0, prod(shape), offset))
            offset += prod(shape)
        location = FileLocation(file, ())
        entries.append(tensor_entry(location.at(FP32), location, fragments,
                                    group=0 if plan.decay.decays[names[0]] else 1, elementwise=plan.states,
                                    scalars=scalars))
    row = OPTIMIZERS.get(str(plan.run.optimizer.get("type", "")).lower())
    return index_text("AdamW" if row is None or row.family == _ADAM else row.name, _groups(plan), entries)


def _groups(plan: Adoption) -> list[dict[str, Any]]:
    """Return the settings of the two parameter groups: with weight decay, and without."""
    def as_floats(value: Any) -> Any:
        return [float(item) for item in value] if isinstance(value, (list, tuple)) else float(value)

    settings = {name: as_floats(value) for name, value in optimizer_of(plan.run).get("params", {}).items()
                if isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool)}
    if "lr" in settings:
        settings["initial_lr"] = settings["lr"]
    rate = plan.run.schedule.get("next_rate", plan.run.learning_rate)
    if rate is not None:
        settings["lr"] = float(rate)
    return [{**settings, "weight_decay": plan.decay.value or 0.0}, {**settings, "weight_decay": 0.0}]


def _engine_state(run: ForeignRun, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that a resume reads.

    The position in the schedule has the names of torch's LambdaLR and of DeepSpeed's own schedulers, so that both load
    it. They count updates that were applied.
    """
    applied = run.step - run.skipped_steps
    scheduler = {"last_epoch": applied, "_step_count": applied + 1, "_last_lr": [], "lr_lambdas": [],
                 "last_batch_iteration": applied + _FIRST_BATCH}
    return {"global_steps": run.step, "global_samples": run.consumed_samples or 0, "skipped_steps": run.skipped_steps,
            "lr_scheduler": scheduler, "ds_config": ds_config, "module": None}


def _manifest(plan: Adoption) -> Manifest:
    run, optimizer = plan.run, optimizer_of(plan.run)
    # DeepSpeed does not clip if its JSON does not name a norm
    clipping = run.ds_config.get("gradient_clipping", 0.0) if run.ds_config else None
    record: AdoptedRecord = {
        "program": run.program, "folder": str(run.folder.absolute()), "unknown": list(plan.unknown),
        "learning_rate": run.learning_rate, "next_rate": run.schedule.get("next_rate"),
        "skipped_steps": run.skipped_steps,
        "losses": {omission.name: omission.reason for omission in plan.omissions}}
    return Manifest(
        step=run.step, consumed_samples=run.consumed_samples or 0, world_size=1, data_parallel_size=1,
        pipeline_stages=1, zero_stage=0, precision=run.precision, grad_accum_dtype=None, offload_optimizer="none",
        offload_param="none", optimizer=optimizer, global_batch_size=run.global_batch_size or 1, seed=run.seed or 0,
        seq_length=run.seq_length or plan.config.max_positions, model=plan.config.hf_config, data_fingerprint="",
        tokenizer_fingerprint=plan.tokenizer.fingerprint if plan.tokenizer else None, versions=versions(),
        loss_scale=run.loss_scale, finite=True, no_weight_decay=sorted(plan.decay.no_weight_decay),
        recipe={**{name: value for name, value in run.flags.items() if name in RECIPE_FLAGS},
                **({"gradient_clipping": float(clipping)} if isinstance(clipping, (int, float)) else {}),
                "decay_vectors": plan.decay.decay_vectors},
        adopted=record)


def _hash_sources(run: ForeignRun) -> dict[str, Any]:
    """Return the record of the source: program, folder, and size and SHA-256 of each file.

    Raises ConfigError for files of `torch.save` with damaged bytes.
    """
    total, files = sum(path.stat().st_size for path in run.files), {}
    with ProgressBar("hashing", total) as progress:
        for path in run.files:
            try:
                record = FileRecord(path.stat().st_size, sha256_of(path))
                damaged = damaged_entry(path) if path.suffix in _TORCH_SAVE else None
            except (OSError, zipfile.BadZipFile) as error:
                reason = getattr(error, "strerror", error)
                raise ConfigError(str(path), problem=f"it cannot be read: {reason}") from None
            if damaged is not None:
                raise ConfigError(str(path), problem=f"its part {shorten(damaged)} is damaged: it has not its recorded "
                                  "CRC-32", remedy="copy the file again, or adopt another checkpoint")
            name = str(path.relative_to(run.folder)) if path.is_relative_to(run.folder) else str(path)
            files[name] = asdict(record)
            progress.advance(record.bytes, path.name)
    return {"program": run.program, "folder": str(run.folder.absolute()), "step": run.step, "files": files}
