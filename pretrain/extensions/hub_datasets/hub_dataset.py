"""Find the data files of datasets of the Hugging Face Hub, and of folders in its format, by the library `datasets`.

Scripts of datasets are never run: the versions of the library that this package accepts cannot.
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.data.text_inputs.chunk import Chunk, Position
from pretrain.data.text_inputs.dataset import DataFile, NamedDataset
from pretrain.data.text_inputs.formats import JSONL_ENDINGS, decompressed
from pretrain.errors import ConfigError, import_package, shorten
from pretrain.extensions.hub_datasets.hub_requests import ask_hub, hub_error
from pretrain.remote import is_url
from pretrain.stored_json import read_object

_NAME = re.compile(r"(?:[\w-][\w.-]{0,95}/)?[\w-][\w.-]{0,95}")
_ANSWER_S = 10.0
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # files of Dataset.save_to_disk
_ENDINGS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True)
class DatasetName(NamedDataset):
    """A dataset, as the flags --dataset... name it."""

    name: str
    """ORG/NAME on the Hub, or a folder"""
    config: str = ""
    """empty: the only one, or the default one"""
    split: str = "train"
    revision: str = ""
    """branch, tag or commit; empty: main"""
    commit: str = ""
    """the commit that `revision` is; empty: it is not known yet"""

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.name)

    @property
    def flag(self) -> str:
        """The flag, for messages."""
        return f"--dataset {self.name}"

    @property
    def words(self) -> list[str]:  # type: ignore[override]
        """The flags and values that name it."""
        options = {"config": self.config, "split": self.split if self.split != "train" else "",
                   "revision": self.revision}
        return ["--dataset", self.name, *(word for name, value in options.items() if value
                                          for word in (f"--dataset_{name}", value))]

    def pinned(self, record: Mapping[str, Any]) -> "DatasetName":
        """Return the dataset with a commit: that of an earlier preparation of it, else the one that its revision has
        now. Raises ConfigError.
        """
        if self.is_folder or self.commit:
            return self
        if record.get("--dataset") == self.name and (record.get("--dataset_revision") or "") == self.revision and \
                record.get("dataset_commit"):
            return replace(self, commit=str(record["dataset_commit"]))
        return replace(self, commit=str(_repository(self).sha))

    def open(self) -> "HubDataset":
        """Find the data files of the split. Raises ConfigError, which says what exists, for names that do not."""
        if self.is_folder:
            if self.revision:
                raise ConfigError("--dataset_revision", problem="a local folder has no revisions",
                                  remedy="leave it out")
            saved = any(os.path.isfile(os.path.join(self.name, name)) for name in (_STATE, _SPLITS))
            return _saved_dataset(self) if saved else _with_files(self, _builder(self), {})
        wanted = self.pinned({})
        sizes = {str(file.rfilename): int(file.size or 0) for file in _repository(wanted).siblings or ()}
        return _with_files(wanted, _builder(wanted), sizes)


def _data_file(path: str, num_bytes: int) -> DataFile:
    """Return a data file. `path`: hf://datasets/ORG/NAME@COMMIT/FILE, or a local path."""
    name = path.lower()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    kind = "parquet" if name.endswith(".parquet") else "jsonl" if name.endswith(JSONL_ENDINGS) else "rows"
    return DataFile(path, num_bytes, kind, _ENDINGS.get(Path(path.lower()).suffix, ""))


@dataclass(frozen=True)
class HubDataset:
    """The data files of one split, in their order."""

    found: DatasetName
    """with the config and the commit that were found"""
    files: tuple[DataFile, ...]
    builder: Any = field(repr=False)
    """the library's builder of the config; None for a folder of Dataset.save_to_disk"""

    def describe(self) -> str:
        """Return the dataset, config, split and commit."""
        found = self.found
        parts = [f"dataset {found.name}", f"config {found.config}" if found.config else "", f"split {found.split}",
                 f"commit {found.commit}" if found.commit else ""]
        return ", ".join(part for part in parts if part)

    @property
    def commit(self) -> str:
        return self.found.commit

    def record(self) -> dict[str, str | None]:
        """Return what determines the rows, as JSON values."""
        found = self.found
        return {"--dataset": found.name, "--dataset_config": found.config, "--dataset_split": found.split,
                "--dataset_revision": found.revision or None, "dataset_commit": found.commit or None}

    def facts(self) -> dict[str, str | None]:
        """Return where the rows come from, for PREFIX.meta.json."""
        return {name: value or None for name, value in asdict(self.found).items()}

    def read(self, path: str, column: str, start: Position, *, chunk_bytes: int, long_bytes: int) -> Iterator[Chunk]:
        """Yield the values of a column of a file that is not Parquet. Raises ConfigError."""
        from pretrain.extensions.hub_datasets.hub_rows import read_data_file

        yield from read_data_file(self, path, column, start, chunk_bytes=chunk_bytes, long_bytes=long_bytes)


