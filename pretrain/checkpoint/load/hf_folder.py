"""Check a transformers folder: headers of the weights, recorded hashes, and tokenizer. Imports no torch."""

import json
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from safetensors import SafetensorError, safe_open

from pretrain.checkpoint.format.hashed_files import FileRecord, sha256_of
from pretrain.config.layout import DTYPE_BYTES
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import TOKENIZER_FILES, check_links, find_tokenizer_file, load_tokenizer
from pretrain.errors import ConfigError, file_errors, shorten
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.hf_names import HEAD, tensor_rules
from pretrain.progress import ProgressBar
from pretrain.stored_json import build, read_json

if TYPE_CHECKING:
    import torch

    # tensors that transformers makes of others in the files, by their names in its model
    Converted = dict[str, tuple[Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]], list["StoredTensor"]]]

Shape = tuple[int, ...]
# dtypes that weights may have: name in the header of a safetensors file -> our name
WEIGHT_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORMATS = ("pytorch_model*.bin", "consolidated*.pth", "tf_model.h5", "flax_model.msgpack", "*.gguf",
                  "model*.safetensors")
_COMPARED_BYTES = 2**22
_LONGEST_NAME = 255  # bytes of a file's name on Linux
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: str  # name in the folder
    name: str  # in this file
    dtype: str  # as in the header: "F32", "BF16" ...
    shape: Shape


@dataclass(frozen=True)
class HFFolder:
    """A transformers folder whose headers fit its model."""

    folder: Path
    config: ModelConfig
    files: tuple[str, ...]  # the safetensors files that are read
    tensors: dict[str, StoredTensor] = field(repr=False)  # by the complete name in transformers, without a tied head
    converted: "Converted" = field(default_factory=dict, repr=False)

    @cached_property
    def dtype(self) -> str:
        """The dtype of most weights: "fp32", "bf16" or "fp16"."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[WEIGHT_DTYPES[tensor.dtype]] += prod(tensor.shape)
        return sizes.most_common(1)[0][0]

    def bytes_of(self, file: str) -> int:
        """Return the size of a file in bytes."""
        return (self.folder / file).stat().st_size


def weight_files(folder: Path) -> list[str]:
    """List the files with weights in a folder, in any format that transformers or a converter reads."""
    patterns = (SINGLE, INDEX, *_OTHER_FORMATS)
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def check_hf_folder(folder: Path, config: ModelConfig | None = None) -> HFFolder:
    """Check the headers of all weights of a transformers folder, without torch.

    Args:
        config: the model that the weights must fit. None: the model of the folder's config.json.

    Raises:
        ConfigError: there are no safetensors files, a file is missing, damaged or truncated, or a tensor is missing,
            unknown, or has another shape or dtype than the model's.
    """
    if not (folder / "config.json").is_file():
        problem = "there is no such folder"
        if folder.exists():
            problem = "this is a file, and not a folder"
        if folder.is_dir():
            problem = f"there is no file {folder / 'config.json'}"
        raise ConfigError(str(folder), problem=problem,
                          remedy="name a folder with a transformers config.json and safetensors files")
    if config is None:
        config = load_model_config(str(folder / "config.json"))  # not the folder: its name may also name a preset
    stored, files = _read_headers(folder)
    rules = tensor_rules(config)
    embedding = rules[0].theirs[0]
    shapes = {name: shape for rule in rules for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)}
    converted: Converted = {}
    found = _tensors_of_model(folder, stored, config, converted)
    head = found.pop(config.implementation.head_name(config), None) if config.tie_word_embeddings else None
    shapes |= {theirs: buffer.shape for _, theirs, buffer in config.named_buffers()}
    # buffers of whole numbers belong to no parameter: `_check_tensor` rejects their dtype
    shapes |= {name: tensor.shape for name, tensor in found.items() if tensor.dtype not in WEIGHT_DTYPES}
    _check_names(folder, set(found), set(shapes))
    for name, shape in shapes.items():
        _check_tensor(folder, found[name], shape, config, is_vocabulary=name in (embedding, HEAD))
    if head is not None:
        _check_tied_head(folder, head, found[embedding])
    return HFFolder(folder, config, files, found, converted)


def _tensors_of_model(folder: Path, stored: Mapping[str, StoredTensor], config: ModelConfig,
                      converted: "Converted") -> dict[str, StoredTensor]:
    """Return the tensors of transformers' model that the files hold, and add to `converted` those that are converted.

    A converted tensor has the file of the first tensor that it is made of.
    """
    result: dict[str, StoredTensor] = {}
    try:
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        for each in config.implementation.from_files(config, shapes):
            sources = [stored[name] for name in each.sources]
            for target, shape in each.targets.items():
                result[target] = sources[0]
                if each.convert is not None:
                    result[target] = replace(sources[0], name=target, shape=shape, dtype=_common_dtype(sources))
                    converted[target] = each.convert, sources
    except ValueError as error:
        raise ConfigError(f"{folder / stored[str(error)].file}: {shorten(str(error))}",
                          problem="transformers cannot convert this tensor together with those that belong to it",
                          remedy="use the config.json that belongs to the weights, and complete files") from None
    return result


def _common_dtype(tensors: Sequence[StoredTensor]) -> str:
    """Return the dtype of a tensor made of others: theirs; fp32 if they have several; or one that is unknown."""
    dtypes = {tensor.dtype for tensor in tensors}
    unknown = sorted(dtypes - WEIGHT_DTYPES.keys())
    return unknown[0] if unknown else dtypes.pop() if len(dtypes) == 1 else "F32"


def _read_headers(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return all tensors of a folder by their names in the files, and the files' names."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ConfigError(str(folder), problem=f"it has both {SINGLE} and {INDEX}", remedy="remove the outdated one")
    if single.is_file():
        return read_header(single), (SINGLE,)
    if not index.is_file():
        raise _no_safetensors(folder)
    weight_map = _read_index(index)
    files = tuple(sorted(set(weight_map.values())))
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ConfigError(str(folder / file), problem=f"this file is missing, and {INDEX} names it",
                              remedy="download it, or write the folder again")
        header = read_header(folder / file)
        twice = sorted(found.keys() & header.keys())
        if twice:
            raise ConfigError(str(folder / file), problem=f"{shorten(twice[0])} is also in {found[twice[0]].file}",
                              remedy="write the folder again")
        found |= header
    for name, file in weight_map.items():
        if name not in found or found[name].file != file:
            raise ConfigError(str(index), problem=f"it says that {shorten(name)} is in {file}, where it is not",
                              remedy="write the folder again")
    return found, files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a safetensors file by name. Raises ConfigError if the file is damaged or truncated."""
    with file_errors(path), _damaged_file(path):
        with open(path, "rb") as file:
            if file.read(8) == b"version ":
                raise ConfigError(str(path), problem="this is a pointer of Git LFS, not the weights",
                                  remedy="`git lfs pull` in its repository downloads them")
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {name: StoredTensor(path.name, name, part.get_dtype(), tuple(part.get_shape()))
                    for name, part in slices.items()}


