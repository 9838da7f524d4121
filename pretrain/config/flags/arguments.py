"""Parse the flags of `pretrain/train.py`, which are also the keys of its YAML file."""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pretrain.cli import LARGEST_INT, Parser, argument_error, bad_path, text, unknown_flag
from pretrain.config.flags.flag_help import help_text, is_list
from pretrain.config.flags.groups import GROUPS
from pretrain.config.flags.model_flags import DataArguments, InitArguments, ModelArguments
from pretrain.config.flags.running_flags import (
    CheckpointArguments,
    InstrumentArguments,
    LoggingArguments,
    ResilienceArguments,
    SteeringArguments,
)
from pretrain.config.flags.training_flags import AutoArguments, RecipeArguments, ScheduleArguments, SpeedArguments
from pretrain.config.other_programs import hint_for
from pretrain.data.datasets.data_spec import DataSpec, parse_data_spec
from pretrain.data.datasets.token_count import parse_token_count
from pretrain.errors import ConfigError, shorten


@dataclass(frozen=True)
class RunArguments(SpeedArguments, AutoArguments, ResilienceArguments, SteeringArguments, CheckpointArguments,
                   InstrumentArguments, LoggingArguments, InitArguments, RecipeArguments, ScheduleArguments,
                   DataArguments, ModelArguments):
    """All flags of a run.

    The base classes are in reverse order, because a dataclass takes the fields of its last base first.
    """


_PATHS = ("deepspeed_config", "model", "init_from", "save", "tokenizer", "nvme_path", "checkpoint_mirror",
          "resume_from")
_OTHER_NAMES = {"exit_at_step": "exit_step"}
_TEXT_FLAGS = {f.name for f in dataclasses.fields(RunArguments) if f.type in (str, str | None)}
_LIST_FLAGS = {f.name for f in dataclasses.fields(RunArguments) if is_list(f)}


def _hf_argument_parser() -> Any:
    """Return transformers' class HfArgumentParser, without the import of the package, which takes 0.6 s.

    The file of this class needs nothing else of the package (transformers 5.0 to 5.23).
    """
    package = importlib.util.find_spec("transformers")
    folders = package.submodule_search_locations if package is not None else None
    if "transformers" not in sys.modules and folders:
        spec = importlib.util.spec_from_file_location("hf_argparser", Path(folders[0], "hf_argparser.py"))
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            with contextlib.suppress(ImportError, OSError):
                spec.loader.exec_module(module)
                return module.HfArgumentParser
    return importlib.import_module("transformers.hf_argparser").HfArgumentParser


def _parser() -> Any:
    """Return an HfArgumentParser that raises ConfigErrors."""
    class FlagParser(_hf_argument_parser()):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise argument_error(message, self._option_string_actions)

        def format_help(self) -> str:
            return help_text(GROUPS)

    parser = FlagParser([RunArguments], allow_abbrev=False, prog="pretrain/train.py")
    for action in parser._actions:
        if action.dest.endswith("_tokens") and action.type is int:
            action.type = tokens
    return parser


def tokens(word: str) -> int:
    """Return a number of tokens, such as 1e9 or 2.5B. Raises ValueError. argparse shows the function's name."""
    try:
        return int(word)
    except ValueError:
        count = parse_token_count(word)
        if count is None:
            raise
        return count


def flag_name(word: str) -> str:
    """Return the name of a field of RunArguments for a flag or key: with _ instead of -, and without a second name."""
    name = word.replace("-", "_")
    return _OTHER_NAMES.get(name, name)


def _with_first_names(word: str) -> str:
    """Return a word of the command line with the first name of a flag that has two names."""
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    return f"--{_OTHER_NAMES[name]}{equals}{value}" if flag.startswith("--") and name in _OTHER_NAMES else word


def read_yaml(path: str) -> dict[str, tuple[int, str | list[str]]]:
    """Read a run's YAML file. Returns key -> (line number, value as it would be written on the command line).

    Keys are returned with _ instead of -. Keys without a value are left out.
    Raises ConfigError unless the file maps unique keys to single values, or to lists for flags with several words.
    """
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8-sig"))
        document = loader.get_single_node()
        if document is None:
            return {}
        if not isinstance(document, yaml.MappingNode):
            raise ConfigError(f"--config {path}", found=_node_type(document), expected="a mapping of flag: value")
        _check_unique(path, document)
        loader.flatten_mapping(document)  # keys merged by `<<: *name` come first: later keys win
        entries = [(flag_name(str(key.value)), key.start_mark.line + 1, _yaml_value(loader, path, key, value))
                   for key, value in document.value]
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"--config {path}", problem="it is nested too deeply", remedy="each key takes one value") \
            from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}", problem="it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}", problem=f"it is not YAML: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path}", problem=f"the file cannot be read: {reason}") from None
    return {name: (line, value) for name, line, value in entries if value is not None}