def library() -> Any:
    """Return the module `datasets`, quiet, and without the retries of the library. Raises ConfigError."""
    datasets = import_package("datasets", "--dataset", "hub",
                              "the Python package datasets, which reads it, is not installed")
    from fsspec.compression import register_compression
    from huggingface_hub.utils import disable_progress_bars, logging

    register_compression("zstd", _open_zstd, "zst", force=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # an IterableDataset would import torch
    for name in dir(datasets.config):  # its 20 retries are silent; huggingface_hub repeats a request up to 5 times
        if name.startswith("STREAMING_") and name.endswith(("_MAX_RETRIES", "_RETRY_INTERVAL")):
            setattr(datasets.config, name, int(name.endswith("_MAX_RETRIES")))
    return datasets


def _open_zstd(file: Any, mode: str = "rb", **_: Any) -> io.BufferedReader:
    """Open a zstd stream. The one of fsspec (2026.9) ends silently where a file was cut."""
    stream: Any = decompressed(file, "zstd")
    return io.BufferedReader(stream, 1 << 17)


def _repository(wanted: DatasetName) -> Any:
    """Ask the Hub for the commit and the files of a dataset. Raises ConfigError."""
    datasets = library()
    from huggingface_hub import HfApi, errors

    if not _NAME.fullmatch(wanted.name):
        raise ConfigError(wanted.flag, problem="there is no such folder, and no dataset of the Hub has such a name",
                          remedy="give ORG/NAME, or a folder")
    if datasets.config.HF_HUB_OFFLINE:
        raise ConfigError(wanted.flag, problem="there is no such folder, and HF_HUB_OFFLINE is set", remedy=f"`hf "
                          f"download --repo-type dataset {wanted.name} --local-dir FOLDER` on a machine with a network "
                          "makes a folder for --dataset")

    def ask() -> Any:
        revision = wanted.commit or wanted.revision or None
        try:
            return HfApi().dataset_info(wanted.name, revision=revision, files_metadata=True, timeout=_ANSWER_S)
        except errors.RevisionNotFoundError:
            raise ConfigError(f"--dataset_revision {revision}", problem=f"{wanted.name} has no such branch, tag or "
                              f"commit{_known_revisions(wanted.name)}") from None

    return ask_hub(ask, wanted.flag)


def _known_revisions(name: str) -> str:
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(name, repo_type="dataset")
    except Exception:  # only a help for the message
        return ""
    return "; it has " + shorten(", ".join(ref.name for ref in (*refs.branches, *refs.tags)))


def _builder(wanted: DatasetName) -> Any:
    """Return the library's builder of a config. Raises ConfigError."""
    datasets = library()
    where = {"path": os.path.abspath(wanted.name) if wanted.is_folder else wanted.name,
             "revision": wanted.commit or None}

    def build() -> Any:
        try:
            builder = datasets.load_dataset_builder(name=wanted.config or None, **where)
            if type(builder).__name__ == "Cache":  # any commit of the dataset, which an earlier program downloaded
                raise ConnectionError("the Hub did not answer")
            return builder
        except ValueError:
            names = datasets.get_dataset_config_names(**where)
            if wanted.config and wanted.config not in names:
                raise ConfigError(f"--dataset_config {wanted.config}", problem=f"{wanted.name} has no such config; it "
                                  f"has {_listed(names)}", word=wanted.config, known=names) from None
            if not wanted.config and len(names) > 1:
                raise ConfigError("--dataset_config", problem=f"{wanted.name} has several configs: {_listed(names)}",
                                  remedy="choose one") from None
            raise

    return ask_hub(build, wanted.flag)


def _listed(names: Any) -> str:
    return shorten(", ".join(map(str, names)))


def _with_files(wanted: DatasetName, builder: Any, sizes: Mapping[str, int]) -> HubDataset:
    """Return the dataset with the files of its split. sizes: path in the repository -> bytes."""
    files_of = {str(split): [str(path) for path in paths] for split, paths in (builder.config.data_files or {}).items()}
    files = files_of[_split(wanted, files_of)]
    for path in files:  # a README.md may name any URL and any path
        if is_url(path) != bool(wanted.commit) or (wanted.commit and not _is_of(path, wanted.commit)):
            raise ConfigError(wanted.flag, problem=f"its README.md names a file outside of it: {path}",
                              remedy="give this file as an input")
    found = replace(wanted, config=str(builder.config.name))
    return HubDataset(found, tuple(_data_file(path, sizes.get(_in_repository(path), 0) if is_url(path) else
                                            os.path.getsize(path)) for path in files), builder)


def _is_of(url: str, commit: str) -> bool:
    return url.startswith("hf://datasets/") and url.partition("@")[2].startswith(f"{commit}/")


def _in_repository(url: str) -> str:
    """Return the path in the repository of hf://datasets/ORG/NAME@COMMIT/PATH."""
    return url.partition("@")[2].partition("/")[2]


def _split(wanted: DatasetName, splits: Any) -> str:
    if wanted.split not in splits:
        raise ConfigError(f"--dataset_split {wanted.split}", problem=f"{wanted.name} has no such split; it has "
                          f"{_listed(splits)}", word=wanted.split, known=splits)
    return wanted.split


def _saved_dataset(wanted: DatasetName) -> HubDataset:
    """Return a dataset that Dataset.save_to_disk or DatasetDict.save_to_disk wrote. Raises ConfigError."""
    library()
    folder = Path(wanted.name)
    if wanted.config:
        raise ConfigError("--dataset_config", problem=f"{folder} was written by save_to_disk: it has no configs",
                          remedy="leave it out")
    try:
        if (folder / _SPLITS).is_file():
            folder /= _split(wanted, read_object(folder / _SPLITS)["splits"])
        else:
            _split(wanted, [str(read_object(folder / _STATE).get("_split") or "train")])
        paths = [str(folder / entry["filename"]) for entry in read_object(folder / _STATE)["_data_files"]]
        return HubDataset(wanted, tuple(_data_file(path, os.path.getsize(path)) for path in paths), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise hub_error(wanted.flag, error) from None
