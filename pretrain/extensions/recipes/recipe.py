"""A recipe: the folder with the settings of its runs, and recipe.yaml, which describes runs and expected results.

    corpus: ../tinyshakespeare.yaml       # see Corpus; a recipe without runs has none
    runs:                                 # in this order; a later entry with the same name continues the run
      - {name: fp32, ranks: 1, flags: {precision: fp32}}
      - {grid: [{w64: {...}, w128: {...}}, {"0.001": {learning_rate: 0.001}, ...}]}    # w64-0.001, ...; see Grid
    expect: [...]                         # see results.py; tables.py for those of a recipe without runs
    on_gpus: {...}                        # only of recipes for GPUs: see OnGpus
    small:                                # --scale small
      flags: {...}                        # of all runs
      runs: [...]                         # default: the same
      expect: [...]
"""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pretrain.commands.small_runs import Run
from pretrain.config.flags.arguments import FLAGS
from pretrain.errors import ConfigError, reason_of, shorten
from pretrain.extensions.recipes.results import Expectation
from pretrain.extensions.recipes.tables import sweep_of
from pretrain.stored_json import build, read_text

FILE = "recipe.yaml"
_PUBLISHED = Path(__file__).parent / "published"
FULL, SMALL = "full", "small"  # values of --scale
_T = TypeVar("_T")


@dataclass(frozen=True)
class Corpus:
    """Text that runs are trained on: the content of a YAML that recipes share."""

    file: str
    url: str
    sha256: str
    parts: dict[str, list[float]]  # file -> fractions of the text where it begins and ends
    prepare: list[str]  # subcommands of ds-pretrain, without this word


@dataclass(frozen=True)
class Dataset:
    """Data of full scale that the user prepares: the content of a YAML that recipes share."""

    source: str
    prepare: list[str]  # commands of a shell, in the folder of the runs
    size: str = ""  # published
    sha256: dict[str, str] = field(default_factory=dict)  # published: file -> SHA-256


@dataclass(frozen=True)
class OnGpus:
    """The GPUs and the data of a full scale that needs more than CPUs, and the published sizes."""

    gpu: str  # a name of memory/hardware.py; `ranks` of the run is their number
    data: str  # YAML, relative to the recipe: see Dataset
    tokens: float
    parameters: float | None = None


@dataclass(frozen=True)
class Grid:
    """Runs with each combination of one entry of each table: their flags together, their names joined with "-".

    Only their losses are of interest: a checkpoint is removed when its run has finished.
    """

    grid: list[dict[str, dict[str, Any]]]  # tables: name -> flags
    ranks: int = 1

    def runs(self) -> list[Run]:
        return [Run("-".join(name for name, _ in entries), self.ranks,
                    {flag: value for _, flags in entries for flag, value in flags.items()}, keep_checkpoint=False)
                for entries in itertools.product(*(table.items() for table in self.grid))]


@dataclass(frozen=True)
class Scale:
    """Runs and what is expected of them: at full scale the published result, at small scale that the files work."""

    runs: list[Run | Grid] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)  # flags of all runs
    flags_from: str = ""  # YAML with further flags of all runs, relative to the recipe
    expect: list[Expectation] = field(default_factory=list)

    def starts(self) -> list[Run]:
        return [run for each in self.runs for run in (each.runs() if isinstance(each, Grid) else [each])]

    def names(self) -> list[str]:
        return list(dict.fromkeys(run.name for run in self.starts()))


@dataclass(frozen=True)
class Recipe:
    """The content of recipe.yaml."""

    title: str
    source: str  # source of the published figures
    time: str  # time of all runs, on which machine
    expect: list[Expectation]
    corpus: str = ""  # YAML, relative to the recipe; "" without runs
    runs: list[Run | Grid] = field(default_factory=list)
    small: Scale = field(default_factory=Scale)
    on_gpus: OnGpus | None = None  # the full scale was not run by this project

    @property
    def scales(self) -> dict[str, Scale]:
        small = replace(self.small, runs=self.small.runs or self.runs)
        return {FULL: Scale(self.runs, expect=self.expect), SMALL: small}


def recipe_names() -> list[str]:
    """Return the names of the recipes of this package."""
    return sorted(path.parent.name for path in _PUBLISHED.glob(f"*/{FILE}"))


def find_recipe(name: str) -> Path:
    """Return the folder of a recipe of this package, or a folder with a recipe.yaml. Raises ConfigError."""
    if name in recipe_names():
        return _PUBLISHED / name
    if not (Path(name) / FILE).is_file():
        raise ConfigError("reproduce", problem=f"there is no recipe {shorten(name)!r}, and no folder with a {FILE}",
                          remedy=f"the recipes are {', '.join(recipe_names())}", word=name, known=recipe_names())
    return Path(name)


def read_recipe(folder: Path) -> tuple[Recipe, Corpus | None]:
    """Read and check recipe.yaml, and the YAML of its corpus if it has runs. Raises ConfigError."""
    path = folder / FILE
    recipe = _read(path, Recipe)
    if recipe.small.flags_from:
        shared = _read(folder / recipe.small.flags_from, dict[str, Any])
        recipe = replace(recipe, small=replace(recipe.small, flags={**shared, **recipe.small.flags}))
    for scale in recipe.scales.values():
        for flags in (scale.flags, *(run.flags for run in scale.starts())):
            if unknown := sorted(flags.keys() - (FLAGS.keys() - {"extension"})):  # which loads code
                raise ConfigError(f"{path}: flags", problem=f"there is no flag --{unknown[0]}", word=unknown[0],
                                  known=FLAGS)
        for expectation in scale.expect:
            known = [*scale.names(), *(dict.fromkeys(sweep_of(name) for name in scale.names()))]
            if unknown := sorted(set(expectation.names()) - set(known)):
                raise ConfigError(f"{path}: expect", found=unknown[0], expected=f"one of {', '.join(known)}")
    if bool(recipe.runs) != bool(recipe.corpus):
        raise ConfigError(f"{path}: corpus", problem="runs and corpus belong together, and one of them is missing")
    return recipe, _read(folder / recipe.corpus, Corpus) if recipe.corpus else None


def read_dataset(folder: Path, on_gpus: OnGpus) -> Dataset:
    """Read and check the YAML of the data of full scale. Raises ConfigError."""
    return _read(folder / on_gpus.data, Dataset)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return build(kind, yaml.safe_load(read_text(path)))
    except yaml.YAMLError as error:
        raise ConfigError(str(path), problem=f"it is not YAML: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=reason_of(error)) from None
