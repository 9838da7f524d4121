"""Modules of the user's own code, such as those of --dataset_module. Their import, and errors that they raise.

This is the only place that imports a module whose name the user gives. The name comes from the command line, the file
of --config or the DeepSpeed JSON that they name: no record of a run makes a program import code.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pretrain.errors import ConfigError, shorten


def import_own_module(name: str, where: str) -> ModuleType:
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
                              "installed packages", remedy="leave out .py" if name.endswith(".py") else
                              "start the run in the folder of the module, or add it to PYTHONPATH") from None
        raise own_code_failed(where, f"the import of {name}", error) from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def is_own(value: Any) -> bool:
    """Return whether a value is a name my_module:NAME of the user's code, which a record alone never imports."""
    return isinstance(value, str) and ":" in value


def own_loss(name: str | None) -> Callable[..., Any] | None:
    """Return the function that --loss names; None: there is none. Raises ConfigError."""
    return None if name is None else own_function(name, f"--loss {name}", "my_module:loss")


def own_object(spec: str, where: str, example: str = "my_module:EXTENSION") -> Any:
    """Return the object that the user names as module:NAME. Raises ConfigError.

    `where`: the flag or key, and the name. `example`: of such a name.
    """
    module, colon, name = spec.partition(":")
    if not module or not colon or not name.isidentifier():
        raise ConfigError(where.partition(" ")[0], found=shorten(spec), expected="a module and a name in it, such as "
                          f"{example}")
    found = vars(import_own_module(module, where))
    if name not in found:
        own = [each for each, value in found.items() if getattr(value, "__module__", module) == module or
               not isinstance(value, (type, FunctionType))]
        raise ConfigError(where, problem=f"the module {module} has no {shorten(name)}", word=name, known=own)
    return found[name]


def own_function(spec: str, where: str, example: str) -> Callable[..., Any]:
    """Return the function that the user names as module:NAME: see `own_object`. Raises ConfigError."""
    found = own_object(spec, where, example)
    if not callable(found):
        raise ConfigError(where, found=type(found).__name__, expected="a function")
    function: Callable[..., Any] = found
    return function


def own_code_failed(where: str, what: str, error: BaseException) -> ConfigError:
    """Return the error for an exception of the user's code."""
    rejected = ConfigError(where, problem=f"{what} failed: {described(error)}")
    rejected.details = traceback_of_own_code(error)
    return rejected


def traceback_of_own_code(error: BaseException) -> str:
    """Return the traceback of an exception in the user's code; "" if the line says all about it."""
    frames = own_frames(error)
    if not frames and not isinstance(error, SyntaxError):
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames),
                    *traceback.format_exception_only(error)])


def described(error: BaseException) -> str:
    """Return an exception of the user's code on one line, with the file and the line that raised it."""
    frames = own_frames(error)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}:{error.lineno})"
    return shorten(f"{type(error).__name__}: {error}".removesuffix(": ")) + place


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code: without frames of this program and of the import system."""
    others = (str(Path(__file__).parent), "<frozen ", str(Path(importlib.__file__ or "-").parent))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
