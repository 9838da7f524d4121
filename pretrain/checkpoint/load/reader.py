"""Read weights by this project's parameter names: from a checkpoint of any layout, or from a transformers folder."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.shard_index import (
    BUFFERS,
    BUFFERS_FILE,
    FP32,
    StoredFragment,
    StoredParameters,
    parse_shard_indexes,
    read_index_texts,
)
from pretrain.checkpoint.load.hf_folder import WEIGHT_DTYPES, HFFolder, StoredTensor, read_header
from pretrain.checkpoint.load.odd_weights import element
from pretrain.errors import ConfigError
from pretrain.model.hf_names import TensorRule, tensor_rules
from pretrain.model.hf_weights import to_ours
from pretrain.model.parameters import BoxIndex, Part, boxes_of

_CHUNK_NUMEL = 2**24  # largest number of elements in a chunk
# settings of a parameter group that learning-rate schedulers change
SCHEDULED_SETTINGS = ("lr", "initial_lr", "betas", "momentum")


class SafetensorsFile:
    """A memory-mapped safetensors file. `file[name]` is a tensor that shares the mapped memory: do not change it."""

    def __init__(self, path: Path) -> None:
        self._names = read_header(path)  # raises ConfigError
        self._file = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def chunks_of(numel: int, chunk_numel: int = _CHUNK_NUMEL) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of consecutive chunks of a tensor with `numel` elements, each small enough for memory."""
    for start in range(0, numel, chunk_numel):
        yield start, min(chunk_numel, numel - start)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite."""
    return all(math.isfinite(value.item()) for value in tensor.aminmax())  # isfinite() would allocate several tensors


class WeightsReader(ABC):
    """Gives access to weights, and perhaps optimizer states, by this project's names of parameters.

    Attributes:
        folder: for messages.
        shapes: shape of each complete parameter, by name.
        states: "fp32", and the names of the optimizer states that have a number for each weight.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    states: Sequence[str] = (FP32,)

    @abstractmethod
    def copy(self, name: str, state: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        """Copy consecutive elements of a state into `out`, beginning with element `start`, until `out` is full.

        The elements are counted in the flattened complete parameter, or in `part` of it. `out` may be on any device and
        of any floating dtype.
        """

    def read(self, name: str, state: str, start: int, length: int) -> torch.Tensor:
        """Return elements `start` to `start + length` of a state as an fp32 tensor on the CPU."""
        out = torch.empty(length)
        self.copy(name, state, start, out)
        return out

    @abstractmethod
    def place(self, name: str, index: int) -> str:
        """Return the file and the element of it that holds an element of a flattened parameter, for messages."""

    def tensor(self, name: str, state: str = FP32) -> torch.Tensor:
        """Return the state of a full parameter as an fp32 tensor on the CPU, in the parameter's shape."""
        return self.read(name, state, 0, prod(self.shapes[name])).view(self.shapes[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the fp32 weights of all parameters, as a state_dict for the module of `layer_specs.as_module`."""
        return {name: self.tensor(name) for name in self.shapes}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the saved buffers by name: those of `shard_index.WithBuffers`."""
        return {}

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless the parameters have the names and shapes of the model that the source describes."""
        for name in sorted(expected.keys() | self.shapes.keys()):
            if self.shapes.get(name) != expected.get(name):
                raise ConfigError(f"{self.folder}: {name}", found=f"shape {self.shapes.get(name, 'none')}",
                                  expected=f"{expected.get(name, 'none')}, as in its model",
                                  remedy="use another checkpoint")


class CheckpointReader(WeightsReader):
    """Reads a checkpoint of any layout, without a process group.

    The constructor reads all shard indexes, unless it is given their content. A tensor's file is memory-mapped when the
    tensor is first needed. Before the first step, and in a checkpoint of weights alone, there are no optimizer states.

    Attributes:
        scalars: optimizer states that are a single number ("step" ...).
        optimizer: class name of the base optimizer.

    Raises ConfigError if an index is missing or the indexes do not cover a parameter.
    """

    def __init__(self, folder: Path, stored: StoredParameters | None = None) -> None:
        stored = stored or parse_shard_indexes(folder, read_index_texts(folder))
        self.folder, self.shapes, self.scalars = folder, stored.shapes, stored.scalars
        self.optimizer, self.states = stored.optimizer, [*stored.states]
        self._fragments = stored.fragments
        self._starts = {name: [fragment.start for fragment in fragments]
                        for name, fragments in self._fragments.items()}
        self._boxes: dict[str, BoxIndex[StoredFragment]] = {}  # boxes of the latest parameter
        self._files: dict[str, Any] = {}
        self._flat_tensors: dict[FileLocation, torch.Tensor] = {}

    def group(self, name: str) -> dict[str, Any]:
        """Return the settings (lr, betas ...) of a parameter's group."""
        return self._fragments[name][0].group

    def place(self, name: str, index: int) -> str:
        fragment = next((each for each in self._fragments[name] if each.part is None
                         and each.start <= index < each.start + each.length), self._fragments[name][0])
        return f"{fragment.states[FP32].file}: {element(name, self.shapes[name], index)}"

    def has_state(self, name: str, state: str) -> bool:
        """Return whether a parameter has this state."""
        return any(state in fragment.states for fragment in self._fragments[name])

    def copy(self, name: str, state: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        out = out.view(-1)
        if part is None and self._fragments[name][0].part is None:
            self._copy_elements(name, state, start, out)
            return
        shape = self.shapes[name]
        for box in boxes_of(shape, part, start, out.numel()):
            for other, fragment in self._box_index(name).between(*box.span(shape)):
                if (ranges := box.intersection(other)) is not None:
                    box.view(out, ranges).copy_(other.view(self._flat_tensor(name, state, fragment), ranges))

    def _copy_elements(self, name: str, state: str, start: int, out: torch.Tensor) -> None:
        """Copy elements of a parameter that no rank divided into parts."""
        done, fragments = 0, self._fragments[name]
        index = bisect_right(self._starts[name], start) - 1
        while done < out.numel():
            fragment = fragments[index]
            skip = start + done - fragment.start
            count = min(fragment.length - skip, out.numel() - done)
            source = self._flat_tensor(name, state, fragment).narrow(0, fragment.offset + skip, count)
            out.narrow(0, done, count).copy_(source)
            done, index = done + count, index + 1

    def _box_index(self, name: str) -> BoxIndex[StoredFragment]:
        """Return the boxes of a parameter's fragments. Boxes of earlier parameters are forgotten: they may be many."""
        if name not in self._boxes:
            shape = self.shapes[name]
            boxes = [(box, fragment) for fragment in self._fragments[name]
                     for box in boxes_of(shape, fragment.part, fragment.start, fragment.length, fragment.offset)]
            self._boxes = {name: BoxIndex(shape, boxes)}
        return self._boxes[name]

    def _flat_tensor(self, name: str, state: str, fragment: StoredFragment) -> torch.Tensor:
        """Return the memory-mapped flat tensor that holds a fragment's state."""
        location = fragment.states.get(state)
        if location is None:
            raise ConfigError(f"{self.folder}: {name}", problem=f"the optimizer state {state} is missing; other "
                              "parameters have it", remedy="use another checkpoint")
        if location not in self._flat_tensors:
            value = self._load_file(location.file)
            try:
                for key in location.keys:
                    value = value[key]
                self._flat_tensors[location] = value.detach().reshape(-1)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.folder / location.file}", problem=f"there is no tensor at {location.keys} "
                                  f"({type(error).__name__}: {error})", remedy="use another checkpoint") from None
        found, needed = self._flat_tensors[location].numel(), fragment.offset + fragment.length
        if found < needed:
            raise ConfigError(f"{self.folder / location.file}", found=f"{found} elements at {location.keys}",
                              expected=f"at least {needed}", remedy="use another checkpoint")
        return self._flat_tensors[location]

    def _load_file(self, file: str) -> Any:
        """Return the content of a file; it is loaded only once."""
        if file not in self._files:
            path = self.folder / file
            self._files[file] = SafetensorsFile(path) if path.suffix == ".safetensors" else load_pickle(path, mmap=True)
        return self._files[file]

    def buffers(self) -> dict[str, torch.Tensor]:
        if self._model_states_file() is not None:
            saved: dict[str, torch.Tensor] = self.engine_state().get(BUFFERS, {})
            return saved
        return load_file(self.folder / BUFFERS_FILE) if (self.folder / BUFFERS_FILE).is_file() else {}

    def _model_states_file(self) -> str | None:
        names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
        return next((name for name in names if (self.folder / name).is_file()), None)

    def engine_state(self) -> dict[str, Any]:
        """Return the content of rank 0's model-states file: global_steps, lr_scheduler, ds_config and others."""
        state: dict[str, Any] = self._load_file(self._model_states_file() or "mp_rank_00_model_states.pt")
        return state


class HFWeights(WeightsReader):
    """Reads the weights of a transformers folder under this project's names.

    The files are memory-mapped. A tensor that must be converted is converted when it is first read, in its own dtype;
    only the latest one is kept.
    """

    def __init__(self, found: HFFolder) -> None:
        self.folder, self.config, self.found = found.folder, found.config, found
        self.rules: Mapping[str, TensorRule] = {rule.ours: rule for rule in tensor_rules(found.config)}
        self.shapes = {name: rule.shape for name, rule in self.rules.items()}
        self._files: dict[str, SafetensorsFile] = {}
        self._latest: tuple[str, torch.Tensor] | None = None
        self._converted: dict[str, torch.Tensor] = {}

    def dtype(self, name: str) -> str:
        """Return the stored dtype of a parameter. If its parts have several, return fp32."""
        found = {WEIGHT_DTYPES[self.found.tensors[part].dtype] for part in self.rules[name].theirs}
        return found.pop() if len(found) == 1 else "fp32"

    def copy(self, name: str, state: str, start: int, out: torch.Tensor, part: Part | None = None) -> None:
        assert state == "fp32", f"{name}: a transformers folder has no optimizer state {state}"
        if part is not None:
            self._copy_part(name, state, start, out, part)
            return
        out, rule, first = out.view(-1), self.rules[name], 0
        if rule.transposed or rule.row_order:
            out.copy_(self.stored(name).view(-1).narrow(0, start, out.numel()))
            return
        for theirs in rule.theirs:  # read only the wanted elements of each tensor
            tensor = self._part(theirs).view(-1)
            low, high = max(start, first), min(start + out.numel(), first + tensor.numel())
            if low < high:
                out.narrow(0, low - start, high - low).copy_(tensor.narrow(0, low - first, high - low))
            first += tensor.numel()

    def _copy_part(self, name: str, state: str, start: int, out: torch.Tensor, part: Part) -> None:
        for box in boxes_of(part.shape, part, start, out.numel()):
            view, (first, end) = box.view(out.view(-1), box.ranges), box.span(part.shape)
            if view.numel() == end - first:
                self.copy(name, state, first, view)  # consecutive elements: read only these
            else:
                view.copy_(self.stored(name)[tuple(slice(*indices) for indices in box.ranges)])

    def stored(self, name: str) -> torch.Tensor:
        """Return a complete parameter in its stored dtype. It may be a view of a memory-mapped file: do not change it.

        Values that need no conversion are not copied.
        """
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # free it before the next one is converted
            self._latest = name, to_ours(self.rules[name], self.their_tensors(name), self.config)
        return self._latest[1]

    def buffers(self) -> dict[str, torch.Tensor]:
        return {ours: self._part(theirs) for ours, theirs, _ in self.config.named_buffers()}

    def their_tensors(self, name: str) -> list[torch.Tensor]:
        """Return the tensors in the files that hold a parameter, as views of the mapped files: do not change them."""
        return [self._part(part) for part in self.rules[name].theirs]

    def place(self, name: str, index: int) -> str:
        value = self.read(name, FP32, index, 1)
        for theirs, stored in zip(self.rules[name].theirs, self.their_tensors(name), strict=True):
            same = torch.isclose(stored.reshape(-1).float(), value, rtol=0, atol=0, equal_nan=True)
            if same.any():
                found = int(same.to(torch.uint8).argmax())
                return f"{self.found.tensors[theirs].file}: {element(theirs, stored.shape, found)}"
        return element(name, self.shapes[name], index)  # the values were converted

    def _part(self, theirs: str) -> torch.Tensor:
        """Return a tensor of transformers' model. Of those that are converted, only the latest ones are kept."""
        if theirs not in self.found.converted:
            return self._in_file(self.found.tensors[theirs])
        if theirs not in self._converted:
            self._converted = {}  # free them before the next ones are converted
            convert, sources = self.found.converted[theirs]
            self._converted = convert([self._in_file(each) for each in sources])
        return self._converted[theirs]

    def _in_file(self, tensor: StoredTensor) -> torch.Tensor:
        if tensor.file not in self._files:
            self._files[tensor.file] = SafetensorsFile(self.folder / tensor.file)
        return self._files[tensor.file][tensor.name]


def open_weights(source: Path | HFFolder) -> WeightsReader:
    """Return the reader of a checkpoint folder, or of a checked transformers folder."""
    return HFWeights(source) if isinstance(source, HFFolder) else CheckpointReader(source)
