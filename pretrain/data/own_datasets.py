"""Datasets of the user's own code: --dataset_module MODULE:FUNCTION.

This is the only place that imports a module whose name the user gives. `DataSpec.module` comes from the command line or
the file of --config alone: `recorded_data_spec` rejects a run.json with this flag.
"""

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from pretrain.data.data_spec import DataSpec
from pretrain.data.samples.own import ItemError, OwnSamples, described, own_frames
from pretrain.errors import ConfigError, did_you_mean, shorten

SPLITS = ("train", "valid", "test")


def open_own_datasets(spec: DataSpec, *, seq_length: int, seed: int, vocab_size: int) -> dict[str, OwnSamples]:
    """Import the user's module, call its function for each split, and check the first items. Raises ConfigError."""
    assert spec.module is not None
    where = f"--dataset_module {spec.module}"
    module_name, _, function_name = spec.module.partition(":")
    module = _import(module_name, where)
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


def _import(name: str, where: str) -> ModuleType:
    """Import a module from the current folder, PYTHONPATH or an installed package, as `python -m` finds it.

    Afterwards the current folder is the last one that is searched: later imports of the user's code find its modules
    there, and its files shadow none of the packages that this program imports later.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(where, problem=f"there is no module {name} in {folder}, on PYTHONPATH or among the "
                              "installed packages", remedy="start the run in the folder of the module, or add it to "
                              "PYTHONPATH") from None
        raise _failed(where, f"the import of {name}", error) from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _call(where: str, call: str, function: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function of the user's code. Raises ConfigError if it fails."""
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:
        raise _failed(where, call, error) from error


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
        rejected.details = _traceback(error.__cause__) if error.__cause__ else ""
        raise rejected from error


def _failed(where: str, what: str, error: BaseException) -> ConfigError:
    rejected = ConfigError(where, problem=f"{what} failed: {described(error)}")
    rejected.details = _traceback(error)
    return rejected


def _traceback(error: BaseException) -> str:
    """Return the traceback of an exception in the user's code; "" if the line says all about it."""
    frames = own_frames(error)
    if not frames and not isinstance(error, SyntaxError):
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames),
                    *traceback.format_exception_only(error)])
