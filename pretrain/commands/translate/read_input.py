"""Read the settings of another program from YAML, TOML and JSON files, shell scripts and command lines."""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.commands.translate.settings import Settings
from pretrain.config.other_programs import PROGRAMS, current_name
from pretrain.errors import ConfigError, shorten
from pretrain.stored_json import parse_json

# names that only one program has, by which its files are recognized
_MARKERS = {
    "neox": {"train_micro_batch_size_per_gpu", "pipe_parallel_size", "no_weight_tying", "gpt_j_residual", "pos_emb",
             "checkpoint_factor", "hidden_size", "output_layer_init_method", "zero_optimization", "lr_decay_iters"},
    "megatron": {"num_layers", "hidden_size", "num_attention_heads", "micro_batch_size", "global_batch_size",
                 "tensor_model_parallel_size", "pipeline_model_parallel_size", "train_samples", "train_iters",
                 "max_position_embeddings", "seq_length", "lr_warmup_iters", "clip_grad"},
    "trainer": {"output_dir", "per_device_train_batch_size", "model_name_or_path", "config_name", "num_train_epochs",
                "learning_rate", "block_size", "lr_scheduler_type", "max_grad_norm", "do_train", "logging_steps",
                "gradient_checkpointing", "tokenizer_name", "warmup_ratio", "per_device_eval_batch_size", "train_file",
                "max_steps"},
}
_LARGEST = 2**22  # bytes
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z]")
_IF, _FI = re.compile(r"(?:^|;\s*)(?:if|case)\b"), re.compile(r"(?:^|;\s*)(?:fi|esac)\b")
_NO_PROGRAM = re.compile(r"(?:if|elif|for|while|echo|printf|mkdir|cp|rm|cat|sed|\[)\b|\[")  # beginning of a command
_REDIRECTION = re.compile(r"\d?>|&>|\||&|;")
_ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/%-]{1,200})\)\)")
# parts of the names of Megatron-LM's programs that train other models than GPT, or generate
_OTHER_MODELS = re.compile(r"(?:^|_)(?:bert|t5|ict|retro|vision|vlm|mimo|mamba|hybrid|mlm|generate|generation|"
                           r"evaluate)(?=[_.])")
_YAML, _TOML, _JSON = (".yaml", ".yml"), (".toml",), (".json",)


def read_settings(files: Sequence[str], words: Sequence[str], program: str | None) -> Settings:
    """Return the settings of the files and of the words after `--`. Raises ConfigError.

    program: a key of PROGRAMS; None: recognize it.
    """
    if not files and not words:
        raise ConfigError("translate", problem="there is no input", remedy="give files, or -- and the words of the "
                          "other program's command line")
    if any(Path(file).suffix in _TOML for file in files) and program is None:
        program = "torchtitan"
    given: dict[str, Any] = {}
    places: dict[str, str] = {}
    launcher: dict[str, Any] = {}
    notes: list[str] = []
    for name, value, place in _entries(files, words, launcher, notes):
        if name in given and _source(place) == _source(places[name]):
            if value != given[name]:
                notes.append(f"{place} is given several times: the last value is used")
        elif name in given:
            raise ConfigError(place, problem=f"the same setting is in {places[name]}", remedy="keep one of the two")
        given[name], places[name] = value, place
    program = program or _recognize(given)
    return Settings(program, given, places, launcher, tuple(dict.fromkeys(notes)))


def _source(place: str) -> str:
    """Return the file of a place, or the command line."""
    return place.rpartition(": ")[0]


