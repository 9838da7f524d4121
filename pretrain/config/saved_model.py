"""Models of weights that exist before a run starts, and the record of where a run's first weights came from."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config, model_config_from

# Fields that change no parameter's name, shape or meaning. Trained weights may be used with another value.
_MAY_DIFFER = frozenset((
    "architecture", "hf_config", "embedding_dropout", "attention_dropout", "residual_dropout", "initializer_range",
    "scale_residual_init", "norm_eps", "max_positions", "rope_theta", "rope_scaling", "local_rope_theta", "windows"))


@dataclass(frozen=True)
class SavedModel:
    """The model of existing weights: those of --init_from, or of the checkpoint that the run resumes from."""

    config: ModelConfig
    where: str  # the file that describes the model, for error messages


@dataclass(frozen=True)
class Origin:
    """Source of the weights of step 0."""

    name: str  # an absolute path, or the name of a repository
    folder: str  # the transformers folder, or the folder of the checkpoint
    fingerprint: str  # SHA-256 of the manifest, or of config.json and the headers of the weights files


@dataclass(frozen=True)
class Branch:
    """A checkpoint of another run, with which a run began."""

    run: str  # absolute path of the run folder; of a single checkpoint: of the folder that holds it
    step: int
    folder: str  # absolute path of the checkpoint
    fingerprint: str  # SHA-256 of its manifest

    def record(self) -> dict[str, Any]:
        """Return the entry of run.json, of the manifest, and of the event "branch"."""
        return asdict(self)


def model_of_run(model: str, overrides: str | None, saved: SavedModel | None) -> ModelConfig:
    """Return the model that --model selects; without --model, that of the existing weights. Raises ConfigError."""
    if model or saved is None:
        return load_model_config(model, overrides)
    return model_config_from(saved.config.hf_config, saved.where, overrides)


def check_same_parameters(saved: ModelConfig, run: ModelConfig, *, folder: Path, model: str,
                          overrides: str | None) -> list[str]:
    """Return one note for each setting that differs between the model of existing weights and that of the run.

    Raises ConfigError if they have different parameters, or use them differently.

    Args:
        folder: holds the weights.
        model, overrides: values of --model and --model_overrides.
    """
    notes = []
    for field, value in vars(saved).items():
        key, current = run.key(field), getattr(run, field)
        if current == value or field in ("hf_config", "architecture"):
            continue
        if field not in _MAY_DIFFER or (field == "max_positions" and run.position == "learned"):
            flag = f"--model {model}" if model and key not in (overrides or "") else "--model_overrides"
            raise ConfigError(f"{flag}: {key}", found=current, expected=f"{value}, as in the weights of {folder}",
                              remedy="leave --model out to use the model of the weights, and override only settings "
                              "that fit the same weights")
        notes.append(f"{key}: {current} in this run, {value} in the model of {folder}")
    return notes
