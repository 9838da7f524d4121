"""Datasets of the user's own code: --dataset_module MODULE:FUNCTION.

own_code.py imports the module. `DataSpec.module` comes from the command line or the file of --config alone:
`recorded_data_spec` rejects a run.json with this flag.
"""

from typing import Any

from pretrain.data.data_spec import DataSpec
from pretrain.data.samples.own import ItemError, OwnSamples
from pretrain.errors import ConfigError, did_you_mean, shorten
from pretrain.own_code import import_own_module, own_code_failed, traceback_of_own_code

SPLITS = ("train", "valid", "test")


def open_own_datasets(spec: DataSpec, *, seq_length: int, seed: int, vocab_size: int) -> dict[str, OwnSamples]:
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
