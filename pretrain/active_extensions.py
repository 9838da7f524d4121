"""The extensions of this process: where they are found, how --extension adds one, and what all of them bring."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.callback import Callback
from pretrain.cli import OWNED, say
from pretrain.errors import ConfigError, shorten
from pretrain.extension import API, BUILT_IN, ExportFormat, Extension, Problem, RequestFile
from pretrain.own_code import described, own_code_failed, own_object
from pretrain.paths import RUN_FILES

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch.nn import Module

    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan

ENTRY_POINTS = "ds_pretrain.extensions"
BUILT_IN_EXTENSIONS = "pretrain.extensions"

_found: dict[str, Extension] = {}  # of this process: built-in ones, installed ones, then those that `activate` adds
_listeners: list[Callable[[Extension], None]] = []
_is_searched = False


def extensions() -> list[Extension]:
    """Return all extensions of this process. While they are being found, those found so far."""
    _find()
    return list(_found.values())


def for_each_extension(call: Callable[[Extension], None]) -> None:
    """Call a function with each extension, now or when it is found. It raises ConfigError for one that does not fit."""
    _listeners.append(call)
    for name, each in list(_found.items()):
        try:
            call(each)
        except ConfigError as error:
            if each.origin == BUILT_IN:
                raise
            del _found[name]
            _leave_out(f"extension {name}", error)
    _find()


def _leave_out(where: str, error: Exception) -> None:
    """Say that an installed extension is not used: it must not end programs that do not need it."""
    if os.environ.get("RANK", "0") == "0":
        say(f"warning: the {where} is left out: {error if isinstance(error, ConfigError) else described(error)}")


def _find() -> None:
    """Find built-in and installed extensions. Their modules may import others that ask for extensions."""
    global _is_searched
    if _is_searched:
        return
    _is_searched = True
    folder = Path(__file__).parent / "extensions"
    for path in sorted(folder.glob("*/extension.py")):
        module = f"{BUILT_IN_EXTENSIONS}.{path.parent.name}.extension"
        _add(importlib.import_module(module).EXTENSION, module, BUILT_IN)
    for entry in entry_points(group=ENTRY_POINTS):
        where = f"extension {entry.name} of the package {entry.dist.name if entry.dist else 'unknown'}"
        origin = f"package {entry.dist.name} {entry.dist.version}" if entry.dist else where
        try:
            _add(entry.load(), entry.module, origin, where)
        except Exception as error:
            _leave_out(where, error)


def activate(spec: str) -> Extension:
    """Add the extension, or the class of a callback, that --extension names as module:NAME. Raises ConfigError."""
    where = f"--extension {shorten(spec)}"
    module = spec.partition(":")[0]
    found = own_object(spec, where)
    _find()
    if isinstance(found, type) and issubclass(found, Callback):
        return _of_callback(found, module, spec, where)
    if isinstance(found, Extension) and found == _declared(_found.get(found.name)):
        return _found[found.name]
    return _add(found, module, f"--extension {spec}", where)


def _of_callback(callback: type[Callback], module: str, spec: str, where: str) -> Extension:
    """Add an extension that brings a callback, made without arguments, to each run. Raises ConfigError."""
    points = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if not name.startswith("_")]
    if all(getattr(callback, point) is getattr(Callback, point) for point in points):
        names = [name for name, value in vars(callback).items() if inspect.isfunction(value)]
        raise ConfigError(where, word=names[0] if names else "", known=points,
                          problem=f"the class has no method that a run calls (it has {', '.join(names) or 'none'})")
    try:
        inspect.signature(callback).bind()
    except TypeError as error:
        raise ConfigError(where, problem=f"the class is made without arguments: {error}", remedy="give them defaults, "
                          "or declare an Extension whose callbacks=... makes it") from None
    origin = f"--extension {spec}"
    known = next((each for each in _found.values() if each.origin == origin), None)
    if known is not None:
        return known

    def make(plan: "Plan") -> list[Callback]:
        try:
            return [callback()]
        except TypeError as error:
            raise own_code_failed(where, f"the call {callback.__name__}()", error) from error

    return _add(Extension(callback.name, "A callback.", callbacks=make), module, origin, where)


def _declared(extension: Extension | None) -> Extension | None:
    """Return an extension as its module declares it."""
    return None if extension is None else dataclasses.replace(extension, module="", origin=BUILT_IN)


def _add(declared: Any, module: str, origin: str, where: str = "") -> Extension:
    """Add an extension. Raises ConfigError for one that cannot be used with those that are there."""
    where = where or module
    if not isinstance(declared, Extension):
        raise ConfigError(where, found=f"a {type(declared).__name__}",
                          expected="an Extension of pretrain.extension, or the class of a Callback")
    if declared.api > API:
        raise ConfigError(where, problem=f"it was written for version {declared.api} of the interface, and this "
                          f"ds-pretrain has version {API}", remedy="install a newer ds-pretrain")
    if declared.name in _found:
        raise ConfigError(where, problem=f"there is another extension with the name {declared.name} "
                          f"({_found[declared.name].origin})", remedy="leave one of them out")
    for name, flags in ((name, each.flags) for name, each in _found.items()):
        if both := sorted(flags.keys() & declared.flags.keys()):
            raise ConfigError(where, problem=f"the extension {name} also has the flag --{both[0]}",
                              remedy="leave one of them out")
    extension = dataclasses.replace(declared, module=module, origin=origin)
    for call in _listeners:
        call(extension)
    _found[declared.name] = extension
    return extension


def functions(what: str, args: "RunArguments | None" = None) -> Iterator[tuple[Extension, Callable[..., Any]]]:
    """Yield the extensions that have the function `what` with it: all of them, or those that a run uses.

    Args:
        args: of the run; None: all extensions.
    """
    for each in extensions():
        if (args is None or each.is_used(args)) and (function := each.function(what)):
            yield each, function


def reader_of(what: str, url: str, where: str) -> tuple[Extension, Callable[..., Any]]:
    """Return the function that reads URLs of this scheme, and its extension. Raises ConfigError if there is none.

    Args:
        what: "token_files" or "text_inputs".
        where: beginning of the error.
    """
    scheme = url.partition("://")[0].lower()
    for name in (scheme, "*"):
        found = [each for each in extensions() if name in getattr(each, what)]
        if len(found) > 1:
            raise ConfigError(where, problem=f"several extensions read {name}://: "
                              f"{', '.join(each.name for each in found)}", remedy="leave all but one of them out")
        if found:
            return found[0], found[0].load(getattr(found[0], what)[name])
    raise ConfigError(where, problem=f"no extension reads {scheme}://", remedy="copy the files to a local disk, and "
                      "give their path; or name an extension that reads them by --extension")


def types_of(extension: Extension) -> dict[str, Any]:
    """Return the types of the flags of an extension by name."""
    return typing.get_type_hints(extension.settings) if extension.settings is not None else {}


def check_extensions(args: "RunArguments") -> None:
    """Raise ConfigError for flags of extensions that cannot be used."""
    for each in extensions():
        if not each.is_used(args):
            continue
        for module in each.requires:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"extension {each.name}", problem=f"the package of {module} is not installed",
                                  remedy="install it with pip")
        if check := each.function("check"):
            check(args)


def problems() -> dict[str, Problem]:
    """Return the problems of all extensions by event. `describe` is a function, or ""."""
    return {event: dataclasses.replace(problem, describe=each.load(problem.describe)) if problem.describe else problem
            for each in extensions() for event, problem in each.problems.items()}


def callbacks_of(plan: "Plan") -> list[Callback]:
    """Return the callbacks of all extensions that the run uses."""
    return [callback for _, make in functions("callbacks", plan.args) for callback in make(plan)]


def rules_of(plan: "Plan") -> "Iterator[Rule]":
    """Yield the rules of all extensions that the run uses."""
    for _, rules in functions("rules", plan.args):
        yield from rules(plan)


def inputs_of_extensions(plan: "Plan") -> dict[str, Any]:
    """Return what the extensions that the run uses read for it, by their names. Raises ConfigError."""
    return {each.name: read(plan) for each, read in functions("inputs", plan.args)}


def prepare_extensions(plan: "Plan") -> None:
    """Call `prepare` of all extensions that the run uses. Raises ConfigError."""
    for _, prepare in functions("prepare", plan.args):
        prepare(plan)


def records_of_extensions(plan: "Plan") -> dict[str, Any]:
    """Return the keys that all extensions add to the record of a start."""
    return {key: value for _, record in functions("record", plan.args) for key, value in record(plan).items()}


def extend_parser(command: str, parser: Any) -> None:
    """Let extensions add to the parser of a subcommand, or to its subparsers."""
    for each in extensions():
        if add := each.extends.get(command):
            each.load(add)(parser)


def export_formats() -> dict[str, ExportFormat]:
    """Return the formats of all extensions by the values of `export --format`."""
    return {name: format for each in extensions() for name, format in each.exports.items()}


def document_steps(flags: Mapping[str, Any]) -> list[Any]:
    """Return the DocumentSteps that all extensions add to a preparation, in their order. Raises ConfigError.

    Args:
        flags: of `prepare`, or settings with which shards were made.
    """
    return sorted((step for _, steps in functions("documents") for step in steps(flags)),
                  key=lambda step: (step.order, step.name))


def patch_engine(engine: "DeepSpeedEngine", args: "RunArguments") -> None:
    """Let all extensions that the run uses replace functions of an engine that was just built."""
    for _, patch in functions("patch", args):
        patch(engine)


def model_extensions(args: "RunArguments") -> list[str]:
    """Return the names of the extensions with which a run changes the operators of its model."""
    return [each.name for each in extensions() if each.model and each.is_used(args)]


def model_flags(args: "RunArguments") -> dict[str, Any]:
    """Return the given flags of these extensions: values by name."""
    names = {name for each in extensions() if each.model for name in each.flags}
    return {name: value for name, value in args.extensions.items() if name in names}


def without_model_flags(args: "RunArguments") -> dict[str, Any]:
    """Return the given flags of the other extensions."""
    changing = model_flags(args)
    return {name: value for name, value in args.extensions.items() if name not in changing}


def change_model(module: "Module", plan: "Plan") -> None:
    """Let all extensions that the run uses change a model, or one of its blocks, that was just built."""
    for _, change in functions("model", plan.args):
        change(module, plan)


def precisions(args: "RunArguments") -> list[str]:
    """Return what extensions compute in another precision than the run."""
    return [text(args) for _, text in functions("precision", args)]


def run_files() -> tuple[str, ...]:
    """Return the names of the files that a run may write into its folder."""
    return (*RUN_FILES, *(name for each in extensions() for name in each.files))


def request_files(args: "RunArguments") -> dict[str, RequestFile]:
    """Return the files by which a user can ask something of the extensions that the run uses: equal on all ranks."""
    return dict(sorted((name, file) for each in extensions() if each.is_used(args)
                       for name, file in each.requests.items()))


def advice_on(situation: str) -> list[str]:
    """Return what extensions advise: at an event, a hint, or another situation such as "no_update"."""
    return [each.advice[situation] for each in extensions() if situation in each.advice]


def results_of_steps(run: Path) -> list[tuple[int, str]]:
    """Return what extensions have found out about steps of a run: step, result."""
    return [result for _, results in functions("results") for result in results(run)]


def notes_of_extensions(plan: "Plan") -> list[str]:
    """Return the notes of all extensions about a plan."""
    return [note for _, notes in functions("notes", plan.args) for note in notes(plan)]


def secret_variables(args: "RunArguments") -> set[str]:
    """Return the names of environment variables that only the owner of a start may see."""
    return {name for _, secrets in functions("secrets", args) for name in secrets(args)}


@contextlib.contextmanager
def around_run(args: "RunArguments | None", owner: str, *, active: bool = True) -> Iterator[Callable[[int], None]]:
    """Enter the contexts of all extensions that the run uses. Yields a function that takes the exit code of the run.

    The block, and the processes that it starts, see no secret variables.

    Args:
        active: whether this process may own the start.
    """
    owns = active and args is not None and not os.environ.get(OWNED)
    with contextlib.ExitStack() as stack:
        reports = [] if args is None else [stack.enter_context(enter(args, owner, active=owns))
                                           for _, enter in functions("around", args)]

        def report_all(code: int) -> None:
            for report in reports:
                report(code)

        if owns:
            os.environ[OWNED] = "1"
            stack.callback(os.environ.pop, OWNED, None)
        for name in secret_variables(args) & os.environ.keys() if args is not None else ():
            stack.callback(os.environ.__setitem__, name, os.environ.pop(name))
        yield report_all
