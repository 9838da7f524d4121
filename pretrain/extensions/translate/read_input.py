"""Read the settings of another program from YAML, TOML and JSON files, shell scripts and command lines."""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.ds_json.schema import TREE
from pretrain.config.flags.parse import yaml_problem
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.translate.settings import PROGRAMS, Settings, WrittenFile, current_name
from pretrain.extensions.translate.shell import Command, Script
from pretrain.stored_json import parse_json

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}")
_FLAG = re.compile(r"--?[A-Za-z]")
_FLAG_WITH_VALUE = re.compile(r"--[\w-]+\s")
_SCRIPT = re.compile(r"(?:(?:bash|sh|sbatch|srun)\s.*)?\S+\.(?:sh|slurm|sbatch)(?!\S)")
_TRAINING = re.compile(r"(?:pretrain|finetune|train|run)_?\w*\.py(?!\S)")
# parts of the names of programs of Megatron-LM and its forks that train other models than GPT, on pairs of inputs and
# targets (t0), or generate
_OTHER_MODELS = re.compile(r"(?:^|_)(?:bert|t5|t0|prefix|ict|retro|vision|vlm|mimo|mamba|hybrid|mlm|generate|"
                           r"generation|evaluate)(?=[_.])")
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
_YAML, _TOML, _JSON = (".yaml", ".yml"), (".toml",), (".json",)


def script_words(file: str, text: str, notes: list[str], written: dict[str, WrittenFile]) -> list[str]:
    """Return the words of the command that starts the program, with the script's own variables filled in.

    Without such a command: the words of another one, or of variables such as GPT_ARGS. `notes` gets the lines that
    were not understood, and `written` the files that the script writes.
    """
    script = Script(file)
    try:
        script.follow(text)
    except RecursionError:
        raise ConfigError(file, problem="it is nested too deeply for a script of settings") from None
    written |= {path: WrittenFile(content, _lines(file, script.unclear[path]))
                for path, content in script.written.items()}
    found = _program_of(file, script)
    words, unclear = (found.words, found.unclear) if found else ([], {})
    if not any(_FLAG.match(word) for word in words):  # a fragment that only sets variables such as GPT_ARGS
        lists = {name: [value] if isinstance(value, str) else value for name, value in script.variables.items()}
        chosen = [name for name, values in lists.items() if values and values[0].lstrip().startswith("--")]
        words = [word for name in chosen for value in lists[name] for word in _split(file, value)]
        unclear = {line: how for name in chosen for line, how in script.unclear[name].items()}
    if not words:
        others = [each for each in script.commands if _SCRIPT.match(" ".join(each.words))]
        raise ConfigError(file, problem="it starts no program with arguments" + "".join(
            f"; line {each.line} starts another script: {shorten(' '.join(each.words), 80)}" for each in others[:1]),
            remedy="give the script that has the arguments")
    after = next((index for index, word in enumerate(words) if word.endswith(".py")), -1) + 1
    for name in re.findall(r"\$\{?(\w+)", " ".join(words[after:])):
        unclear |= script.outputs.get(name, {})
    notes += _lines(file, unclear)
    # a quoted flag with its value, in an array that is expanded without quotes
    return [part for word in words for part in (word.split() if _FLAG_WITH_VALUE.match(word) else [word])]


def _program_of(file: str, script: Script) -> Command | None:
    """Return the command that starts the training program, or else one with flags. Raises ConfigError for several."""
    programs = [each for each in script.commands if any(word.endswith(".py") for word in each.words)]
    training = [each for each in programs if _TRAINING.search(" ".join(each.words))] or programs
    if len({tuple(each.words) for each in training}) > 1:
        lines = ", ".join(str(each.line) for each in training)
        raise ConfigError(file, problem=f"it starts several programs, on the lines {lines}",
                          remedy="keep the command of one of them")
    others = [each for each in script.commands if any(_FLAG.match(word) for word in each.words)
              and not _SCRIPT.match(" ".join(each.words))]
    return next(iter(training or others), None)


def _lines(file: str, unclear: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(f"{Path(file).name}: line {line} was not understood: {shorten(' '.join(how.split()), 100)}"
                 for line, how in sorted(unclear.items()))


def _split(file: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(file, problem=f"{shorten(text, 60)!r} is not a list of words: {error}") from None


def command_flags(place: str, words: list[str], launcher: dict[str, Any], notes: list[str]) -> list[tuple[str, Any]]:
    """Return the flags behind the program's name, with their values.

    `launcher` gets those before it, which belong to the program's launcher, and `notes` what remains open. Raises
    ConfigError for a program that trains another kind of model.
    """
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
    return [*_flags(words)]


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
    written: dict[str, WrittenFile] = {}
    for name, value, place in _entries(files, words, launcher, notes, written):
        if name in given and _source(place) == _source(places[name]):
            if value != given[name]:
                notes.append(f"{place} is given several times: the last value is used")
        elif name in given:
            raise ConfigError(place, problem=f"the same setting is in {places[name]}", remedy="keep one of the two")
        given[name], places[name] = value, place
    program = program or _recognize(given, " ".join(files) or "command line")
    return Settings(program, given, places, launcher, tuple(dict.fromkeys(notes)), written)


def _source(place: str) -> str:
    """Return the file of a place, or the command line."""
    return place.rpartition(": ")[0]


def _entries(files: Sequence[str], words: Sequence[str], launcher: dict[str, Any],
             notes: list[str], written: dict[str, WrittenFile]) -> Iterator[tuple[str, Any, str]]:
    """Yield (current name, value, where it stands) of every setting. The last three arguments are filled."""
    for file in files:
        text = _read(file)
        suffix = Path(file).suffix
        if suffix in _TOML:
            pairs = [*_flat(_parse_toml(file, text)).items()]
        elif suffix in _YAML or suffix in _JSON:
            pairs = [*_parse_mapping(file, text).items()]
        else:
            pairs = command_flags(file, script_words(file, text, notes, written), launcher, notes)
        yield from ((_name(str(name)), value, f"{file}: {name}") for name, value in pairs)
    if words:
        for name, value in command_flags("command line", list(words), launcher, notes):
            yield _name(name), value, f"command line: {name}"


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
        raise ConfigError(file, problem=f"it is not YAML: {yaml_problem(error)}",
                          remedy="a comma may be missing on the line before") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(file, found=f"a {type(values).__name__}", expected="a mapping of names to values")
    return values


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


def _used_as_it_is(where: str, what: str, flag: str) -> ConfigError:
    return ConfigError(where, problem=f"this is {what}, and no settings of a program",
                       remedy=f"nothing has to be translated: give it as {flag} of the run")


def _recognize(given: Mapping[str, Any], where: str) -> str:
    """Return the program with the most names of its own. Raises ConfigError if there is none."""
    names = set(given)
    if names and names <= set(TREE):
        raise _used_as_it_is(where, "a DeepSpeed JSON", "--deepspeed_config")
    if {"model_type", "vocab_size"} <= names and "output_dir" not in names:
        raise _used_as_it_is(where, "the config.json of a model", "--model")
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