@contextmanager
def _damaged_file(path: Path) -> Iterator[None]:
    """Raise ConfigError if the safetensors library, which compares all sizes and positions, rejects the file."""
    try:
        yield
    except SafetensorError as error:
        if "unknown variant" in str(error):
            raise ConfigError(str(path), problem=f"it has a data type that this program does not know: "
                              f"{shorten(str(error))}", remedy="use weights that are not quantized") from None
        raise ConfigError(str(path), problem=f"this safetensors file is damaged: {shorten(str(error))} (it has "
                          f"{path.stat().st_size} bytes)",
                          remedy="download or write the file again") from None


def header_bytes(tensors: Iterable[tuple[str, str, Shape]]) -> bytes:
    """Return the first bytes of a safetensors file whose tensors follow in this order, without gaps.

    They are the length of the header (u64, little-endian), and the header (JSON). The safetensors library writes only
    tensors that are all in memory.

    Args:
        tensors: name, dtype ("fp32", "bf16" or "fp16") and shape of each tensor.
    """
    names = {ours: theirs for theirs, ours in WEIGHT_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(path: Path, name: str) -> memoryview:
    """Return the bytes of a tensor in a safetensors file, which is memory-mapped."""
    with open(path, "rb") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(data_start - 8))[name]["data_offsets"]
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(mapped)[data_start + start:data_start + end]


class _Index(TypedDict):
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, str]:
    """Return the map from tensors to files of a model.safetensors.index.json."""
    weight_map: dict[str, str] = {}
    with file_errors(path), suppress(ValueError):  # an empty map is rejected below
        weight_map = build(_Index, read_json(path))["weight_map"]
    if not weight_map or not all(file.endswith(".safetensors") and Path(file).name == file
                                 and len(file.encode()) <= _LONGEST_NAME for file in weight_map.values()):
        raise ConfigError(str(path), problem='it is not a JSON object with a "weight_map" from tensors to '
                          "safetensors files", remedy="download it, or write the folder again")
    return weight_map


def _no_safetensors(folder: Path) -> ConfigError:
    others = weight_files(folder)
    if not others:
        return ConfigError(str(folder), problem=f"there is neither {SINGLE} nor {INDEX}",
                           remedy="name a folder with weights in the safetensors format, or start from random ones: "
                           f"--model {folder} without --init_from")
    if any(name.startswith("pytorch_model") for name in others):
        return ConfigError(str(folder / others[0]), problem="weights in PyTorch's pickle format are not read",
                           remedy="convert them: load the folder with transformers and call "
                           "save_pretrained(NEW_FOLDER, safe_serialization=True)")
    return ConfigError(str(folder / others[0]), problem=f"there is neither {SINGLE} nor {INDEX} next to this file",
                       remedy="name a folder as save_pretrained of transformers writes it")


def _check_names(folder: Path, found: set[str], expected: set[str]) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    for names, has, lacks in ((missing, "the model of the config.json has", "the files do not"),
                              (unknown, "the files have", "the model of the config.json does not")):
        if names:
            others = f", and {len(names) - 1} others" if len(names) > 1 else ""
            tensors = "these tensors" if others else "this tensor"
            raise ConfigError(f"{folder}: {shorten(names[0])}{others}", problem=f"{has} {tensors}, and {lacks}",
                              remedy="use the config.json that belongs to the weights")


