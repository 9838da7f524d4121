"""Decide what an export writes, and check it, without torch: checkpoint, dtype, tokenizer and output folder."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.convert.new_folder import check_new_folder
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.load.select import run_folder_of, select_checkpoint, tokenizer_of
from pretrain.config.layout import DTYPE_BYTES
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, model_config_from

SHARD_GB = 5.0  # default size of a weights file


@dataclass(frozen=True)
class ExportPlan:
    """A checked export."""

    folder: Path  # of the checkpoint
    manifest: Manifest
    config: ModelConfig
    out: Path
    dtype: str  # "fp32", "bf16" or "fp16"
    shard_bytes: int  # largest size of a weights file, unless one tensor is larger
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]  # for the user

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
    folder, manifest, checkpoint_notes = select_checkpoint(path, step)
    check_new_folder(out)
    config = model_config_from(manifest.model, str(folder / MANIFEST))
    try:
        loaded, notes = _find_tokenizer(folder, manifest, tokenizer)
    except ConfigError:
        if with_tokenizer:
            raise
        loaded, notes = None, ()
    if loaded is not None:
        # {}, so that no special tokens are compared: the export has those of the tokenizer
        check_tokenizer_fits(loaded.ids, {}, vocab_size=config.vocab_size, where=f"--tokenizer {loaded.path}",
                             remedy="name the tokenizer of this model")
    return ExportPlan(folder, manifest, config, out, dtype or manifest.precision, max(1, round(shard_gb * 1e9)), loaded,
                      (*checkpoint_notes, *notes))


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
    if recorded not in (None, tokenizer.fingerprint):
        raise ConfigError(str(tokenizer.path), problem="it has changed since the checkpoint was written",
                          remedy="restore the file, or name a tokenizer with --tokenizer")
    return tokenizer, ()