def _entries(files: Sequence[str], words: Sequence[str], launcher: dict[str, Any],
             notes: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (current name, value, where it stands) of every setting. The last two arguments are filled."""
    for file in files:
        text = _read(file)
        suffix = Path(file).suffix
        if suffix in _TOML:
            values = _flat(_parse_toml(file, text))
        elif suffix in _YAML or suffix in _JSON:
            values = _parse_mapping(file, text)
        else:
            yield from _command_line(file, _script_words(file, text, notes), launcher, notes)
            continue
        for name, value in values.items():
            yield _name(str(name)), value, f"{file}: {name}"
    if words:
        yield from _command_line("command line", list(words), launcher, notes)


def _name(word: str) -> str:
    return current_name(word.lstrip("-").replace("-", "_"))


def _read(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            content = stream.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigError(shorten(file), problem="it is too large for a file of settings")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(shorten(file), problem=f"the file cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValueError):
        raise ConfigError(shorten(file), problem="it is not UTF-8 text") from None


def _parse_toml(file: str, text: str) -> dict[str, Any]:
    try:
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ConfigError(file, problem="Python 3.10 reads TOML with the package tomli, which is not installed",
                          remedy="pip install tomli") from None
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except (RecursionError, ValueError) as error:
        raise ConfigError(file, problem=f"it is not TOML: {error}") from None


def _flat(values: Mapping[str, Any], block: str = "") -> dict[str, Any]:
    """Return the values of nested blocks under dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{block}{name}.") if isinstance(value, dict) else {f"{block}{name}": value}
    return found


def _parse_mapping(file: str, text: str) -> dict[str, Any]:
    """Parse YAML, and JSON, of which YAML is a superset but for tabs; GPT-NeoX's files are a mixture of both."""
    try:
        values = parse_json(text) if Path(file).suffix in _JSON else yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if Path(file).suffix in _JSON:
            raise ConfigError(file, problem=f"it is not JSON: {error}") from None
        raise ConfigError(file, problem=f"it is not YAML: {_yaml_problem(error)}",
                          remedy="a comma may be missing on the line before") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(file, found=f"a {type(values).__name__}", expected="a mapping of names to values")
    return values


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {getattr(error, 'problem', error)}" if mark else str(error)


class _Loader(yaml.SafeLoader):
    """Reads 6e-4 as a number, which YAML 1.1 reads as text, and rejects a key that occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name} is there twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
                              list("-+0123456789"))


def _script_words(file: str, text: str, notes: list[str]) -> list[str]:
    """Return the words of the command that starts the program, with the script's own variables filled in.

    Without such a command: the words of all commands, or of variables such as GPT_ARGS. Conditions are not evaluated;
    `notes` gets what they decide.
    """
    variables: dict[str, str] = {}
    commands: list[str] = []
    conditional: dict[str, str] = {}
    depth = 0  # of conditions
    for line in _logical_lines(text):
        depth += len(_IF.findall(line)) - len(_FI.findall(line))
        found = _ASSIGNMENT.fullmatch(line)
        if found and not line.startswith("-"):
            value = found[2].strip()
            value = value[1:-1] if value[:1] == "(" and value[-1:] == ")" else value
            previous = f"{variables.get(found[1], '')} " if f"{found[1]}+=" in line else ""
            value = _computed(previous + _fill(_unquoted(value), variables))
            if "$(" not in value and "`" not in value:  # the output of a command remains a variable
                variables[found[1]] = value
            if depth > 0:
                conditional[line] = value
        elif not _NO_PROGRAM.match(line):
            commands.append(_computed(_fill(line, variables)))
    commands = [command for command in commands if ".py" in command] or commands
    if sum(".py" in command for command in commands) > 1:
        raise ConfigError(file, problem="it starts several programs", remedy="keep the command of one of them")
    used = " ".join(commands)
    notes += [f"the script has `{shorten(line, 100)}` under a condition, which is taken as true"
              for line, value in conditional.items() if value and value in used]
    words = [word for command in commands for word in _until_redirection(_split(file, command))]
    if not any(_FLAG.match(word) for word in words):  # a fragment that only sets variables such as GPT_ARGS
        values = [value for value in variables.values() if value.lstrip().startswith("--")]
        words = [word for value in values for word in _split(file, value)]
    # a quoted flag with its value, in an array that is expanded without quotes, and sh -c "COMMAND"
    return [part for word in words for part in (word.split() if word.startswith("--") or ".py " in word else [word])]


def _until_redirection(words: list[str]) -> list[str]:
    """Return the words of the first command of a line."""
    return words[:next((index for index, word in enumerate(words) if _REDIRECTION.match(word)), len(words))]


def _computed(text: str) -> str:
    """Replace $((3 * 10 / 2)), without inner parentheses, by its value: / is a division of whole numbers."""
    def value(found: re.Match[str]) -> str:
        inner = found[1]
        for signs in ("*/%", "+-"):
            pattern = re.compile(rf"(\d+)\s*([{signs}])\s*(\d+)")
            while part := pattern.search(inner):
                left, sign, right = int(part[1]), part[2], int(part[3])
                if not right and sign in "/%":
                    return found[0]
                results = {"*": left * right, "/": left // (right or 1), "%": left % (right or 1),
                           "+": left + right, "-": left - right}
                inner = f"{inner[:part.start()]}{results[sign]}{inner[part.end():]}"
        return inner.strip()
    return _ARITHMETIC.sub(value, text)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text.count(text[0]) == 2
    return text[1:-1] if is_quoted else text


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the commands of a script: lines joined at a backslash, inside quotes and inside ( ), without comments."""
    pending = ""
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        pending = f"{pending} {bare}".strip() if pending else bare
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        opened = re.match(r"[A-Za-z_]\w*\+?=\(", pending) and not pending.rstrip().endswith(")")
        if pending.count('"') % 2 or opened:
            continue
        if pending:
            yield pending
        pending = ""
    if pending:
        yield pending


def _fill(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables that the script has set; others remain."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[3] or found[0]), text)


def _split(file: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(file, problem=f"{shorten(text, 60)!r} is not a list of words: {error}") from None


def _command_line(place: str, words: list[str], launcher: dict[str, Any],
                  notes: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the flags behind the program's name; those before it belong to its launcher."""
    bare = [bool(_VARIABLE.fullmatch(word)) for word in words]
    # a variable behind a value, or behind another one, stands for further arguments
    further = [is_bare and index > 0 and not _FLAG.match(words[index - 1]) for index, is_bare in enumerate(bare)]
    notes += [f"the script adds {word}, which it does not set: give these arguments too"
              for word, is_further in zip(words, further, strict=True) if is_further and word[1:] != "@"]
    words = [word for word, is_further in zip(words, further, strict=True) if not is_further]
    programs = [index for index, word in enumerate(words) if word.endswith(".py")]
    if programs:
        if _OTHER_MODELS.search(program := Path(words[programs[0]]).name):
            raise ConfigError(place, problem=f"{program} trains no GPT-style model on text",
                              remedy="settings of pretrain_gpt.py or run_clm.py can be translated")
        launcher.update({flag.lstrip("-").replace("-", "_"): value for flag, value in _flags(words[:programs[0]])})
        words = words[programs[0] + 1:]
    for flag, value in _flags(words):
        yield _name(flag), value, f"{place}: {flag}"


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each flag with its value: true without one, a list of several."""
    flag, values = "", list[str]()
    for word in [*words, "--end"]:
        if not _FLAG.match(word) or word.lstrip("-")[:1].isdigit():
            values.append(word)
            continue
        if flag:
            yield flag, True if not values else values[0] if len(values) == 1 else values
        flag, _, rest = word.partition("=")
        values = [rest] if rest else []


def _recognize(given: Mapping[str, Any]) -> str:
    """Return the program with the most names of its own. Raises ConfigError if there is none."""
    names = set(given)
    scores = {program: len(names & own) for program, own in _MARKERS.items()}
    best = max(scores, key=lambda program: scores[program])
    if any("." in name for name in names):
        return "torchtitan"
    if {"pipe_parallel_size", "pos_emb", "train_micro_batch_size_per_gpu"} & names and scores["neox"]:
        best = "neox"
    if not scores[best]:
        raise ConfigError("--from", problem="the settings do not show which program they belong to",
                          remedy=f"give --from {', '.join(PROGRAMS)}")
    return best
