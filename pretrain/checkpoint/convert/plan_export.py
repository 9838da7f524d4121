"""Decide what an export writes, and check it, without torch: checkpoint, dtype, tokenizer, folder, and model card."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.convert.new_folder import check_new_folder
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint, run_folder_of, tokenizer_of
from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.layout import DTYPE_BYTES
from pretrain.config.schedule import schedule_from_json, schedule_text
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import Tokenizer, check_links, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.hub import is_repository
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.monitor.read_run_folder import newest_start, read_metrics

SHARD_GB = 5.0  # default size of a weights file
_MOST_SOURCES = 50  # rows of a blend
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
{base_model}tags:
- ds-pretrain
- deepspeed
- {architecture}
---

# {name}

A {architecture} language model with {parameters} parameters, {origin}.

```python
from transformers import AutoModelForCausalLM{import_tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}"){load_tokenizer}
```

## Model

{model}

## Training

{training}

## Versions

{versions}
"""


@dataclass(frozen=True)
class ExportPlan:
    """A checked export."""

    folder: Path  # the checkpoint's
    manifest: Manifest
    config: ModelConfig
    out: Path
    dtype: str  # "fp32", "bf16" or "fp16"
    shard_bytes: int  # largest size of a weights file, unless one tensor is larger
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]  # shown to the user

    @property
    def run(self) -> Path | None:
        """The run folder with run.json and metrics.jsonl; None without one."""
        return run_folder_of(self.folder)

    @property
    def num_bytes(self) -> int:
        """Size of the exported weights."""
        return self.config.num_parameters() * DTYPE_BYTES[self.dtype]


def plan_export(path: Path, out: Path, *, step: int | None = None, dtype: str | None = None,
                shard_gb: float = SHARD_GB, tokenizer: str | None = None, with_tokenizer: bool = True) -> ExportPlan:
    """Check an export of the checkpoint at `path`. Only manifests, the tokenizer and file sizes are read.

    Args:
        path: run folder or checkpoint.
        out: new folder.
        step: step of the checkpoint; None: the newest good one.
        dtype: of the exported weights; None: the precision of the run.
        tokenizer: path; None: the run's tokenizer, or none if the run had none.
        with_tokenizer: whether the tokenizer is exported. If not, only the ids of its special tokens are needed, and it
            may be missing.

    Raises ConfigError.
    """
    folder, manifest, checkpoint_notes = find_checkpoint(path, step)
    check_new_folder(out)
    config = model_config_from(manifest.model, str(folder / MANIFEST))
    try:
        loaded, notes = _find_tokenizer(folder, manifest, tokenizer)
    except ConfigError:
        if with_tokenizer:
            raise
        loaded, notes = None, ()
    if loaded is not None:
        # {}, so that no special tokens are compared: the export has the tokenizer's
        check_tokenizer_fits(loaded.ids, {}, vocab_size=config.vocab_size, where=f"--tokenizer {loaded.path}",
                             remedy="name the tokenizer of this model")
    return ExportPlan(folder, manifest, config, out, dtype or manifest.precision, max(1, round(shard_gb * 1e9)), loaded,
                      (*checkpoint_notes, *notes))


