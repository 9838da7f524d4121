"""Shards: parts of a preparation that several machines make, each with a file that describes it for the merge."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.data.prepare.complete import DataFacts, PreparedData
from pretrain.data.prepare.document_step import InputFile, row_type
from pretrain.data.prepare.partial_output import DOCUMENTS
from pretrain.data.prepare.summary import Statistics, read_summary
from pretrain.data.text_inputs.parts import Part
from pretrain.data.token_files.hashes import DataHashes, hash_file, hashes_path, read_hashes
from pretrain.errors import ConfigError, reason_of
from pretrain.paths import write_synced
from pretrain.stored_json import build, read_object

SLURM = "slurm"
_MOST_SHARDS = 99_999  # five digits in the names
_NAME = re.compile(r"(?P<out>.+)\.shard-(?P<index>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_VERSION = 2
_FORMS = "i/n with i from 0 to n-1, such as 3/8; slurm or slurm/n in an array job of SLURM"


@dataclass(frozen=True, order=True)
class Shard:
    """Shard number `index`, from 0, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def prefix(self, out: str) -> str:
        """Return the prefix of the shard's files."""
        return f"{out}.shard-{self.index:05d}-of-{self.count:05d}"


def parse_shard(word: str, environ: Mapping[str, str]) -> Shard:
    """Return the shard that the value of --shard names. Raises ConfigError."""
    name, _, number = word.partition("/")
    if name == SLURM:
        index, count = _slurm_task(environ, number)
    elif match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", word, re.ASCII):
        index, count = int(match[1]), int(match[2])
    else:
        raise ConfigError("--shard", found=repr(word), expected=_FORMS)
    if not 1 <= count <= _MOST_SHARDS:
        raise ConfigError("--shard", found=f"{count} shards", expected=f"1 to {_MOST_SHARDS}")
    if index >= count:
        raise ConfigError("--shard", problem=f"there is no shard {index} of {count}: the first is 0/{count}, and the "
                          f"last is {count - 1}/{count}")
    return Shard(index, count)


def _slurm_task(environ: Mapping[str, str], number: str) -> tuple[int, int]:
    """Return the number of this task of an array job, and of all tasks, or `number` if it is given."""
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX")]
    values = [environ.get(name, "") for name in names]
    if not all(re.fullmatch(r"\d{1,9}", value, re.ASCII) for value in values):
        raise ConfigError("--shard slurm", problem=f"{names[0]}, _COUNT, _MIN and _MAX are not set: this is no task of "
                          "an array job", remedy="submit it with sbatch --array=0-7, or give i/n")
    task, count, first, last = map(int, values)
    if number:
        if not re.fullmatch(r"\d{1,9}", number, re.ASCII):
            raise ConfigError("--shard", found=repr(f"{SLURM}/{number}"), expected=_FORMS)
        return task, int(number)
    if last - first + 1 != count:
        raise ConfigError("--shard slurm", problem=f"the array has {count} of the tasks {first} to {last}",
                          remedy="give --shard slurm/n: the task with the number i then makes shard i of n")
    return task - first, count


@dataclass(frozen=True)
class ShardRecord:
    """Content of OUT.shard-I-of-N.shard.json."""

    version: int
    index: int
    count: int
    facts: DataFacts
    statistics: dict[str, Any]
    """Statistics.to_json() without the counts of tokens, which a merge counts again. If the shard begins inside its
    first file, lines of this file are counted from `first_byte`
    """
    documents_sha256: str
    """SHA-256 of the .documents"""
    first_file: int
    """number of the first file of the shard in the list of inputs"""
    first_byte: int
    """byte of this file at which the shard begins, if its lines are counted from there; otherwise 0"""
    first_name: str
    """name of this file in places, without "(from byte ...)" """
    last_file: int
    """number of the last file; -1: the shard has none, or all of the last one"""
    last_lines: int
    """line ends in the shard's part of the last file"""
    files: list[InputFile]
    """the files of the shard, from `first_file` on"""
    command: list[str]
    """words of the command line that made the shard, without --shard"""

    @property
    def shard(self) -> Shard:
        return Shard(self.index, self.count)


def write_record(path: Path, shard: Shard, facts: DataFacts, part: Part, *, last_lines: int, **values: Any) -> None:
    """Write the record of a complete shard, with a checksum. part: the shard's part of the inputs. Raises OSError."""
    first, last = (part.files[0], part.files[-1]) if part.files else (None, None)
    counts_lines = first is not None and first.kind != "parquet"
    record = asdict(ShardRecord(
        _VERSION, shard.index, shard.count, facts, first_file=part.first_file,
        first_byte=first.start if first is not None and counts_lines else 0,
        first_name=first.name if first is not None else "",
        last_file=-1 if last is None or last.stop is None else part.last_file, last_lines=last_lines,
        files=[InputFile.of(found) for found in part.files], **values))
    write_synced(path, json.dumps({"sha256": _checksum(record), "record": record}).encode())


