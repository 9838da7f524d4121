"""Datasets of the user's own code (--dataset_module MODULE:FUNCTION): items by number, in the order of this program.

An item is a sample of at most seq_length + 1 tokens, or a dictionary with its tokens, and optionally a weight and a
position for each of them. Each epoch visits the items in another order, which is a keyed permutation.

own_code.py imports the module. `DataSpec.module` comes from the command line or the file of --config alone:
`recorded_data_spec` rejects a run.json with this flag.
"""

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import PADDING, Indices, LookAhead
from pretrain.data.samples.shuffled import MASK_64, mix, permute
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError, did_you_mean, shorten
from pretrain.own_code import described, import_own_module, own_code_failed, traceback_of_own_code

if TYPE_CHECKING:
    from pretrain.data.data_spec import DataSpec

SPLITS = ("train", "valid", "test")
COLUMNS = ("tokens", "weights", "positions")
_CHECKED_ITEMS = 8  # at the start, and the last one
_Weights = npt.NDArray[np.float32]
_Positions = npt.NDArray[np.int64]


class ItemError(Exception):
    """An item of the user's dataset is wrong, or the user's code failed, which is then the cause.

    `where`: the flag; `problem`: what is wrong, with the number of the item.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class OwnSamples:
    """The items of a dataset of the user, as samples of seq_length + 1 tokens.

    Args:
        items: has `__len__` and `__getitem__`.
        fingerprint: of the items, as the user's code returned it.
        where: the flag, for messages.
        vocab_size: tokens of the model's vocabulary; each token of an item is compared with it.
    """

    has_padding = True

    def __init__(self, items: Any, fingerprint: str, where: str, *, seq_length: int, seed: int, vocab_size: int,
                 name: str = "train") -> None:
        self.seq_length, self.seed, self.name = seq_length, seed, name
        self.own_fingerprint = fingerprint
        self.samples_per_epoch = len(items)
        assert self.samples_per_epoch > 0
        self._items, self._where, self._vocab_size = items, where, vocab_size
        self._numbers = LookAhead(self._compute_numbers)
        self._columns: tuple[str, ...] = ()
        self._columns = tuple(self._item(0))
        for number in {*range(min(_CHECKED_ITEMS, self.samples_per_epoch)), self.samples_per_epoch - 1}:
            self._item(number)

    @property
    def has_weights(self) -> bool:
        """True if the items have a weight for each token. All items have the same columns as item 0."""
        return "weights" in self._columns

    @property
    def has_positions(self) -> bool:
        """True if the items have the positions of their tokens inside their documents."""
        return "positions" in self._columns

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        return ()

    @property
    def num_tokens(self) -> int:
        """The most tokens that the items can have."""
        return self.samples_per_epoch * self.seq_length

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples (indices count over all epochs) as integers [n, seq_length + 1], with PADDING at the end."""
        return self.columns(indices)[0]

    def columns(self, indices: Indices) -> tuple[npt.NDArray[np.int64], _Weights | None, _Positions | None]:
        """Return tokens, weights and positions of samples, each [n, seq_length + 1]; None: the items have none.

        The weight of a token belongs to its prediction. PADDING has weight and position 0.
        """
        numbers = self._numbers(np.asarray(indices, np.int64)).tolist()
        shape = len(numbers), self.seq_length + 1
        tokens = np.full(shape, PADDING, np.int64)
        weights = np.zeros(shape, np.float32) if self.has_weights else None
        positions = np.zeros(shape, np.int64) if self.has_positions else None
        for row, number in enumerate(numbers):
            item = self._item(number)
            for name, column in zip(COLUMNS, (tokens, weights, positions), strict=True):
                if column is not None:
                    column[row, :len(item[name])] = item[name]
        return tokens, weights, positions

    def _compute_numbers(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of the items that these samples are."""
        epochs, places = np.divmod(indices, self.samples_per_epoch)
        keys = mix(mix(np.array([self.seed & MASK_64], np.uint64)) ^ epochs.astype(np.uint64))
        return permute(places, self.samples_per_epoch, keys)

    def _item(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of an item. Raises ItemError."""
        what = f"item {number} of the {self.name} data"
        try:
            item = self._items[number]
            columns = dict(item) if isinstance(item, dict) else {"tokens": item}
            arrays = {str(name): np.asarray(column) for name, column in columns.items() if column is not None}
        except Exception as error:
            raise ItemError(self._where, f"{what}: __getitem__ failed: {described(error)}") from error
        problem = self._problem(arrays)
        if problem:
            raise ItemError(self._where, f"{what}: {problem}")
        return {name: arrays[name] for name in COLUMNS if name in arrays}

    def _problem(self, arrays: dict[str, npt.NDArray[Any]]) -> str:
        """Return what is wrong with an item; "": nothing."""
        tokens = arrays.get("tokens")
        unknown = next((name for name in arrays if name not in COLUMNS), None)
        if unknown is not None:
            return f"it has the key {shorten(repr(unknown))}; expected {', '.join(COLUMNS)}. " \
                   f"{did_you_mean(unknown, COLUMNS)}".strip()
        if tokens is None:
            return "it has no tokens"
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return f"its tokens are {_kind(tokens)}; expected a sequence of integers"
        if not 2 <= len(tokens) <= self.seq_length + 1:
            return f"it has {len(tokens)} tokens; expected 2 to {self.seq_length + 1}, --seq_length + 1"
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            return f"it has the token {wrong}; expected 0 to {self._vocab_size - 1}, the model's vocabulary"
        for name in COLUMNS[1:]:
            if name in arrays and arrays[name].shape != tokens.shape:
                return f"it has {_kind(arrays[name])} as {name}; expected one for each of its {len(tokens)} tokens"
        return _weights_problem(arrays.get("weights")) or _positions_problem(arrays.get("positions")) or \
            self._other_columns(arrays)

    def _other_columns(self, arrays: dict[str, npt.NDArray[Any]]) -> str:
        if not self._columns or {*arrays} == {*self._columns}:
            return ""
        return f"it has {' and '.join(sorted(arrays))}, and item 0 has {' and '.join(sorted(self._columns))}"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the user's fingerprint, the number of items and seq_length, which determine the samples."""
        content = f"own {self.own_fingerprint} {self.samples_per_epoch} {self.seq_length}"
        return hashlib.sha256(content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        return {"items": self.samples_per_epoch, "own_fingerprint": self.own_fingerprint}


def _weights_problem(weights: npt.NDArray[Any] | None) -> str:
    if weights is None:
        return ""
    if weights.dtype.kind not in "iufb" or not np.isfinite(weights).all() or (weights < 0).any():
        return "its weights are not finite numbers of at least 0"
    return "" if (weights < 1e30).all() else "it has a weight of 1e30 or more"


def _positions_problem(positions: npt.NDArray[Any] | None) -> str:
    """Return why these are not positions inside documents: from 0 up by 1, and 0 again for the next document."""
    if positions is None:
        return ""
    if positions.dtype.kind not in "iu":
        return f"its positions are {_kind(positions)}; expected integers"
    counted = np.diff(positions.astype(np.int64), prepend=-1) == 1
    if ((positions == 0) | counted).all():
        return ""
    wrong = int(np.flatnonzero((positions != 0) & ~counted)[0])
    return f"position {positions[wrong]} at place {wrong}; expected 0, which begins a document, or the previous " \
           "position + 1"


def _kind(array: npt.NDArray[Any]) -> str:
    return f"values of type {array.dtype} and shape {list(array.shape)}"


def open_own_datasets(spec: "DataSpec", *, seq_length: int, seed: int, vocab_size: int) -> dict[str, OwnSamples]:
    """Import the user's module, call its function for each split, and check the first items. Raises ConfigError."""
    assert spec.module is not None
    where = f"--dataset_module {spec.module}"
    module_name, _, function_name = spec.module.partition(":")
    module = import_own_module(module_name, where)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(where, problem=f"{module.__file__} has no function {function_name}",
                          remedy=did_you_mean(function_name, known) or "name the function that returns the dataset")
    datasets: dict[str, OwnSamples] = {}
    for split in SPLITS:
        call = f"{function_name}({split!r}, {seq_length})"
        items = _call(where, call, function, split, seq_length, **spec.module_args)
        if items is not None:
            datasets[split] = _samples(items, call, where, seq_length=seq_length, seed=seed, vocab_size=vocab_size,
                                       name=split)
    if "train" not in datasets:
        raise ConfigError(where, problem=f"{function_name}('train', {seq_length}) returned None",
                          remedy="return an object with __len__, __getitem__ and fingerprint")
    return datasets


def _call(where: str, call: str, function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function of the user's code. Raises ConfigError if it fails."""
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:
        raise own_code_failed(where, call, error) from error


def _samples(items: Any, call: str, where: str, *, seq_length: int, seed: int, vocab_size: int,
             name: str) -> OwnSamples:
    missing = [method for method in ("__len__", "__getitem__", "fingerprint") if not hasattr(items, method)]
    if missing:
        raise ConfigError(where, problem=f"{call} returned {shorten(type(items).__name__)} without "
                          f"{' and '.join(missing)}", remedy="fingerprint() returns a text that changes whenever the "
                          "items do, such as the SHA-256 of a file" if missing == ["fingerprint"] else "return an "
                          "object with __len__, __getitem__ and fingerprint, or None for no data")
    length = _call(where, f"__len__ of {call}", len, items)
    fingerprint = _call(where, f"fingerprint() of {call}", items.fingerprint)
    if length < 1:
        raise ConfigError(where, found=f"no items in {call}", expected="at least one, or None for no data")
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ConfigError(where, found=f"fingerprint() = {shorten(repr(fingerprint))} of {call}",
                          expected="a text that changes whenever the items do, such as the SHA-256 of a file")
    try:
        return OwnSamples(items, fingerprint, where, seq_length=seq_length, seed=seed, vocab_size=vocab_size, name=name)
    except ItemError as error:
        rejected = ConfigError(where, problem=error.problem)
        rejected.details = traceback_of_own_code(error.__cause__) if error.__cause__ else ""
        raise rejected from error
