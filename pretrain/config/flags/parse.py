"""Parse the flags of a run (`ds-pretrain train`), which are also the keys of its YAML file."""

import argparse
import functools
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from pretrain.active_extensions import activate
from pretrain.cli import Parser, note_old_name, text, unknown_flag
from pretrain.config.flags.arguments import FLAGS, TYPES, RunArguments, arguments_of
from pretrain.config.other_programs import hint_for
from pretrain.errors import ConfigError, shorten
from pretrain.old_names import current_name
from pretrain.stored_json import read_settings

_USAGE = """ds-pretrain --deepspeed_config FILE --model NAME --train_data PREFIX
           --train_steps N --save RUN [flags]
       ds-pretrain --config run.yaml [flags]"""
_DESCRIPTION = ("Pretrain a GPT-style model. Every flag is also a key of the YAML file that --config names; flags on "
                "the command line win. --seq-length is --seq_length.")
_JSON = "a DeepSpeed JSON is the value of --deepspeed_config, and --config names a YAML of flags"


class _HelpFormatter(argparse.HelpFormatter):
    """Shows one value for a flag that takes several, and none for a switch, whose value true can be left out."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return super()._format_action_invocation(action).rstrip()


def _truth(word: str) -> bool:
    """Argparse type: true or false, in one of the spellings that YAML and transformers know."""
    if word.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if word.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected true or false")


def _kinds(name: str) -> tuple[Any, ...]:
    """Return the type of a flag, and the parts of that: int | None, int, NoneType. Empty for an unknown name."""
    return (TYPES[name], *get_args(TYPES[name])) if name in TYPES else ()


def _options(name: str) -> dict[str, Any]:
    """Return the options of `add_argument` for a flag."""
    flag, kinds = FLAGS[name], _kinds(name)
    if bool in kinds:
        return {"type": _truth, "nargs": "?", "const": True}
    if list[str] in kinds:
        return {"type": flag.parse or text, "nargs": "+", "metavar": flag.metavar}
    parse, letter = (int, "N") if int in kinds else (float, "X") if float in kinds else (text, "|".join(flag.choices))
    return {"type": flag.parse or parse, "metavar": flag.metavar or letter}


@functools.cache
def run_parser() -> Parser:
    """Return the parser. Its namespace has only the flags that are given, and `config`."""
    parser = Parser(prog="ds-pretrain", usage=_USAGE, description=_DESCRIPTION, add_help=False,
                    formatter_class=_HelpFormatter, argument_default=argparse.SUPPRESS)
    parser.add_argument_group("help").add_argument("--help", "-h", action="help", help="show this page")
    sections: dict[str, Any] = {}
    for name, flag in FLAGS.items():
        if flag.group.title not in sections:
            sections[flag.group.title] = parser.add_argument_group(flag.group.title, flag.group.description)
        section = sections[flag.group.title]
        if name == "deepspeed_config":
            section.add_argument("--config", action="append", type=text, default=[], metavar="FILE",
                                 help="YAML file with these flags as keys; of several, later ones win (default: none)")
        section.add_argument(f"--{name}", help=flag.help, **_options(name))
    return parser


def read_yaml(path: str) -> dict[str, tuple[int, str | list[str]]]:
    """Read a run's YAML file. Returns key -> (line number, value as it would be written on the command line).

    Keys are returned with _ instead of -. Keys without a value are left out.
    Raises ConfigError unless the file maps unique keys to single values, or to lists for flags with several words.
    """
    try:
        loader = yaml.SafeLoader(read_settings(path))
        document = loader.get_single_node()
        if document is None:
            return {}
        if not isinstance(document, yaml.MappingNode):
            raise ConfigError(f"--config {path}", found=_node_type(document), expected="a mapping of flag: value")
        _check_unique(path, document)
        loader.flatten_mapping(document)  # keys merged by `<<: *name` come first: later keys win
        entries = [(current_name(str(key.value)), key.start_mark.line + 1, _yaml_value(loader, path, key, value))
                   for key, value in document.value]
        for key, _ in document.value:
            note_old_name(str(key.value), f"{path}:{key.start_mark.line + 1}")
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"--config {path}", problem="it is nested too deeply", remedy="each key takes one value") \
            from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}", problem="it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}", problem=f"it is not YAML: {yaml_problem(error)}",
                          remedy=_JSON if path.endswith(".json") else "") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path}", problem=f"the file cannot be read: {reason}") from None
    return {name: (line, value) for name, line, value in entries if value is not None}


def yaml_problem(error: Exception) -> str:
    """Return the line and the problem of an error of the YAML parser."""
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {getattr(error, 'problem', error)}" if mark else str(error)


def _node_type(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _check_unique(path: str, document: yaml.MappingNode) -> None:
    """Raise ConfigError for a key that occurs twice, with - or _: YAML would silently use the last one."""
    lines: dict[str, int] = {}
    for key, _ in document.value:
        name, line = current_name(str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name}", problem=f"the same key is on line {lines[name]}",
                              remedy="remove one of the two")
        lines[name] = line


def _yaml_value(loader: yaml.SafeLoader, path: str, key: yaml.Node, value: yaml.Node) -> str | list[str] | None:
    """Return a scalar or a list as it would be written on the command line, or None for null.

    For text flags, `no` and 0123 keep their spelling.
    """
    where, kinds = f"{path}:{key.start_mark.line + 1}: {key.value}", _kinds(current_name(str(key.value)))
    if (list[str] in kinds or not kinds) and isinstance(value, yaml.SequenceNode):  # an unknown key: rejected later
        return _yaml_list(where, value)
    if current_name(str(key.value)) == "model_overrides" and isinstance(value, yaml.MappingNode):
        return _yaml_mapping(where, value)
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(where, found=_node_type(value), expected="a single value",
                          remedy=_JSON if path.endswith(".json") else "")
    try:
        parsed = loader.construct_object(value)
    except ValueError:  # a date such as 2024-99-99, or thousands of digits: the type of the flag rejects the text
        parsed = value.value
    if parsed is None:
        return None
    return str(value.value) if str in kinds or list[str] in kinds else str(parsed)


def _yaml_mapping(where: str, value: yaml.MappingNode) -> str:
    """Return a mapping of single values as key=value,... Raises ConfigError for others, and for keys that repeat."""
    pairs = {str(key.value): str(each.value) for key, each in value.value if isinstance(each, yaml.ScalarNode)}
    if len(pairs) < len(value.value) or any("," in each for each in pairs.values()):
        raise ConfigError(where, found="a nested value, a comma, or the same key twice",
                          expected="single values of different keys, such as {n_layer: 4}")
    return ",".join(f"{key}={each}" for key, each in pairs.items())


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


def _flags_from_yaml(path: str) -> list[str]:
    """Return the keys of a YAML file as command-line words, so that one parser validates both."""
    words = []
    for name, (line, value) in read_yaml(path).items():
        if name not in FLAGS:
            raise ConfigError(f"{path}:{line}: {shorten(name)}", found="an unknown key",
                              expected="a flag of `ds-pretrain train`",
                              remedy=_JSON if path.endswith(".json") else hint_for(name),
                              word="" if hint_for(name) else name, known=FLAGS)
        words += [f"--{name}={value}"] if isinstance(value, str) else [f"--{name}", *value]
    return words


def parse_before_run(own: Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a program's own flags, and return the words that are left for the flags of a run.

    With --help, print the own flags; `parse_arguments` prints the others, and exits.
    """
    if {"-h", "--help"} & set(words):
        print(own.format_help())
    return own.parse_known_args(words)


