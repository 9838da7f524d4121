"""Check and read the weights of a transformers folder: a config.json and safetensors files.

`check_hf_folder` compares the headers of the files with the model, and imports no torch. `HFWeights` reads one tensor
at a time, under this project's names.
"""

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.checkpoint.format.safetensors_header import WEIGHT_DTYPES, StoredTensor, read_header
from pretrain.errors import ConfigError, shorten
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.hf_names import HEAD, TensorRule, names_in_model, tensor_rules
from pretrain.stored_json import read_json

if TYPE_CHECKING:
    import torch
    from safetensors import safe_open

    from pretrain.model.parameters import Part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORMATS = ("pytorch_model*.bin", "consolidated*.pth", "tf_model.h5", "flax_model.msgpack", "*.gguf",
                  "model*.safetensors")
_COMPARED_BYTES = 2**22
_LONGEST_NAME = 255  # bytes of a file's name on Linux


@dataclass(frozen=True)
class HFFolder:
    """A transformers folder whose headers fit its model."""

    folder: Path
    config: ModelConfig
    files: tuple[str, ...]  # the safetensors files that are read
    tensors: dict[str, StoredTensor] = field(repr=False)  # by the complete name in transformers, without a tied head

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
        config = load_model_config(str(folder / "config.json"))  # not the folder: its name may be that of a preset
    stored, files = _read_headers(folder)
    rules = tensor_rules(config)
    embedding = rules[0].theirs[0]
    shapes = {name: shape for rule in rules for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)}
    found = {full: stored[name] for name, full in names_in_model(stored, config).items()}
    head = found.pop(HEAD, None) if config.tie_word_embeddings else None
    _check_names(folder, set(found), set(shapes))
    for name, shape in shapes.items():
        _check_tensor(folder, found[name], shape, config, is_vocabulary=name in (embedding, HEAD))
    if head is not None:
        _check_tied_head(folder, head, found[embedding])
    return HFFolder(folder, config, files, found)


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


def _read_index(path: Path) -> dict[str, str]:
    """Return the map from tensors to files of a model.safetensors.index.json."""
    try:
        weight_map = read_json(path)["weight_map"]
        valid = bool(weight_map) and all(isinstance(file, str) and file.endswith(".safetensors")
                                         and Path(file).name == file and len(file.encode()) <= _LONGEST_NAME
                                         for file in weight_map.values())
    except OSError as error:
        raise ConfigError(str(path), problem=f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ConfigError(str(path), problem='it is not a JSON object with a "weight_map" from tensors to '
                          "safetensors files",
                          remedy="download it, or write the folder again")
    result: dict[str, str] = weight_map
    return result


def _no_safetensors(folder: Path) -> ConfigError:
    others = weight_files(folder)
    if not others:
        return ConfigError(str(folder), problem=f"there is neither {SINGLE} nor {INDEX}",
                           remedy="name a folder with weights in the safetensors format")
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
                          remedy="use weights that are not quantized")
    if is_vocabulary and len(tensor.shape) == 2 and tensor.shape[1:] == shape[1:] and tensor.shape != shape:
        key = config.key("vocab_size")
        raise ConfigError(where, found=f"{tensor.shape[0]} rows", expected=f"{key} of the config.json ({shape[0]})",
                          remedy=f"set {key} to {tensor.shape[0]}: rows that pad the vocabulary are part of the model")
    if tensor.shape != shape:
        raise ConfigError(where, found=f"the shape {list(tensor.shape)}", expected=str(list(shape)),
                          remedy="use the config.json that belongs to the weights")