def _check_tensor(folder: Path, tensor: StoredTensor, shape: tuple[int, ...], config: ModelConfig, *,
                  is_vocabulary: bool) -> None:
    where = f"{folder / tensor.file}: {shorten(tensor.name)}"
    if tensor.dtype not in WEIGHT_DTYPES:
        raise ConfigError(where, found=f"the dtype {shorten(tensor.dtype)}",
                          expected=f"one of {', '.join(sorted(WEIGHT_DTYPES))}",
                          remedy="use weights that are not quantized, and without buffers of whole numbers")
    if is_vocabulary and len(tensor.shape) == 2 and tensor.shape[1:] == shape[1:] and tensor.shape != shape:
        key = config.key("vocab_size")
        raise ConfigError(where, found=f"{tensor.shape[0]} rows", expected=f"{key} of the config.json ({shape[0]})",
                          remedy=f"set {key} to {tensor.shape[0]}: rows that pad the vocabulary are part of the model")
    if tensor.shape != shape:
        raise ConfigError(where, found=f"the shape {list(tensor.shape)}", expected=str(list(shape)),
                          remedy="use the config.json that belongs to the weights")


def _check_tied_head(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise ConfigError unless the stored head has exactly the bytes of the embedding."""
    x, y = (_bytes_of(folder / tensor.file, tensor.name) for tensor in (head, embedding))
    is_same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        bytes(x[start:start + _COMPARED_BYTES]) == bytes(y[start:start + _COMPARED_BYTES])
        for start in range(0, len(x), _COMPARED_BYTES))
    if not is_same:
        raise ConfigError(f"{folder / head.file}: {head.name}", problem=f"it differs from {embedding.name}, although "
                          "tie_word_embeddings is true", remedy="set tie_word_embeddings to false in the config.json")


class _Source(TypedDict):
    files: dict[str, FileRecord]


def expected_hashes(folder: Path, files: tuple[str, ...]) -> dict[str, str]:
    """Return the SHA-256 of those files whose hash is recorded.

    An exported folder records them in source.json. In the Hub's cache, a file is a link to a blob, and the name of a
    large file's blob is its SHA-256.
    """
    recorded: dict[str, str] = {}
    for file in files:
        path = folder / file
        if path.is_symlink() and _SHA256.fullmatch(path.resolve().name):
            recorded[file] = path.resolve().name
    with suppress(OSError, ValueError):  # the folder was not written by this program
        source = build(_Source, read_json(folder / "source.json"))
        recorded |= {file: source["files"][file].sha256 for file in files if file in source["files"]}
    return recorded


def verify_recorded_hashes(found: HFFolder) -> None:
    """Read the files whose hashes are recorded. Raises ConfigError for a damaged one."""
    recorded = replace(found, files=tuple(expected_hashes(found.folder, found.files)))
    with ProgressBar(f"verifying {found.folder.name}", sum(map(found.bytes_of, recorded.files))) as progress:
        hash_files(recorded, progress.advance)


def hash_files(found: HFFolder, advance: Callable[[int, str], None] | None = None) -> dict[str, FileRecord]:
    """Return size and SHA-256 of each weights file. Raises ConfigError if one differs from its recorded hash."""
    recorded, result = expected_hashes(found.folder, found.files), {}
    for file in found.files:
        path = found.folder / file
        with file_errors(path):
            record = FileRecord(path.stat().st_size, sha256_of(path))
        if record.sha256 != recorded.get(file, record.sha256):
            raise ConfigError(str(path), found=f"SHA-256 {record.sha256[:16]}...",
                              expected=f"{recorded[file][:16]}..., as recorded when it was written",
                              remedy="download or write the file again")
        result[file] = record
        if advance is not None:
            advance(record.bytes, file)
    return result


@dataclass(frozen=True)
class HFTokenizer:
    """The tokenizer files of a transformers folder."""

    files: tuple[Path, ...]
    fingerprint: str  # SHA-256 of the file that load_tokenizer reads
    notes: tuple[str, ...] = ()  # special tokens that differ from the config.json


def find_hf_tokenizer(found: HFFolder) -> HFTokenizer | None:
    """Return the tokenizer files of a folder; None if there is no file that load_tokenizer reads.

    Raises ConfigError if the tokenizer cannot be read, is a link out of the folder, or has tokens beyond the model's
    vocabulary.
    """
    readable = find_tokenizer_file(found.folder)
    if readable is None:
        return None
    check_links(found.folder)
    loaded = load_tokenizer(readable)
    notes = check_tokenizer_fits(loaded.ids, found.config.hf_config, vocab_size=found.config.vocab_size,
                                 where=str(readable), remedy="use the tokenizer that belongs to the weights, or remove "
                                 "its files")
    files = (found.folder / name for name in dict.fromkeys((*TOKENIZER_FILES, readable.name)))
    return HFTokenizer(tuple(path for path in files if path.is_file()), loaded.fingerprint, tuple(notes))
