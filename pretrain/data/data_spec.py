"""Data of a run as its flags name it: blends, named evaluation sets, order and packing. Imports no numpy and no torch.

Flags: --train_data, --valid_data, --test_data, --split, --sample_order, --packing, --blend_schedule, --dataset_module
and --dataset_args.
"""

import argparse
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.active_extensions import extensions, reader_of
from pretrain.cli import path
from pretrain.data.token_schedules import parse_token_count
from pretrain.errors import ConfigError, printable, shorten
from pretrain.hub import CONNECT_TO, allowed_by_user
from pretrain.remote import is_url, without_credentials

if TYPE_CHECKING:
    from pretrain.data.samples.dataset import SampleOrder

SHUFFLED = "shuffled"
PACKINGS = ("none", "best_fit")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LARGEST_WEIGHT = 1e12

Words = str | Sequence[str] | None
"""the value of a flag: its words, or a single word"""


@dataclass(frozen=True)
class BlendPhase:
    """Weights of the sources from this number of consumed tokens on."""

    from_tokens: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class DataSpec:
    """Prefixes of the .bin/.idx pairs of a run, and how samples are taken from them."""

    train: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    """one for each prefix in `train`; None: one prefix, or in proportion to their tokens"""
    valid: tuple[tuple[str, str], ...] = ()
    """(name of the dataset, prefix); empty: a part of `train`"""
    test: tuple[tuple[str, str], ...] = ()
    split: str = "969,30,1"
    sample_order: str = "shuffled"
    packing: str = "none"
    blend_schedule: tuple[BlendPhase, ...] = ()
    module: str | None = None
    """MODULE:FUNCTION of the user's code that makes the datasets, instead of token files"""
    module_args: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """of the extensions that read data at URLs, by their names"""

    @property
    def order(self) -> "SampleOrder | None":
        """The order that an extension brings; None: the default one. Raises ConfigError for another value."""
        known = {name: (each, value) for each in extensions() for name, value in each.sample_orders.items()}
        if self.sample_order == SHUFFLED:
            return None
        _check_choice("--sample_order", self.sample_order, (SHUFFLED, *known))
        extension, value = known[self.sample_order]
        order: SampleOrder = extension.load(value)()
        return order

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All prefixes, each one once."""
        return tuple(dict.fromkeys([*self.train, *(prefix for _, prefix in (*self.valid, *self.test))]))

    @property
    def train_flag(self) -> str:
        """The flag with its value, for messages."""
        if self.module is not None:
            return f"--dataset_module {shorten(self.module)}"
        pairs = [f"{weight:g} {prefix}" for weight, prefix in zip(self.weights or (), self.train, strict=False)]
        return f"--train_data {shorten(' '.join(pairs or self.train), 300)}"


def names_of_split(names: Iterable[str], split: str) -> list[str]:
    """Return the names of the datasets of a split: "valid", or "valid/NAME" for each set."""
    return [name for name in names if name.partition("/")[0] == split]


def split_words(value: Words) -> tuple[str, ...]:
    """Return the words of a flag. run.json of earlier runs has a single string, or null."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def absolute_words(value: Words) -> str | list[str] | None:
    """Return the value of --train_data, --valid_data or --test_data with absolute paths. A single word is a string."""
    words = []
    for word in split_words(value):
        name, equals, prefix = word.partition("=")
        named = bool(equals) and _NAME.fullmatch(name) is not None
        is_weight = _number(word) is not None and len(split_words(value)) > 1
        words.append(word if is_weight else f"{name}={_absolute(prefix)}" if named else _absolute(word))
    if len(words) > 1:
        return words
    return words[0] if words else None


def _absolute(prefix: str) -> str:
    """Return a prefix as it is recorded: an absolute path, or a URL without credentials."""
    return without_credentials(prefix) if is_url(prefix) else os.path.abspath(prefix)


