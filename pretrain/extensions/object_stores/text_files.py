"""List the files that a URL names: in an object store, on a web server, in a repository of the Hugging Face Hub."""

import glob
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pretrain.data.text_inputs.stored_file import IsLeftOut, StoredFile
from pretrain.errors import ConfigError
from pretrain.extensions.object_stores.block_reader import BlockReader, CopiedReader
from pretrain.extensions.object_stores.remote_file import RemoteFile, names_of, open_file_system, version_of
from pretrain.remote import with_retries, without_credentials

_WEB = re.compile(r"https?://", re.IGNORECASE)
_HUB, _COMMIT = "hf", re.compile("[0-9a-f]{40}")
_HUB_FOLDERS = {"dataset": "datasets/", "space": "spaces/"}
_CARD = "README.md"
"""file of a repository of the Hub that describes it"""


def open_stored(file: StoredFile, copy: Path | None) -> BlockReader | CopiedReader:
    """Open a version of a file. To be called by the main thread: fsspec makes a client for each thread.

    Raises ConfigError if there is another version, and this is found without reading.
    """
    reader = BlockReader(RemoteFile(file.url, version=file.version, size=file.size))
    return reader if copy is None else CopiedReader(reader, copy)


def files_at(url: str, commits: dict[str, str], is_left_out: IsLeftOut) -> list[StoredFile]:
    """Return the files that a URL names: see `stored_files` of data/text_inputs/stored_file.py. Raises ConfigError.

    commits: "hf://REPOSITORY@REVISION" -> commit.
    """
    where = without_credentials(url)
    if _WEB.match(url):
        return [_web_file(url, where)]
    system, path = open_file_system(url, where)
    if not path.strip("/"):
        raise ConfigError(where, problem="it names no file of a store", remedy="give a URL such as s3://bucket/name")
    revision = ""
    if _HUB in names_of(system):
        path, revision = _at_commit(system, path, where, commits)
        url = f"{_HUB}://{path}"
    before, found, after = url.rstrip("/").rpartition(path)
    if not found:
        raise ConfigError(where, problem="files at such a URL cannot be listed", remedy="give a URL such as "
                          "s3://bucket/name")

    files: dict[str, Any] = {}
    for folder, entries in with_retries(lambda: _list(system, path), where):
        for name, facts in entries.items():
            inner = "" if folder is None else name.removeprefix(folder).strip("/")
            if not inner or not (is_left_out(inner) or (revision and inner == _CARD)):
                files[name] = facts
    if not files:
        is_pattern = glob.has_magic(path)
        raise ConfigError(where, problem="no file matches this pattern" if is_pattern else
                          "there are no files to read below it")
    return [_stored_file(before + name + after, facts, revision) for name, facts in files.items()]


def _stored_file(url: str, facts: dict[str, Any], revision: str) -> StoredFile:
    size, version = facts.get("size"), version_of(facts)
    if size is None or not version:  # a store whose list does not name them
        file = RemoteFile(url)
        size, version = file.size, file.version
    return StoredFile(url, int(size), version, revision, open_stored)


def _web_file(url: str, where: str) -> StoredFile:
    if "*" in url.partition("?")[0]:
        raise ConfigError(where, problem="a web server has no list of its files, so * cannot be used",
                          remedy="give the URL of each file; %2A is the character *")
    if not urlsplit(url).hostname:
        raise ConfigError(where, problem="it names no server", remedy="give a URL such as https://host/file")
    return _stored_file(url, {}, "")


def _at_commit(system: Any, path: str, where: str, commits: dict[str, str]) -> tuple[str, str]:
    """Return the path in the commit that a revision (default: main) names now, and the commit; "" for a bucket."""
    resolved = with_retries(lambda: system.resolve_path(path), where)
    if not hasattr(resolved, "repo_id"):
        return path, ""
    root = _HUB_FOLDERS.get(resolved.repo_type, "") + resolved.repo_id
    key = f"{_HUB}://{root}@{resolved.revision}"
    if _COMMIT.fullmatch(resolved.revision):
        commits[key] = resolved.revision
    if key not in commits:
        commits[key] = str(with_retries(lambda: system._api.repo_info(
            resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type).sha, where))
    return f"{root}@{commits[key]}/{resolved.path_in_repo}".rstrip("/"), commits[key]


def _list(system: Any, path: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Return (folder, {path: facts}) of each folder that a path or a glob names; None as folder: the files it names."""
    system.invalidate_cache()
    if not glob.has_magic(path):
        facts = _facts(system, path)
        return [_folder(system, path) if facts["type"] == "directory" else (None, {path: facts})]
    matches = {name: facts for name, facts in system.glob(path, detail=True).items() if not _is_hidden(name, path)}
    if not matches and (exact := _facts_or_none(system, path)) is not None:  # [ is part of the name
        return [(None, {path: exact})]
    return [_folder(system, name) if facts["type"] == "directory" else (None, {name: facts})
            for name, facts in sorted(matches.items())
            if not name.endswith("/") and not (facts["type"] == "directory" and "**" in path)]


def _facts(system: Any, path: str) -> dict[str, Any]:
    try:
        return dict(system.info(path))
    except FileNotFoundError as error:
        if "bucket does not" in str(error):
            raise
        hint = "; for all names that begin like this, add a *" if "/" in path else ""
        raise FileNotFoundError(f"there is no such file or folder{hint}") from error


def _facts_or_none(system: Any, path: str) -> dict[str, Any] | None:
    try:
        facts = dict(system.info(path))
    except FileNotFoundError:
        return None
    return facts if facts["type"] == "file" else None


def _folder(system: Any, path: str) -> tuple[str, dict[str, Any]]:
    """Return the files below a folder, in the order in which a local folder is read."""
    files = {name: facts for name, facts in system.find(path, detail=True).items()
             if facts["type"] == "file" and not name.endswith("/") and name != path}
    return path, dict(sorted(files.items(), key=lambda item: item[0].split("/")))


def _is_hidden(name: str, pattern: str) -> bool:
    """Return whether a wildcard matched the `.` that begins a name: in globs of local files, it does not."""
    base = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    return "/." in name.removeprefix(base) and "/." not in pattern.removeprefix(base)
