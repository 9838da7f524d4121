"""Declare an extension: its flags, callbacks, subcommands ... active_extensions.py finds the extensions.

An extension is one `Extension`, the value EXTENSION of a module. There are three places for this module:

    pretrain/extensions/NAME/extension.py    the extensions of this package
    an entry point of the group ds_pretrain.extensions, of a package that is installed in this environment
    --extension my_module:EXTENSION          named on the command line, or in the YAML file that it names

No file of a run, of a checkpoint or of a stranger can name one. A declaration imports neither torch nor DeepSpeed: the
code that it names as "module:function" is imported when it is needed.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch.nn import Module

    from pretrain.callback import Callback
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.layout import Layout
    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan
    from pretrain.data.tokenizers.tokenizer import TokenizerFormat
    from pretrain.model.description import ModelConfig
    from pretrain.model.operator_memory import OperatorMemory
    from pretrain.model.operators import Kernels

API = 1  # version of this interface and of `callback.py`
BUILT_IN = "built in"  # see Extension.origin
LAUNCHER, RANK_0 = "ds-pretrain", "rank 0"  # owners of a start: see Extension.around


@dataclass(frozen=True)
class Command:
    """A subcommand. Its function reads sys.argv and returns the exit code, or None for 0."""

    group: str  # of `ds-pretrain --help`
    help: str
    module: str  # full name, or relative to the module of the declaration: ".main"
    function: str = "main"
    runs_on_ranks: bool = False  # on one or several, and takes the flags of the launcher
    is_extensible: bool = False  # see Extension.extends
    # takes the place of the core's subcommand of this name, and does what that does, too; not with --extension
    replaces: bool = False

    def load(self) -> Callable[[], Any]:
        """Import the module, and return the function."""
        found: Callable[[], Any] = getattr(importlib.import_module(self.module), self.function)
        return found


def _one(text: str) -> int:
    return 1


@dataclass(frozen=True)
class RequestFile:
    """A file by which a user asks something of a run that trains: made in its folder, and removed by rank 0.

    `Callback.requested` then gets a number on all ranks after the same step: `request.asked[NAME]`.
    """

    number: Callable[[str], int] = _one  # (text of the file) -> a number from 1 to 2**31 - 1; must not raise
    answer: str = ""  # what the run says that it does, also in the event "signal"; "": it says nothing
    by_signal: bool = False  # the signal SIGUSR2 to a rank does the same as an empty file


@dataclass(frozen=True)
class Problem:
    """Meaning of an event of events.jsonl for people, in the lists of what went wrong of the summary and the report."""

    text: str = ""  # what happened; {reason} is the reason of the event
    advice: str = ""  # what to do; {run}, {step} and {path} are replaced
    over: tuple[str, ...] | None = None  # events after which it is over; None: it is over at once
    # the problem began at the step "since" of the event, and lasts until an event of `over` with one of its "ranks"
    is_phase: bool = False
    # (event, ranks and hosts as text, is_over=) -> text, advice, and what shows it; in place of the two above
    describe: "str | Callable[..., tuple[str, str, str]]" = ""
    unless: tuple[str, str] | None = None  # key and value of an event that is no problem


class Section(Protocol):
    """An extension's section of the page of a run. A script of its `section_files` sets SECTIONS.NAME: format.js."""

    def update(self) -> None:
        """Read what was appended since the last call. Raises OSError."""

    def state(self) -> str:
        """Return a text that changes with the files."""

    def data(self) -> Any:
        """Return JSON values for the script; None: there is nothing to show. Text in them may be foreign."""


class StepEstimates(Protocol):
    """Predicts a training step on known machines. The estimates are numbers and texts by name.

    "step_seconds": layouts are ordered by it; "relative_error" of this time, within which times count as equal; "mfu";
    if the tokens of a run are given, "cost": a line about it. Other names are for who provides them.
    """

    def __call__(self, layout: "Layout", model: "ModelConfig", tokens: float | None = None) -> Mapping[str, Any]:
        """Return the estimates of a layout."""


@dataclass(frozen=True)
class Models:
    """Models of which no family of this package is the implementation, by the model_type of their config.json."""

    which: str  # in rejections of other ones: "another model of ..."
    model_types: str  # "module:function": () -> their model types; imports no torch
    # "module:function": (values of the config.json, where, overrides) -> ModelConfig, with an implementation of the
    # protocol in pretrain/model/implementation.py; raises ConfigError
    read: str