def _node_type(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _check_unique(path: str, document: yaml.MappingNode) -> None:
    """Raise ConfigError for a key that occurs twice, with - or _: YAML would silently use the last one."""
    lines: dict[str, int] = {}
    for key, _ in document.value:
        name, line = flag_name(str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name}", problem=f"the same key is on line {lines[name]}",
                              remedy="remove one of the two")
        lines[name] = line


def _yaml_value(loader: yaml.SafeLoader, path: str, key: yaml.Node, value: yaml.Node) -> str | list[str] | None:
    """Return a scalar or a list as it would be written on the command line, or None for null.

    For text flags, `no` and 0123 keep their spelling.
    """
    where, name = f"{path}:{key.start_mark.line + 1}: {key.value}", flag_name(str(key.value))
    if name in _LIST_FLAGS and isinstance(value, yaml.SequenceNode):
        return _yaml_list(where, value)
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(where, found=_node_type(value), expected="a single value")
    try:
        parsed = loader.construct_object(value)
    except ValueError:  # a date such as 2024-99-99, or thousands of digits: the type of the flag rejects the text
        parsed = value.value
    if parsed is None:
        return None
    return str(value.value) if name in _TEXT_FLAGS | _LIST_FLAGS else str(parsed)


def _yaml_list(where: str, value: yaml.SequenceNode) -> list[str]:
    """Return the words of a list in their spelling. Raises ConfigError for an empty list and for nested values."""
    wrong = next((_node_type(word) for word in value.value if not isinstance(word, yaml.ScalarNode)), None)
    words = [str(word.value) for word in value.value if isinstance(word, yaml.ScalarNode)]
    if wrong is not None or not words:
        raise ConfigError(where, found=f"{wrong} in the list" if wrong else "an empty list",
                          expected="a single value, or a list of them")
    if dashed := [word for word in words if word.startswith("--")]:
        raise ConfigError(where, found=dashed[0], expected="no word that begins with --")
    return words


def _flags_from_yaml(path: str, names: list[str]) -> list[str]:
    """Return the keys of a YAML file as command-line words, so that one parser validates both."""
    words = []
    for name, (line, value) in read_yaml(path).items():
        if name not in names:
            raise ConfigError(f"{path}:{line}: {shorten(name)}", found="an unknown key",
                              expected="a flag of pretrain/train.py", remedy=hint_for(name),
                              word="" if hint_for(name) else name, known=names)
        words += [f"--{name}={value}"] if isinstance(value, str) else [f"--{name}", *value]
    return words


def _check_values(parsed: RunArguments) -> None:
    """Raise ConfigError for infinite numbers, integers beyond 64 bits, empty text and invalid paths."""
    for f in dataclasses.fields(parsed):
        value, flag = getattr(parsed, f.name), f"--{f.name}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(flag, found=value, expected="a finite number")
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ConfigError(flag, found=value, expected=f"a whole number of at most {LARGEST_INT}")
        if not isinstance(value, str) or value == f.default:
            continue
        if not value:
            raise ConfigError(flag, problem="the value is empty", remedy="leave the flag out, or give it a value")
        if "\0" in value:
            raise ConfigError(flag, problem=f"{shorten(value)!r} contains a NUL character")
        if f.name in _PATHS and (problem := bad_path(value)):
            raise ConfigError(flag, problem=problem)


def parse_arguments(argv: list[str] | None = None) -> RunArguments:
    """Parse the flags and the `--config` YAML file; flags win. Raises ConfigError; `--help` exits with 0."""
    words = [_with_first_names(word) for word in (sys.argv[1:] if argv is None else argv)]
    names = [f.name for f in dataclasses.fields(RunArguments)]
    config_parser = Parser(add_help=False)
    config_parser.add_argument("--config", action="append", type=text)
    known, words = config_parser.parse_known_args(words)
    if known.config and len(known.config) > 1:
        raise ConfigError("--config", found=f"{len(known.config)} files", expected="one", remedy="join them into one")
    if known.config:
        words = _flags_from_yaml(known.config[0], names) + words
    parsed, unknown = _parser().parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        flags = [word for word in unknown if word.startswith("--")][:8] or unknown[:1]
        lines = [str(unknown_flag(word, [f"--{name}" for name in names], hint_for)) for word in flags]
        raise ConfigError.from_line(" ".join(lines))
    _check_values(parsed)
    data_spec(parsed)
    return parsed


def data_spec(args: RunArguments) -> DataSpec:
    """Return the data that the flags name. Raises ConfigError for values that cannot be combined."""
    return parse_data_spec(args.train_data, valid_data=args.valid_data, test_data=args.test_data, split=args.split,
                           sample_order=args.sample_order, packing=args.packing, blend_schedule=args.blend_schedule)