def record_path(prefix: str) -> Path:
    return Path(f"{prefix}.shard.json")


def _checksum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def read_record(prefix: str) -> ShardRecord:
    """Read the record of the shard with this prefix. Raises OSError and ValueError."""
    content = read_object(record_path(prefix))
    values = content.get("record")
    if content.get("sha256") != _checksum(values):
        raise ValueError("its content does not match the SHA-256 in it")
    record = build(ShardRecord, values)
    if record.version != _VERSION:
        raise ValueError(f"it has version {record.version}, and this program reads version {_VERSION}")
    return record


def shard_of(prefix: str) -> tuple[str, Shard] | None:
    """Return (OUT, shard) for the prefix of a shard's files; None for another one."""
    match = _NAME.fullmatch(prefix)
    return (match["out"], Shard(int(match["index"]), int(match["count"]))) if match else None


def shards_in_folder(out: str) -> list[Shard]:
    """Return the shards of the data set `out` that have a record in its folder, sorted."""
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        return []
    ending, found = record_path("").name, []
    for path in folder.iterdir():
        named = shard_of(path.name.removesuffix(ending)) if path.name.endswith(ending) else None
        if named is not None and named[0] == Path(out).name:
            found.append(named[1])
    return sorted(found)


def facts_of_shards(out: str, shard: Shard, *, overwrite: bool) -> DataFacts | None:
    """Return the facts of a complete shard of `out`, so that `shard` reads the same commits; None if there is none.

    overwrite: `shard` itself is made again, and does not count.
    """
    for found in shards_in_folder(out):
        if found != shard or not overwrite:
            try:
                return read_record(found.prefix(out)).facts
            except (OSError, ValueError):
                continue
    return None


def check_count(out: str, shard: Shard) -> None:
    """Raise ConfigError if there are shards of another division of the same data set."""
    others = [found for found in shards_in_folder(out) if found.count != shard.count]
    if others:
        count = others[0].count
        raise ConfigError(f"--shard {shard}", problem=f"{record_path(others[0].prefix(out))} is one of {count} shards",
                          remedy=f"give --shard i/{count}, or remove the shards of the other number")


@dataclass(frozen=True)
class ShardFiles:
    """A complete shard. Its files have the sizes of their hashes, and all but the .bin have the right content."""

    prefix: str
    record: ShardRecord
    hashes: DataHashes

    @property
    def num_documents(self) -> int:
        return int(self.record.statistics["documents"])


def check_files(prefix: str, shard: Shard, record: ShardRecord) -> ShardFiles | str:
    """Return the shard, or why its files are not those that were written. The content of the .bin is checked later."""
    if record.shard != shard:
        return f"{record_path(prefix)} is of shard {record.shard}"
    try:
        hashes = read_hashes(hashes_path(prefix))
        if hashes is None or not hashes.is_complete:
            return f"{hashes_path(prefix)} is missing or not complete"
        row = row_type(record.facts.columns)
        num_bytes = int(record.statistics["documents"]) * row.itemsize
        for ending, size, sha256 in (("bin", hashes.bin_bytes, ""), ("idx", hashes.idx_bytes, hashes.idx_sha256),
                                     (DOCUMENTS, num_bytes, record.documents_sha256)):
            path = Path(f"{prefix}.{ending}")
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, and {size} were written"
            with path.open("rb") as file:
                if sha256 and hash_file(file.fileno(), after_chunk=lambda: None) != sha256:
                    return f"{path} is damaged: it has another SHA-256 than when it was written"
        Statistics.from_json(record.statistics)
    except OSError as error:
        return f"{error.filename} cannot be read: {reason_of(error)}"
    except (ValueError, TypeError, KeyError) as error:
        return f"a file of {prefix} is damaged: {error}"
    return ShardFiles(prefix, record, hashes)


def complete_shard(prefix: str, shard: Shard, facts: DataFacts) -> PreparedData | None:
    """Return the .meta.json of a shard that was made before from the same inputs with the same settings.

    So the jobs of all shards can be started again, and only what is missing is made.
    """
    try:
        record = read_record(prefix)
        may_skip = facts.record["skip_errors"] or record.statistics["skipped"] == 0
        is_same = record.facts.of_all_shards() == facts.of_all_shards() and may_skip
        if not is_same or isinstance(check_files(prefix, shard, record), str):
            return None
        read_summary(prefix)  # the command prints it
        return PreparedData.of(read_object(Path(f"{prefix}.meta.json")))
    except (OSError, ValueError, KeyError):
        return None