# functions of an Extension
_OF_A_RUN = ("check", "rules", "prepare", "callbacks", "notes", "record", "operators", "patch", "model",
             "around", "secrets")


@dataclass(frozen=True)
class Extension:
    """A capability that a run can do without.

    `check`, `rules`, `inputs`, `prepare`, `callbacks`, `notes`, `record`, `patch`, `model`, `precision`, `around` and
    `secrets` are functions, or "module:function" with a module next to the declaration. They are called only if a flag
    of the extension is given, it has no flags, or `is_always_used`.
    """

    name: str
    summary: str  # one sentence
    api: int = API  # the version that it was written for
    settings: type[Any] | None = None  # a frozen dataclass; its fields are flags, made by `Group.flag`
    # (args) -> None: raises ConfigError for values that cannot be used; before a process group forms
    check: "str | Callable[[RunArguments], None]" = ""
    # (plan) -> settings that cannot be combined, as in config/run_rules.py; the plan has its data
    rules: "str | Callable[[Plan], Iterable[Rule]]" = ""
    # (plan) -> what the functions below find in plan.inputs[NAME], such as the content of a file that a flag names; the
    # plan has its data. Raises ConfigError
    inputs: "str | Callable[[Plan], Any]" = ""
    # (plan) -> None: raises ConfigError. For what takes long: on rank 0, before torch is imported, and in `check`
    prepare: "str | Callable[[Plan], None]" = ""
    callbacks: "str | Callable[[Plan], Iterable[Callback]]" = ""
    notes: "str | Callable[[Plan], Iterable[str]]" = ""  # about a plan, for `check` and the start of the run
    record: "str | Callable[[Plan], Mapping[str, Any]]" = ""  # (plan) -> keys for the record of the start in run.json
    # (args, owner, active=) -> context manager around a start of the run, in the process that owns it: a subcommand
    # of an extension that starts the run again (`owner` is its name in words), otherwise LAUNCHER, otherwise RANK_0;
    # its value is called with the exit code
    around: "str | Callable[..., contextlib.AbstractContextManager[Callable[[int], None]]]" = ""
    # (args) -> names of environment variables that hold secrets: only the owner of a start sees them
    secrets: "str | Callable[[RunArguments], Iterable[str]]" = ""
    commands: Mapping[str, Command] = field(default_factory=dict)
    # extensible subcommand -> function of its parser, or of the subparsers if it has them, that adds to these; of
    # `evaluate`: see Scoring in commands/evaluate.py
    extends: "Mapping[str, str | Callable[[Any], None]]" = field(default_factory=dict)
    requests: Mapping[str, RequestFile] = field(default_factory=dict)  # by the names of the files
    files: tuple[str, ...] = ()  # in the run folder, that `RunFolder.append` writes
    # title -> key of these rows -> unit and definition: for `ds-pretrain reference metrics`
    rows: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    # event of events.jsonl -> keys besides time, event, step and reason, separated by spaces; and its meaning
    events: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    problems: Mapping[str, Problem] = field(default_factory=dict)  # by event
    # key that its callbacks add to rows of training -> unit, and definition
    metrics: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # event, kind of problem, name of a hint, or another situation -> what to do: see `advice_on`; of problems as in
    # `Problem`; at the end of a run, "finished", a command with {run}
    advice: Mapping[str, str] = field(default_factory=dict)
    # topics of `ds-pretrain reference` -> title, and "module:function" that returns Markdown
    reference: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # (flags of `prepare` by name) -> DocumentSteps of a preparation: see data/prepare/document_step.py. When shards are
    # merged, the flags are the settings of the shards, and those that were not given are missing. Raises ConfigError
    documents: "str | Callable[[Mapping[str, Any]], Iterable[Any]]" = ""
    # () -> a Kernels (model/operators.py): implementations of the operators of a model; in each process that computes
    operators: "str | Callable[[], Kernels]" = ""
    # (engine) -> None: replaces functions of an engine of DeepSpeed that was just built, such as passes over gradients;
    # results stay equal. Two extensions may replace the same function: each calls the one that it finds
    patch: "str | Callable[[DeepSpeedEngine], None]" = ""
    # (module, plan) -> None: changes the operators of a model that was just built, or of one of its blocks; parameters
    # and their names remain
    model: "str | Callable[[Module, Plan], None]" = ""
    precision: "str | Callable[[RunArguments], str]" = ""  # a text about what `model` computes otherwise
    # () -> an OperatorMemory (model/operator_memory.py): what these keep; does not import torch
    operator_memory: "str | Callable[[], OperatorMemory]" = ""
    # scheme of URLs, or "*" for those that no extension names -> (url, settings) -> a TokenFiles of
    # data/token_files/token_file.py; `settings`: of the extension, as the run has them, or their defaults
    token_files: "Mapping[str, str | Callable[..., Any]]" = field(default_factory=dict)
    # scheme, or "*" -> (url, commits, is_left_out) -> the files that a URL names: see data/text_inputs/stored_file.py
    text_inputs: "Mapping[str, str | Callable[..., Any]]" = field(default_factory=dict)
    # value of --sample_order -> () -> another order than the default one, a SampleOrder (data/samples/dataset.py)
    sample_orders: "Mapping[str, str | Callable[[], Any]]" = field(default_factory=dict)
    # flag of `prepare` and `tokenizer`, which `extends` adds -> (flags) -> what it names in place of inputs, a
    # NamedDataset of data/text_inputs/dataset.py; None: nothing
    datasets: "Mapping[str, str | Callable[..., Any]]" = field(default_factory=dict)
    # () -> a TokenizerFormat (data/tokenizers/tokenizer.py): more values and files that --tokenizer takes
    tokenizers: "str | Callable[[], TokenizerFormat]" = ""
    # (cluster, measured=) -> a StepEstimates for these machines; if `measured` has run folders, it is fitted to these
    # runs, for the machines of the last one. Raises ConfigError for runs that cannot be used; imports no torch
    estimates: "str | Callable[..., StepEstimates]" = ""
    models: Models | None = None  # asked for each config.json without a family, also of commands
    # (curve, facts) -> hints about the curve of any run, the most important first: see monitor/curve.py
    hints: "str | Callable[..., Iterable[Any]]" = ""
    # (record of run.json, events) -> expected losses of any run, or None: see monitor/curve.py
    expectation: "str | Callable[..., Any]" = ""
    # (run folder) -> (step, result) of the steps that were examined, the newest result first
    results: "str | Callable[[Path], Iterable[tuple[int, str]]]" = ""
    section: "str | Callable[[Path], Section]" = ""  # (run folder) -> section of the page of any run
    section_files: tuple[str, ...] = ()  # its scripts (.js) and styles (.css), next to the declaration
    is_always_used: bool = False  # the functions are called in runs without a flag of the extension, too
    requires: tuple[str, ...] = ()  # modules of packages without which its flags are rejected
    module: str = ""  # of the declaration; set when it is found
    origin: str = BUILT_IN  # where it comes from, in words; set when it is found

    def function(self, what: str) -> Callable[..., Any] | None:
        """Return the function `check`, `callbacks` ...; None if the extension has none."""
        value = getattr(self, what)
        return self.load(value) if value else None

    def load(self, value: "str | Callable[..., Any]") -> Callable[..., Any]:
        """Return the function "module:function", of a module next to the declaration; a function remains itself."""
        if not isinstance(value, str):
            return value
        module, _, name = value.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(self.full_name(f".{module}")), name)
        return found

    def full_name(self, module: str) -> str:
        """Return the full name of a module; with a dot in front, it is one next to the declaration."""
        return ".".join(filter(None, [self.module.rpartition(".")[0], module[1:]])) if module[:1] == "." else module

    def read_file(self, name: str) -> str:
        """Return the text of a file next to the declaration."""
        return (Path(sys.modules[self.module].__file__ or "").parent / name).read_text(encoding="utf-8")

    @property
    def flags(self) -> "dict[str, dataclasses.Field[Any]]":
        """The fields of its settings by name."""
        return {} if self.settings is None else {each.name: each for each in dataclasses.fields(self.settings)}

    def is_used(self, args: "RunArguments") -> bool:
        """Return whether a run uses the extension: see above."""
        if not self.flags:
            return any(getattr(self, each) for each in _OF_A_RUN)
        return self.is_always_used or any(args.extensions.get(name, each.default) != each.default
                                     for name, each in self.flags.items())

    def digest(self) -> str:
        """Return the origin, and a hash of the module's code, or of all modules of its package; ranks compare it."""
        file = Path(getattr(sys.modules.get(self.module), "__file__", None) or os.devnull)
        files = sorted(file.parent.rglob("*.py")) if "." in self.module else [file]
        code = hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
        return f"{self.origin}, code {code}"
