"""Records of the inputs of a preparation: to compare them at a resume, and to describe the result.

OUT.partial/inputs.json has the commits and formats of files of stores, so that a resume reads the same commits and does
not examine the files again.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.daemon_threads import map_in_threads
from pretrain.data.prepare.partial_output import read_state
from pretrain.data.prepare.shards import Shard, facts_of_shards
from pretrain.data.text_inputs.dataset import NamedDataset
from pretrain.data.text_inputs.find import Input, Inputs
from pretrain.data.text_inputs.stored_file import StoredFile, check_version
from pretrain.errors import ConfigError, file_errors
from pretrain.paths import write_synced
from pretrain.stored_json import read_object

_MOST_LISTED = 1000
_FILE = "inputs.json"


def record_inputs(inputs: Sequence[Input]) -> dict[str, Any]:
    """Return {"files": number, "bytes": sum, "sha256": of the list, "list": [[path, bytes, version], ...]}.

    The version is the modification time in ns of a local file, and the ETag or the like of a URL. Standard input has
    neither size nor version. The list is left out if it has over 1,000 files. Raises ConfigError.
    """
    digest, listed, total = hashlib.sha256(), [], 0
    for found in inputs:
        entry = _entry(found)
        digest.update(json.dumps(entry).encode() + b"\n")
        total += entry[1] or 0
        if len(inputs) <= _MOST_LISTED:
            listed.append(entry)
    return {"files": len(inputs), "bytes": total, "sha256": digest.hexdigest(), "list": listed}


def _entry(found: Input) -> list[Any]:
    if found.stored is not None:
        return [found.name, found.stored.size, found.stored.version]
    if found.dataset is not None and found.dataset.commit:
        return [found.path, found.num_bytes, found.dataset.commit]
    if not found.can_resume:
        return [found.path, None, None]
    with file_errors(found.path):
        status = os.stat(found.path)
    return [found.path, status.st_size, status.st_mtime_ns]


def check_unchanged(inputs: Sequence[Input], before: dict[str, Any]) -> None:
    """Raise ConfigError if an input is another one now than when `before` was recorded. Commits do not change."""
    stored = dict.fromkeys(found.stored for found in inputs if found.stored is not None and not found.stored.revision)
    map_in_threads(check_version, [file.open() for file in stored])
    if (now := record_inputs(inputs)) != before:
        raise ConfigError(changed_input(before, now), problem="it was changed while it was read",
                          remedy="prepare the data again")


def changed_input(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the path of the first input that two records differ in; "inputs" if other files were listed, or none."""
    paths = [[entry[0] for entry in record["list"]] for record in (before, after)]
    if paths[0] != paths[1]:
        return "inputs"
    pairs = zip(before["list"], after["list"], strict=True)
    return next((str(old[0]) for old, new in pairs if list(old) != list(new)), "inputs")


def describe_sources(inputs: Inputs, record: dict[str, Any]) -> dict[str, Any]:
    """Return where the data comes from, for .meta.json: as `record_inputs`, with names, and commits of the Hub."""
    files = []
    for found, (name, num_bytes, version) in zip(inputs.files, record["list"], strict=False):
        of_store = {"modified_ns": version} if isinstance(version, int) else {"version": version}
        revision = {"revision": found.stored.revision} if found.stored and found.stored.revision else {}
        files.append({"path": name} if num_bytes is None else
                     {"path": name, "bytes": num_bytes, **of_store, **revision})
    dataset = {} if inputs.dataset is None else {"dataset": inputs.dataset.facts()}
    return {**dataset, "files": record["files"], "bytes": record["bytes"], "sha256_of_list": record["sha256"],
            "list": files}


def save_examined(folder: Path, inputs: Inputs) -> None:
    """Write inputs.json, if there are files of stores. URLs are written without credentials. Raises OSError."""
    files = [[found.name, found.num_bytes, found.stored.version, found.stored.revision, found.kind, found.compression]
             for found in inputs.files if found.stored is not None]
    if files:
        write_synced(folder / _FILE, json.dumps({"commits": dict(inputs.commits), "files": files}).encode())


def read_examined(folder: Path) -> Inputs | None:
    """Return the files of stores that an earlier start found; None if there are none."""
    try:
        content = read_object(folder / _FILE)
        files = [StoredFile(*row[:4]) for row in content["files"]]
        return Inputs(tuple(Input(stored.url, row[4], row[5], stored.size, stored=stored)
                            for stored, row in zip(files, content["files"], strict=True)), (), content["commits"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def pin_dataset(dataset: NamedDataset, out: str, shard: Shard | None = None, *,
                overwrite: bool = False) -> NamedDataset:
    """Return a dataset with the commit that an earlier preparation of it, or of its shards, recorded, else with its
    newest one.
    """
    state = read_state(out if shard is None else shard.prefix(out))
    others = None if shard is None else facts_of_shards(out, shard, overwrite=overwrite)
    if others is not None and (state is None or overwrite):
        return dataset.pinned(others.record)
    return dataset.pinned({} if state is None else state["record"])