def parse_data_spec(train_data: Words, *, valid_data: Words = None, test_data: Words = None, split: str = "969,30,1",
                    sample_order: str = "shuffled", packing: str = "none",
                    blend_schedule: Words = None, dataset_module: str | None = None,
                    dataset_args: str | None = None, settings: Mapping[str, Any] | None = None) -> DataSpec:
    """Parse the flags of the data, and check all that can be checked without the files. Raises ConfigError.

    `dataset_module` must come from the user's command line or YAML, as it names code. `settings`: see DataSpec.
    """
    if dataset_module is not None:
        for name, value, default in (("train_data", train_data, None), ("valid_data", valid_data, None),
                                     ("test_data", test_data, None), ("split", split, DataSpec.split),
                                     ("sample_order", sample_order, DataSpec.sample_order),
                                     ("packing", packing, DataSpec.packing), ("blend_schedule", blend_schedule, None)):
            if (value or None) != default:
                raise ConfigError(f"--dataset_module / --{name}", found="both", expected="one of the two",
                                  remedy="the function of --dataset_module returns all data of the run")
        return DataSpec(module=_parse_module(dataset_module), module_args=_parse_module_args(dataset_args))
    if dataset_args is not None:
        raise ConfigError("--dataset_args", problem="it has no effect without --dataset_module",
                          remedy="give --dataset_module too")
    prefixes, weights = _parse_blend(split_words(train_data))
    valid, test = (_parse_named(group, split_words(value)) for group, value in
                   (("valid", valid_data), ("test", test_data)))
    parse_split(split)
    _check_choice("--packing", packing, PACKINGS)
    phases = _parse_schedule(split_words(blend_schedule), len(prefixes))
    spec = DataSpec(prefixes, weights, valid, test, split, sample_order, packing, phases, settings=settings or {})
    order = spec.order
    if order is not None and phases:
        raise ConfigError("--blend_schedule", problem=f"--sample_order {sample_order} has no schedule of weights",
                          remedy="use --sample_order shuffled, or leave the schedule out")
    if order is not None:
        order.check(spec)
    if order is not None and packing != "none":
        raise ConfigError(f"--packing {packing}", problem=f"--sample_order {sample_order} has no packing",
                          remedy="use --sample_order shuffled, or --packing none")
    if phases and phases[0].from_tokens == 0 and weights is not None:
        raise ConfigError("--blend_schedule", problem="it has weights from token 0 on, and --train_data has weights "
                          "too", remedy="leave the weights of --train_data out, or begin the schedule later")
    return spec


def _check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(flag, found=value, expected=", ".join(choices), word=value, known=choices)


def _parse_module(value: str) -> str:
    module, colon, function = value.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError("--dataset_module", found=shorten(value), expected="MODULE:FUNCTION such as my_data:build, "
                          "where MODULE is my_data for the file my_data.py")
    return value


def _parse_module_args(value: str | None) -> dict[str, Any]:
    expected = 'a JSON object with the arguments of the function, such as {"path": "data/numbers.npy"}'
    try:
        arguments = json.loads(value) if value is not None else {}
    except (ValueError, RecursionError):
        raise ConfigError("--dataset_args", found=shorten(value or ""), expected=expected) from None
    if not isinstance(arguments, dict):
        raise ConfigError("--dataset_args", found=shorten(value or ""), expected=expected)
    if taken := {"split", "seq_length"} & {*arguments}:
        raise ConfigError("--dataset_args", found=f"the argument {min(taken)}", expected="other names: the function "
                          "gets split and seq_length from the run")
    return arguments


def planned_samples(*, train_steps: int, eval_interval: int, eval_steps: int, global_batch_size: int,
                    first_sample: int = 0, order_samples: int | None = None,
                    train_samples: int | None = None) -> dict[str, int]:
    """Return the number of samples that a run reads of each split, counted as Megatron-LM and GPT-NeoX do.

    `order_samples`: number of samples of training, if the order was made for another number.
    `train_samples`: those that the run reads, if its batch size changes.
    An evaluation at the end counts too (megatron/training/training.py, get_train_valid_test_num_samples).
    """
    evaluations = train_steps // eval_interval + 1 if eval_interval else 1
    samples = train_steps * global_batch_size if train_samples is None else train_samples
    return {"train": order_samples or first_sample + samples,
            "valid": evaluations * eval_steps * global_batch_size,
            "test": eval_steps * global_batch_size}