def _check_folder(config: str, values: argparse.Namespace) -> None:
    """Raise ConfigError for a relative path that exists from the YAML's folder, or one above it, and not from here."""
    named = [("deepspeed_config", getattr(values, "deepspeed_config", "")),
             *(("train_data", f"{prefix}.idx") for prefix in getattr(values, "train_data", ()))]
    for flag, file in named:
        folder = next((folder for folder in Path(config).resolve().parents if os.path.isfile(folder / file)), None)
        if folder is not None and not os.path.exists(file):  # these functions raise no OSError
            raise ConfigError(f"--{flag}", problem=f"relative paths begin in the current folder, also in a YAML, and "
                              f"{file} exists only in {folder}", remedy=f"change to it: cd {shlex.quote(str(folder))}")


def activate_extensions(words: Sequence[str]) -> None:
    """Activate the extensions that --extension names in these words, or in the YAML that they name."""
    named, files = _values_of("--extension", words), _values_of("--config", words)
    for file in reversed(files if not named else []):
        if "extension" in (values := read_yaml(file)):
            _, found = values["extension"]
            named = [found] if isinstance(found, str) else found
            break
    for spec in named:
        activate(spec)
    if named:
        run_parser.cache_clear()


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag in words of which the parser does not know all flags yet."""
    found: list[str] = []
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found += [value] if equals else itertools.takewhile(lambda each: not each.startswith("--"), words[at + 1:])
    return found


def parse_arguments(argv: list[str] | None = None, *, from_here: bool = True) -> RunArguments:
    """Parse the flags and the `--config` YAML files. Flags win, and later files over earlier ones.

    Raises ConfigError; `--help` exits with 0.

    Ranges and choices are checked later, by `check_flags`. `from_here`: relative paths begin in the current folder.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    activate_extensions(words)
    parser = run_parser()
    namespace, unknown = parser.parse_known_args(words)
    files = namespace.config
    if files:
        of_files = [word for file in files for word in _flags_from_yaml(file)]
        namespace, unknown = parser.parse_known_args(of_files + words)
        for file in files if from_here else ():
            _check_folder(file, namespace)
    if unknown:
        flags = [word for word in unknown if word.startswith("--")][:8] or unknown[:1]
        lines = [str(unknown_flag(word, ["--config", *(f"--{name}" for name in FLAGS)], hint_for)) for word in flags]
        raise ConfigError.from_line(" ".join(lines))
    args = arguments_of({name: value for name, value in vars(namespace).items() if name != "config"})
    _ = args.data  # raises ConfigError
    return args
