"""Find the shards of a preparation, and check that all are there, complete, and of the same inputs and settings."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pretrain.active_extensions import extensions
from pretrain.data.prepare.input_record import changed_input
from pretrain.data.prepare.partial_output import partial_path
from pretrain.data.prepare.shards import (
    Shard,
    ShardFiles,
    ShardRecord,
    check_files,
    read_record,
    record_path,
    shard_of,
    shards_in_folder,
)
from pretrain.data.token_files.writer import existing_file
from pretrain.errors import ConfigError, counted, reason_of

_MOST_NAMED = 10  # shards in a message


def named_shards(out: str, prefixes: Sequence[str]) -> list[str] | None:
    """Return the prefixes of the shards to merge into `out`: those in `prefixes`, or if it is empty, those in out's
    folder. Returns None if `prefixes` are other data sets. Raises ConfigError for a mixture of both, and for none.
    """
    if not prefixes:
        found = [shard.prefix(out) for shard in shards_in_folder(out)]
        if not found:
            raise ConfigError(out, problem=f"there are no shards {out}.shard-*", remedy="make them with `ds-pretrain "
                              "prepare --shard i/n`, or name the data sets to merge after OUT")
        return found
    others = [prefix for prefix in prefixes if shard_of(prefix) is None]
    shards = [prefix for prefix in prefixes if shard_of(prefix) is not None and record_path(prefix).exists()]
    if shards and others:
        raise ConfigError(others[0], problem=f"it is no shard of a preparation, and {shards[0]} is one",
                          remedy="merge the shards first")
    return list(prefixes) if shards else None


def open_shards(prefixes: Sequence[str]) -> list[ShardFiles]:
    """Return all shards of a preparation, in order. Raises ConfigError.

    The error names the shards that are missing, damaged, or of other inputs or settings, and the command that makes
    them again.
    """
    named = [shard_of(prefix) for prefix in prefixes]
    assert all(named), "names of shards"
    outs, shards = [entry[0] for entry in named if entry], [entry[1] for entry in named if entry]
    counts = sorted({shard.count for shard in shards})
    if len(counts) > 1:
        raise ConfigError(prefixes[0], problem=f"there are shards of {' and of '.join(map(str, counts))}",
                          remedy="name the shards of one number, or remove the others")
    repeated, times = Counter(shards).most_common(1)[0]
    if times > 1:
        raise ConfigError(prefixes[shards.index(repeated)], problem=f"shard {repeated} is given twice")
    records: dict[Shard, ShardRecord] = {}
    problems: dict[Shard, str] = {}
    found: dict[Shard, ShardFiles] = {}
    for prefix, shard in zip(prefixes, shards, strict=True):
        try:
            record = read_record(prefix)
        except (OSError, ValueError) as error:
            problems[shard] = f"{record_path(prefix)}: {reason_of(error)}"
            continue
        first = next(iter(records.values()), record)
        if record.facts == first.facts:  # one object for all shards: the list of inputs is long
            record = replace(record, facts=first.facts)
        records[shard] = record
        checked = check_files(prefix, shard, record)
        if isinstance(checked, str):
            problems[shard] = checked
        else:
            found[shard] = checked
    for shard in sorted({Shard(index, counts[0]) for index in range(counts[0])} - set(shards)):
        if record_path(shard.prefix(outs[0])).exists():
            raise ConfigError(shard.prefix(outs[0]), problem="it is not named, and the other shards need it",
                              remedy="name all shards after OUT, or none of them")
        is_begun = partial_path(shard.prefix(outs[0])).exists()
        problems[shard] = "it is not complete: it was stopped, or is being made" if is_begun else "it does not exist"
    if problems:
        raise not_complete(problems, outs[0], records)
    ordered = [found[shard] for shard in sorted(found)]
    _check_same(ordered)
    return ordered


def not_complete(problems: dict[Shard, str], out: str, records: dict[Shard, ShardRecord]) -> ConfigError:
    """Return the error for shards of `out` that must be made again."""
    wrong = sorted(problems)
    listed = [f"shard {shard}: {problems[shard]}" for shard in wrong[:_MOST_NAMED]]
    more = [f"{len(wrong) - _MOST_NAMED} more"] * (len(wrong) > _MOST_NAMED)
    command = next((record.command for record in records.values() if record.command), None)
    again = "give the command that made the others, with --shard "
    if command is not None:
        exists = bool(existing_file(wrong[0].prefix(out)))
        again = f"run `{_command(command, wrong[0], overwrite=exists)}`"
        again += ", and the same with --shard " * (len(wrong) > 1)
    numbers = [str(shard) for shard in wrong[command is not None : _MOST_NAMED]]
    return ConfigError(f"{counted(len(wrong), 'shard')} of {wrong[0].count}", problem="; ".join([*listed, *more]),
                       remedy=again + ", ".join(numbers))


def _command(words: Sequence[str], shard: Shard, *, overwrite: bool) -> str:
    """Return the command that makes a shard, with the extensions of this command: files do not name any."""
    named = [word for each in extensions() if each.origin.startswith("--extension ") for word in each.origin.split()]
    return shlex.join(["ds-pretrain", *named, "prepare", *words, "--shard", str(shard), *["--overwrite"] * overwrite])


def _check_same(shards: Sequence[ShardFiles]) -> None:
    """Raise ConfigError if two shards have other inputs or settings."""
    first = shards[0]
    for shard in shards[1:]:
        ours, theirs = first.record.facts.of_all_shards(), shard.record.facts.of_all_shards()
        different = [name for name, value in ours.items() if theirs.get(name) != value]
        if "inputs" in different:
            different[different.index("inputs")] = changed_input(ours["inputs"], theirs["inputs"])
        if different:
            command = _command(first.record.command, shard.record.shard, overwrite=True)
            raise ConfigError(shard.prefix, problem=f"it was not made as {first.prefix} was; different: "
                              f"{', '.join(different)}", remedy=f"if the other one is right, run `{command}`")
