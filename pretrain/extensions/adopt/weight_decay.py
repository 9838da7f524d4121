"""Which parameters a run of another program decays, and the flags that say the same here. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pretrain.config.model_of_run import EMBEDDINGS
from pretrain.model.init_methods import is_embedding

_LONGEST_LIST = 3  # names in a message


@dataclass(frozen=True)
class WeightDecay:
    """The weight decay of a run, in terms of --weight_decay, --decay_vectors and --no_weight_decay."""

    value: float | None = None  # of the decayed parameters; None: not recorded
    decay_vectors: bool = False
    no_weight_decay: tuple[str, ...] = ()
    problem: str = ""  # why these flags do not describe it; then they are the defaults
    decays: Mapping[str, bool] = field(default_factory=dict)  # by our names: whether a parameter is decayed

    @property
    def flags(self) -> dict[str, bool | list[str]]:
        """The flags that are not at their defaults."""
        return {**({"decay_vectors": True} if self.decay_vectors else {}),
                **({"no_weight_decay": list(self.no_weight_decay)} if self.no_weight_decay else {})}


def weight_decay_of(found: Mapping[str, float], sources: Mapping[str, tuple[str, ...]],
                    is_matrix: Mapping[str, bool], default: float | None) -> WeightDecay:
    """Return the weight decay of a run.

    Args:
        found: weight decay of each of the source's parameters; empty: not recorded.
        sources: the source's parameters that hold each of ours, by our names.
        is_matrix: by our names.
        default: the optimizer's weight decay, if `found` is empty.
    """
    if not found:
        return WeightDecay(default, decays=is_matrix)
    values = {ours: {found[name] for name in names if name in found} for ours, names in sources.items()}
    mixed = sorted(ours for ours, decays in values.items() if len(decays) > 1)
    used = sorted({decay for decays in values.values() for decay in decays if decay != 0})
    if mixed or len(used) > 1:
        problem = f"the parts of {_listed(mixed)} have several" if mixed else \
            f"parameters have the weight decays {', '.join(f'{value:g}' for value in used[:_LONGEST_LIST])}"
        return WeightDecay(used[-1] if used else 0.0, problem=problem, decays=is_matrix)
    if not used:
        return WeightDecay(0.0, decays=is_matrix)
    decay_vectors = any(used[0] in values[ours] for ours in values if not is_matrix[ours])
    # parameters that were not trained have no recorded value, and get the usual one
    decays = {ours: values[ours] != {0.0} if values[ours] else is_matrix[ours] or decay_vectors for ours in values}
    without = [ours for ours, decayed in decays.items() if not decayed and (is_matrix[ours] or decay_vectors)]
    return WeightDecay(used[0], decay_vectors, _patterns(without, decays), decays=decays)


def _patterns(names: Iterable[str], all_names: Iterable[str]) -> tuple[str, ...]:
    """Return values of --no_weight_decay that match these parameters and no others."""
    wanted, known, patterns = set(names), list(all_names), []
    embeddings = {name for name in known if is_embedding(name)}
    if embeddings and embeddings <= wanted:
        patterns.append(EMBEDDINGS)
        wanted -= embeddings
    for pattern in dict.fromkeys(re.sub(r"^\d+\.", "*.", name) for name in sorted(wanted)):
        matched = {name for name in known if fnmatchcase(name, pattern)}
        patterns += [pattern] if matched <= wanted | embeddings & set(names) else \
            sorted(name for name in wanted if fnmatchcase(name, pattern))
    return tuple(sorted(patterns))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LONGEST_LIST]) + (f" and {len(names) - _LONGEST_LIST} others"
                                               if len(names) > _LONGEST_LIST else "")
