"""Find the model to evaluate, and its tokenizer, and check that they fit. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.load.hf_folder import HFFolder, check_hf_folder
from pretrain.checkpoint.load.select import (
    find_transformers_folder,
    run_folder_of,
    select_checkpoint,
    tokenizer_of,
)
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_file, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.monitor.read_run_folder import newest_start


@dataclass(frozen=True)
class EvaluationSource:
    """The model to evaluate: a checkpoint of any layout, or a transformers folder."""

    path: Path  # as the user named it
    folder: Path  # the checkpoint or the transformers folder
    config: ModelConfig
    precision: str  # of the run that wrote the checkpoint, or of most weights of the transformers folder
    trained_length: int | None  # --seq_length of the run
    tokenizer_fingerprint: str | None  # of the run
    hf_folder: HFFolder | None = None
    published: bool = False  # whether another program trained the model: documents then begin with the bos token
    notes: tuple[str, ...] = ()  # for the user

    @cached_property
    def run(self) -> dict[str, Any] | None:
        """The newest record in run.json of the run that this model belongs to; None if there is none."""
        run = run_folder_of(self.path) if self.hf_folder is None else None
        return newest_start(run) if run is not None else None


def find_source(path: Path, step: int | None) -> EvaluationSource:
    """Find the checkpoint at `path`, or check the transformers folder there. Raises ConfigError."""
    folder = find_transformers_folder(path, step)
    if folder is not None:
        found = check_hf_folder(folder)
        return EvaluationSource(path, folder, found.config, found.dtype, None, None, found, published=True)
    folder, manifest, notes = select_checkpoint(path, step)
    config = model_config_from(manifest.model, str(folder / MANIFEST))
    return EvaluationSource(path, folder, config, manifest.precision,
                            None if manifest.weights_only else manifest.seq_length, manifest.tokenizer_fingerprint,
                            published=manifest.weights_only, notes=notes)


def find_tokenizer(source: EvaluationSource, flag: str | None) -> Tokenizer | ConfigError:
    """Load the tokenizer of --tokenizer, of the run or of the transformers folder.

    Returns the error if no tokenizer is known. Raises ConfigError if it does not fit the model.
    """
    try:
        path = flag or (tokenizer_of(source.path) if source.hf_folder is None else _tokenizer_in(source.folder))
    except ConfigError as error:
        return error
    loaded = load_tokenizer(path)
    check_tokenizer_fits(loaded.ids, {}, vocab_size=source.config.vocab_size, where=f"--tokenizer {path}",
                         remedy="name the tokenizer with which the model was trained")
    expected = source.tokenizer_fingerprint
    if expected is not None and loaded.fingerprint != expected:
        raise ConfigError(f"--tokenizer {path}", found=f"sha256 {loaded.fingerprint[:12]}...",
                          expected=f"sha256 {expected[:12]}..., with which {source.folder} was trained",
                          remedy="name the tokenizer of the run: with another one, the losses have no meaning")
    return loaded


def _tokenizer_in(folder: Path) -> str:
    if find_tokenizer_file(folder) is None:
        raise ConfigError("--tokenizer", problem=f"the flag is missing, and {folder} has no tokenizer.json or "
                          "tokenizer.model", remedy="name the tokenizer of the model")
    return str(folder)
