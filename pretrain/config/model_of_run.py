"""The model of a run: its configuration, initial values and dropouts, and the weights that exist before the run."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config, model_config_from
from pretrain.model.families import FAMILIES
from pretrain.model.init_methods import METHODS_WITH_STD, Initialization, is_embedding

DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")  # flags, and fields of ModelConfig
EMBEDDINGS = "embeddings"  # a value of --no_weight_decay that means the tables of tokens and of learned positions
# Fields that change no parameter's name, shape or meaning. Trained weights may be used with another value.
_MAY_DIFFER = frozenset((
    "architecture", "hf_config", "embedding_dropout", "attention_dropout", "residual_dropout", "initializer_range",
    "scale_residual_init", "norm_eps", "max_positions", "rope_theta", "rope_scaling", "local_rope_theta", "windows"))


@dataclass(frozen=True)
class SavedModel:
    """The model of existing weights: of --init_from, or of the checkpoint that the run resumes from."""

    config: ModelConfig
    where: str  # the file that describes the model, for error messages


@dataclass(frozen=True)
class Origin:
    """Source of the weights of step 0, or of an adopted run."""

    name: str  # an absolute path, or the name of a repository
    folder: str  # the transformers folder, or the folder of the checkpoint
    # SHA-256 of the manifest, of config.json and the headers of the weights files, or of an adopted run's record
    fingerprint: str


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
    """Return the model that --model selects; without --model, the model of the existing weights. Raises ConfigError."""
    if model or saved is None:
        return load_model_config(model, overrides)
    return model_config_from(saved.config.hf_config, saved.where, overrides)


_NOT_EXTENDED = ("the vocabulary of existing weights is not extended: leave the setting out, and use data that was "
                 "prepared with the tokenizer of the weights")


def check_same_parameters(saved: ModelConfig, run: ModelConfig, *, folder: Path, model: str,
                          overrides: str | None) -> list[str]:
    """Return one note for each setting that differs between the model of existing weights and the run's.

    Raises ConfigError if they have different parameters, or use them differently.

    Args:
        folder: holds the weights.
        model, overrides: values of --model and --model_overrides.
    """
    notes = []
    theirs, own = (config.implementation.settings(config) for config in (saved, run))
    if theirs or own:  # not all of them are fields
        _check_same_shapes(saved, run, folder=folder, model=model)
        notes += [f"{key}: {own.get(key)} in this run, {theirs.get(key)} in the model of {folder}"
                  for key in sorted({*theirs, *own}) if own.get(key) != theirs.get(key)]
    for field, value in vars(saved).items():
        key, current = run.key(field), getattr(run, field)
        if current == value or field in ("hf_config", "architecture", "key_names", "implementation"):
            continue
        if field not in _MAY_DIFFER or (field == "max_positions" and run.position == "learned"):
            flag = f"--model {model}" if model and key not in (overrides or "") else "--model_overrides"
            raise ConfigError(f"{flag}: {key}", found=_given(run, field, current),
                              expected=f"{_given(saved, field, value)}, as in the weights of {folder}",
                              remedy=_NOT_EXTENDED if field == "vocab_size" else "leave --model out to use the model "
                              "of the weights, and override only settings that fit the same weights")
        if not own:
            notes.append(f"{key}: {current} in this run, {value} in the model of {folder}")
    return notes


def _given(model: ModelConfig, field: str, value: Any) -> Any:
    """Return the value of a field as a config.json has it: activations have other names there."""
    family = FAMILIES.get(model.architecture)
    if field != "activation" or family is None:
        return value
    key = model.key(field)
    return model.hf_config.get(key, family.keys.get(key, value))


def _check_same_shapes(saved: ModelConfig, run: ModelConfig, *, folder: Path, model: str) -> None:
    theirs, own = ({name: parameter.shape for name, parameter in config.named_parameters()} for config in (saved, run))
    for name in (*theirs, *own):
        if theirs.get(name) != own.get(name):
            raise ConfigError(f"--model {model}" if model else "--model_overrides",
                              found=f"{name} of shape {own.get(name, 'none')}",
                              expected=f"{theirs.get(name, 'none')}, as in the weights of {folder}",
                              remedy=_NOT_EXTENDED if saved.vocab_size != run.vocab_size else
                              "leave --model out to use the model of the weights")


def initialization_of(args: RunArguments) -> Initialization:
    """Return the initialization that the flags describe."""
    return Initialization(args.init_method, args.output_init_method, args.init_std, args.mup_base_width)


def given_dropouts(flags: object) -> dict[str, Any]:
    """Return the dropouts that the flags set, by their names in ModelConfig."""
    return {name: getattr(flags, name) for name in DROPOUTS if getattr(flags, name) is not None}


def with_dropout(model: ModelConfig, flags: object) -> ModelConfig:
    """Return the model with the dropouts of the flags. Its `hf_config`, which exports write, is unchanged."""
    return replace(model, **given_dropouts(flags))


def check_initialization_flags(args: RunArguments) -> None:
    """Raise ConfigError for flags of initial values without an effect."""
    if args.init_std is not None and not {args.init_method, args.output_init_method} & {*METHODS_WITH_STD}:
        raise ConfigError("--init_std", problem=f"{args.init_method} and {args.output_init_method} have standard "
                          "deviations of their own", remedy=f"only {', '.join(METHODS_WITH_STD)} use this flag")
    if args.init_from is not None:
        reject_initial_values(args, f"the initial weights are those of --init_from {args.init_from}")


def reject_initial_values(args: RunArguments, reason: str) -> None:
    """Raise ConfigError if a flag selects the initial values of weights that are loaded instead."""
    for name in ("init_method", "output_init_method", "init_std"):
        if getattr(args, name) != getattr(RunArguments, name):
            raise ConfigError(f"--{name}", problem=f"it has no effect: {reason}", remedy="leave the flag out")


def undecayed_names(patterns: Sequence[str] | None, model: ModelConfig) -> frozenset[str]:
    """Return the names of all parameters that at least one pattern matches.

    Vectors (norms, biases) have no weight decay in any case, unless --decay_vectors is given, nor have frozen matrices.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name, parameter in model.named_parameters() if parameter.is_frozen}
    return frozenset(name for pattern in patterns or () for name in _matches(pattern, names)) | frozen


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    if pattern == EMBEDDINGS:
        return [name for name in names if is_embedding(name)]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if matches:
        return matches
    known = list(dict.fromkeys(re.sub(r"^\d+\.", "*.", name) for name in names))
    remedy = f"the names are {EMBEDDINGS}, {', '.join(known)}, where * begins with the number of a layer"
    if any(fnmatchcase(name, f"*{pattern}*") for name in names):
        remedy = f'"*{pattern}*" matches'
    raise ConfigError("--no_weight_decay", problem=f'"{pattern}" is the name of no parameter', remedy=remedy,
                      word=pattern, known=[EMBEDDINGS, *known, *names])
