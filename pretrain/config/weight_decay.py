"""Parameters that --no_weight_decay excludes from weight decay, by their names. Imports no torch."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.init_methods import is_embedding

EMBEDDINGS = "embeddings"  # a value of --no_weight_decay that means the tables of tokens and of learned positions


def undecayed_names(patterns: Sequence[str] | None, model: ModelConfig) -> frozenset[str]:
    """Return the names of all parameters that at least one pattern matches.

    Vectors (norms, biases) have no weight decay in any case.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = [rule.ours for rule in model.tensors()]
    return frozenset(name for pattern in patterns or () for name in _matches(pattern, names))


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