def _check_tied_head(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise ConfigError unless the stored head has exactly the bytes of the embedding."""
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if same:
        with open(folder / head.file, "rb") as first, open(folder / embedding.file, "rb") as second, \
                mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ) as x, \
                mmap.mmap(second.fileno(), 0, access=mmap.ACCESS_READ) as y:
            for start in range(0, head.num_bytes, _COMPARED_BYTES):
                count = min(_COMPARED_BYTES, head.num_bytes - start)
                a, b = head.start + start, embedding.start + start
                if x[a:a + count] != y[b:b + count]:
                    same = False
                    break
    if not same:
        raise ConfigError(f"{folder / head.file}: {head.name}", problem=f"it differs from {embedding.name}, although "
                          "tie_word_embeddings is true", remedy="set tie_word_embeddings to false in the config.json")


class HFWeights:
    """Reads the weights of a transformers folder under this project's names. It has the interface of CheckpointReader.

    The files are memory-mapped. A tensor that must be converted is converted when it is first read, in its own dtype;
    only the latest one is kept.

    Attributes:
        shapes: shape of each parameter, by name.
        states: "fp32" only, because the folder has no optimizer states.
    """

    def __init__(self, found: HFFolder) -> None:
        self.folder, self.config, self.found = found.folder, found.config, found
        self.rules: Mapping[str, TensorRule] = {rule.ours: rule for rule in tensor_rules(found.config)}
        self.shapes = {name: rule.shape for name, rule in self.rules.items()}
        self.states = ["fp32"]
        self.scalars: dict[str, float] = {}
        self.optimizer = ""
        self._files: dict[str, safe_open] = {}
        self._latest: tuple[str, torch.Tensor] | None = None

    def dtype(self, name: str) -> str:
        """Return the stored dtype of a parameter. If its parts have several, return fp32."""
        found = {WEIGHT_DTYPES[self.found.tensors[part].dtype] for part in self.rules[name].theirs}
        return found.pop() if len(found) == 1 else "fp32"

    def copy(self, name: str, state: str, start: int, out: "torch.Tensor", part: "Part | None" = None) -> None:
        """Copy consecutive elements of a parameter into `out`, beginning with element `start`, until `out` is full.

        The elements are counted in the flattened complete parameter, or in `part` of it. `out` may be on any device and
        of any floating dtype.
        """
        from pretrain.checkpoint.load.boxes import copy_part

        assert state == "fp32", f"{name}: a transformers folder has no optimizer state {state}"
        if part is not None:
            copy_part(lambda first, rows: self.copy(name, state, first, rows), part, start, out)
            return
        out, rule, first = out.view(-1), self.rules[name], 0
        if rule.transposed or rule.row_order:
            out.copy_(self.stored(name).view(-1).narrow(0, start, out.numel()))
            return
        for theirs in rule.theirs:  # read only the wanted elements of each tensor
            tensor = self._part(self.found.tensors[theirs]).view(-1)
            low, high = max(start, first), min(start + out.numel(), first + tensor.numel())
            if low < high:
                out.narrow(0, low - start, high - low).copy_(tensor.narrow(0, low - first, high - low))
            first += tensor.numel()

    def read(self, name: str, state: str, start: int, length: int) -> "torch.Tensor":
        """Return elements `start` to `start + length` of a parameter as an fp32 tensor on the CPU."""
        import torch

        out = torch.empty(length)
        self.copy(name, state, start, out)
        return out

    def tensor(self, name: str, state: str = "fp32") -> "torch.Tensor":
        """Return a complete parameter as an fp32 tensor on the CPU."""
        return self.read(name, state, 0, prod(self.shapes[name])).view(self.shapes[name])

    def weights(self) -> dict[str, "torch.Tensor"]:
        """Return the fp32 weights of all parameters, as a state_dict for the module of `layer_specs.as_module`."""
        return {name: self.tensor(name) for name in self.shapes}

    def stored(self, name: str) -> "torch.Tensor":
        """Return a complete parameter in its stored dtype. It may be a view of a memory-mapped file: do not change it.

        Values that need no conversion are not copied.
        """
        from pretrain.model.hf_weights import to_ours

        if self._latest is None or self._latest[0] != name:
            self._latest = None  # free it before the next one is converted
            self._latest = name, to_ours(self.rules[name], self.their_tensors(name), self.config)
        return self._latest[1]

    def their_tensors(self, name: str) -> "list[torch.Tensor]":
        """Return the tensors in the files that hold a parameter, as views of the mapped files: do not change them."""
        return [self._part(self.found.tensors[part]) for part in self.rules[name].theirs]

    def _part(self, tensor: StoredTensor) -> "torch.Tensor":
        from safetensors import safe_open

        if tensor.file not in self._files:
            self._files[tensor.file] = safe_open(self.folder / tensor.file, framework="pt")
        result: Any = self._files[tensor.file].get_tensor(tensor.name)
        return result