def recorded_data_spec(flags: Mapping[str, Any]) -> DataSpec:
    """Return the data of an earlier run from the flags in its run.json; a flag that is not there has its default.

    Raises ConfigError for a run with --dataset_module: no record of a run makes a tool import code. Raises it, too, for
    data at a URL that the user has not allowed, and takes no folder for copies of data from the record.
    """
    if flags.get("dataset_module"):
        raise ConfigError("run.json", problem="the run was trained on a dataset of its user's own code "
                          f"(--dataset_module {printable(shorten(str(flags['dataset_module'])))}), which is not "
                          "imported because a record names it", remedy="give prepared data, such as --data PREFIX of "
                          "`ds-pretrain evaluate`")
    spec = parse_data_spec(flags.get("train_data"), valid_data=flags.get("valid_data"),
                           test_data=flags.get("test_data"), split=flags.get("split") or "1",
                           sample_order=flags.get("sample_order") or "shuffled", packing=flags.get("packing") or "none",
                           blend_schedule=flags.get("blend_schedule"))
    for place in filter(is_url, spec.prefixes):
        if not allowed_by_user(place):
            raise ConfigError("run.json", problem=f"the run's data is at {printable(shorten(place))}; a record alone "
                              "makes no program connect to an address", remedy=f"if you trust this place, set "
                              f"{CONNECT_TO}={printable(shorten(place.rpartition('/')[0]))}")
    return spec


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _parse_blend(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Parse `PREFIX`, `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...` into prefixes and weights."""
    where = f"--train_data {shorten(' '.join(words))}"
    if len(words) == 1 and len(parts := words[0].split()) > 1 and _number(parts[0]) is not None:
        raise ConfigError(where, problem="weights and prefixes are one text", remedy="without quotes they are several "
                          f"words; in YAML write a list: [{', '.join(shorten(part) for part in parts)}]")
    numbers = [_number(word) for word in words]
    weights: tuple[float, ...] | None = None
    prefixes = tuple(words)
    if len(words) > 1 and numbers[0] is not None:
        if len(words) % 2:
            raise ConfigError(where, problem=f"{len(words)} words are not pairs of a weight and a prefix",
                              remedy="write WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes without weights")
        weights, prefixes = _weights("--train_data", words[::2]), tuple(words[1::2])
        numbers = numbers[1::2]
    wrong = next((word for word, number in zip(prefixes, numbers, strict=True) if number is not None), None)
    if len(words) > 1 and wrong is not None:
        raise ConfigError(where, found=wrong, expected="a prefix", remedy="each weight comes before its prefix; write "
                          f"a prefix that is a number as ./{wrong}")
    _check_prefixes("--train_data", prefixes)
    return prefixes, weights if len(prefixes) > 1 else None


def _weights(flag: str, words: Sequence[str], low: str = "above 0") -> tuple[float, ...]:
    weights = []
    for word in words:
        weight = _number(word)
        if weight is None or not math.isfinite(weight) or not 0 <= weight <= _LARGEST_WEIGHT or \
                (weight == 0 and low == "above 0"):
            raise ConfigError(flag, found=f"weight {word}", expected=f"a number {low}, at most {_LARGEST_WEIGHT:g}")
        weights.append(weight)
    return tuple(weights)


def _check_prefixes(flag: str, prefixes: Sequence[str]) -> None:
    """Raise ConfigError for a prefix that cannot be one, or that is named twice."""
    seen: set[str] = set()
    for prefix in prefixes:
        if is_url(prefix):
            _check_url(flag, prefix)
        else:
            try:
                path(prefix)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(flag, problem=str(error)) from None
        if _absolute(prefix) in seen:
            raise ConfigError(flag, problem=f"{shorten(prefix)} is named twice", remedy="name it once")
        seen.add(_absolute(prefix))


def _check_url(flag: str, url: str) -> None:
    """Raise ConfigError for a URL that cannot be the prefix of a .bin/.idx pair."""
    where = f"{flag} {shorten(without_credentials(url))}"
    if "?" in url or "*" in url:
        raise ConfigError(where, problem="the URL of a prefix has neither ? nor *: .bin and .idx are appended to it",
                          remedy="give the URL of the .bin without .bin; credentials come from the environment")
    if url.endswith((".bin", ".idx")):
        raise ConfigError(where, problem=f"give the prefix without {url[-4:]}")
    reader_of("token_files", url, where)


def _parse_named(group: str, words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse `[NAME=]PREFIX ...` into pairs of a dataset's name and its prefix.

    One set without a name is called "valid". Otherwise the names are valid/NAME; the file name is the default.
    """
    flag = f"--{group}_data"
    pairs = []
    for word in words:
        name, equals, prefix = word.partition("=")
        pairs.append((name, prefix) if equals and _NAME.fullmatch(name) else ("", word))
    _check_prefixes(flag, [prefix for _, prefix in pairs])
    if len(pairs) == 1 and not pairs[0][0]:
        return ((group, pairs[0][1]),)
    named = [(name or Path(prefix).name, prefix) for name, prefix in pairs]
    for name, prefix in named:
        if [other for other, _ in named].count(name) > 1:
            raise ConfigError(flag, problem=f"two sets have the name {shorten(name)}",
                              remedy=f"name each of them: NAME={shorten(prefix)}")
    return tuple((f"{group}/{name}", prefix) for name, prefix in named)


def _parse_schedule(words: Sequence[str], num_sources: int) -> tuple[BlendPhase, ...]:
    """Parse `FROM_TOKENS:W1,W2,... ...`, in ascending order."""
    flag, phases = "--blend_schedule", list[BlendPhase]()
    if words and num_sources < 2:
        raise ConfigError(flag, problem="there is nothing to blend: --train_data has one prefix",
                          remedy="leave it out, or give several prefixes")
    for word in words:
        start, colon, weights = word.partition(":")
        tokens = parse_token_count(start)
        if not colon or tokens is None:
            raise ConfigError(flag, found=shorten(word), expected="FROM_TOKENS:WEIGHT,WEIGHT,... such as 10e9:0.5,0.5")
        values = _weights(flag, weights.split(","), "from 0")
        if len(values) != num_sources:
            raise ConfigError(flag, found=f"{len(values)} weights in {shorten(word)}",
                              expected=f"{num_sources}, one for each prefix of --train_data",
                              remedy="in a YAML list, write each phase in quotes" if len(values) == 1 else "")
        if not any(values):
            raise ConfigError(flag, found=shorten(word), expected="at least one weight above 0")
        if phases and tokens <= phases[-1].from_tokens:
            raise ConfigError(flag, found=f"{start} after {phases[-1].from_tokens}", expected="ascending FROM_TOKENS")
        phases.append(BlendPhase(tokens, values))
    return tuple(phases)


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse "969,30,1" into fractions that sum to 1; missing ones are 0. Raises ConfigError."""
    expected = "up to three proportions TRAIN,VALID,TEST, the first above 0, such as 969,30,1"
    try:
        proportions = [float(word) for word in split.split(",")]
    except ValueError:
        raise ConfigError("--split", found=repr(split), expected=expected) from None
    if len(proportions) > 3 or not all(0 <= proportion <= 1e9 for proportion in proportions) or proportions[0] < 1e-9:
        raise ConfigError("--split", found=repr(split), expected=expected)
    proportions += [0.0] * (3 - len(proportions))
    return proportions[0] / sum(proportions), proportions[1] / sum(proportions), proportions[2] / sum(proportions)


def split_documents(num_documents: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Return [first, last) documents of each part, such as train, valid and test: consecutive.

    Each number is rounded, as GPT-NeoX does.
    """
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + round(fraction * num_documents))
    surplus = bounds[-1] - num_documents
    bounds = [0] + [max(bound - surplus, 0) for bound in bounds[1:]]
    return list(itertools.pairwise(bounds))