def check_has_states(folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError unless the universal format can hold the optimizer states of a checkpoint."""
    if manifest.weights_only:
        raise ConfigError(str(folder), problem="this checkpoint has only weights, and the universal format needs the "
                          "optimizer's states", remedy="name a checkpoint that a run wrote")
    if manifest.initialization.get("mup_base_width") is not None:
        raise ConfigError(str(folder), problem="it was trained with --mup_base_width, and DeepSpeed's universal format "
                          "has one learning rate for all parameters",
                          remedy="resume with ds-pretrain, which loads checkpoints of any layout")
    row = OPTIMIZERS.get(manifest.layout.optimizer)
    is_own = ":" in manifest.layout.optimizer  # the user's class, which nothing imports here
    if is_own or (row is not None and (not row.elementwise or row.states_in_blocks)):
        raise ConfigError(str(folder), problem=f"it was trained with {manifest.layout.optimizer}, and the "
                          "universal format has only optimizer states with a number for each weight",
                          remedy="export the weights with --format transformers")


def check_trainer_name(out: Path, step: int) -> None:
    """Raise ConfigError if the folder has the name of a Trainer's checkpoint of another step."""
    named = re.fullmatch(r"checkpoint-(\d+)", out.name)
    if named and int(named[1]) != step:
        raise ConfigError("--output", problem=f"{out.name} is the name of step {named[1]}, and the checkpoint is of "
                          f"step {step}", remedy=f"name it checkpoint-{step}")


def _find_tokenizer(folder: Path, manifest: Manifest, path: str | None) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the tokenizer to export, and notes about it."""
    recorded = manifest.tokenizer_fingerprint
    if path is not None:
        tokenizer = load_tokenizer(path)
        if recorded in (None, tokenizer.fingerprint):
            return tokenizer, ()
        return tokenizer, (f"{tokenizer.path} is another file than the tokenizer of the run that wrote the checkpoint",)
    try:
        path = tokenizer_of(folder)
    except ConfigError:
        if recorded is not None:
            raise
        return None, ("the output has no tokenizer, because the run had none; --tokenizer adds one",)
    tokenizer = load_tokenizer(path)
    if tokenizer.path.absolute().is_relative_to(folder.absolute().parent.parent):  # a part of the run folder
        check_links(tokenizer.path.parent)
    if recorded not in (None, tokenizer.fingerprint):
        raise ConfigError(str(tokenizer.path), problem="it has changed since the checkpoint was written",
                          remedy="restore the file, or name a tokenizer with --tokenizer")
    return tokenizer, ()


def model_card(plan: ExportPlan) -> str:
    """Return the model card. Facts come from the manifest and, if there are any, run.json and metrics.jsonl."""
    name, config = plan.out.absolute().name, plan.config
    tokenizer = plan.tokenizer is not None
    versions = {**plan.manifest.versions, "git commit": _start(plan).get("git_commit")}
    origin = "pretrained with ds-pretrain and DeepSpeed"
    if plan.manifest.averaged:
        origin = f"the average of {len(plan.manifest.averaged)} checkpoints that ds-pretrain and DeepSpeed trained"
    elif plan.manifest.weights_only:
        origin = "imported into ds-pretrain and exported without training"
    base = _origin(plan)
    return _CARD.format(
        base_model=f"base_model: {base}\n" if base and is_repository(base) else "",
        name=name, architecture=config.architecture, parameters=f"{config.num_parameters():,}", origin=origin,
        import_tokenizer=", AutoTokenizer" if tokenizer else "",
        load_tokenizer=f'\ntokenizer = AutoTokenizer.from_pretrained("{name}")' if tokenizer else "",
        model=_table(_model_facts(plan)), training=_table(_training_facts(plan)), versions=_table(versions))


def _model_facts(plan: ExportPlan) -> dict[str, Any]:
    config = plan.config
    return {"architecture": config.architecture, "parameters": f"{config.num_parameters():,}",
            "layers": config.num_layers, "hidden size": config.hidden_size,
            "attention heads": f"{config.num_heads}, and {config.num_kv_heads} for keys and values",
            "positions": f"{config.max_positions:,} tokens", "vocabulary": f"{config.vocab_size:,} tokens",
            "weights in these files": plan.dtype}


def _training_facts(plan: ExportPlan) -> dict[str, Any]:
    manifest, start = plan.manifest, _start(plan)
    if manifest.averaged:
        return {"average of checkpoints": ", ".join(
            f"{source['weight']:.4g} x step {source['step']:,}" for source in manifest.averaged),
            "initial weights": _origin(plan) or "random"}
    if manifest.weights_only:
        return {"training": "none by this program", "weights": _origin(plan)}
    tokens = manifest.consumed_samples * manifest.seq_length
    settings = manifest.optimizer.get("params", {})
    return {
        "steps": f"{manifest.step:,}" + (f" of {start['train_steps']:,}" if "train_steps" in start else ""),
        "samples": f"{manifest.consumed_samples:,} of {manifest.seq_length:,} tokens", "tokens": f"{tokens:,}",
        "training loss": _loss(plan, "loss"), "validation loss": _validation_loss(plan),
        "data fingerprint": manifest.data_fingerprint, **_data_facts(manifest.data or {}),
        "tokenizer fingerprint": manifest.tokenizer_fingerprint,
        "global batch size": f"{manifest.global_batch_size:,} samples",
        "batch schedule": manifest.recipe.get("batch_schedule"), "precision": manifest.precision,
        "learning rate": _schedule_text(manifest.schedule),
        "layout": manifest.layout_text, "seed": manifest.seed, "initial weights": _origin(plan) or "random",
        "optimizer": ", ".join([str(manifest.optimizer.get("type")), *(f"{k} {v}" for k, v in settings.items())])}


def _schedule_text(schedule: Mapping[str, Any] | None) -> str | None:
    """Describe the schedule of a manifest: of the flags, or of the JSON."""
    if schedule is None or "kind" not in schedule:
        return None if schedule is None else schedule.get("type")
    return schedule_text(schedule_from_json(schedule))


def _data_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hash of the training data; of a blend, the weights and the hash of each source."""
    if "sources" not in data:
        return {"data SHA-256": data.get("sha256")}
    facts = {}
    for number, source in enumerate(data["sources"][:_MOST_SOURCES]):
        phases = [(f"from sample {phase['from_samples']:,} on " if phase["from_samples"] else "")
                  + f"{phase['weights'][number]:.1%}" for phase in data["proportions"]]
        facts[f"data {Path(source['prefix']).name}"] = f"{', '.join(phases)} of the samples; SHA-256 " \
                                                       f"{source['sha256'] or 'not known yet'}"
    return {"sources": len(data["sources"]), **facts}


def _origin(plan: ExportPlan) -> str:
    """Return the repository, or the name without the path, of the weights that the run started from; "" without any."""
    name = plan.manifest.origin["name"] if plan.manifest.origin else ""
    return name if is_repository(name) else Path(name).name


def _start(plan: ExportPlan) -> dict[str, Any]:
    """Return the newest record of run.json; an empty one without this file."""
    return {} if plan.run is None else newest_start(plan.run)


def _loss(plan: ExportPlan, key: str, **wanted: str) -> str | None:
    """Return the last value of a key of metrics.jsonl up to the checkpoint's step, with its step."""
    rows = [] if plan.run is None else read_metrics(plan.run)
    found = [row for row in rows if isinstance(row.get(key), float) and isinstance(row.get("step"), int)
             and row["step"] <= plan.manifest.step and all(row.get(name) == value for name, value in wanted.items())]
    return f"{found[-1][key]:.4f} nats per token at step {found[-1]['step']:,}" if found else None


def _validation_loss(plan: ExportPlan) -> str | None:
    if plan.manifest.eval_loss is not None:
        return f"{plan.manifest.eval_loss:.4f} nats per token at step {plan.manifest.step:,}"
    return _loss(plan, "eval_loss", split="valid")


def _table(facts: Mapping[str, Any]) -> str:
    """Return a table of the facts that are known."""
    rows = (f"| {name} | {value} |" for name, value in facts.items() if value not in (None, ""))
    return "\n".join(["| | |", "| --- | --- |", *rows])
