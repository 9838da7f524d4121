"""The class of a wrong input, a valid command line of each program, and the generated inputs that are valid."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pretrain.commands import COMMANDS
from tests.support.extensions import modules_of_extensions

ROOT = Path(__file__).parents[2]
DEEP = 100_000  # levels of nesting
TOO_LARGE = str(2**63)
NUMBERS = ("x", "", "nan", "inf", "1e999", "-1", "0", "1.5", TOO_LARGE)
RAW: dict[str, bytes] = {  # file contents that are not a JSON object
    "empty": b"", "binary": bytes(range(256)), "utf16": '{"a": 1}'.encode("utf-16"), "truncated": b'{"model_type": "gp',
    "list": b"[]", "string": b'"x"', "deep": b'{"a": ' * DEEP, "deep_list": b'{"a": ' + b"[" * DEEP,
    "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}", "twice": b'{"vocab_size": 8, "vocab_size": 8}',
    "nan": b'{"vocab_size": NaN}', "long_key": b'{"' + b"k" * 100_000 + b'": 1}', "comma": b'{"vocab_size" 8}',
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, the files that it needs, and the text that the error must contain; " ... " stands for any text.

    {world} is replaced by the path of the folder with the files.
    """

    name: str
    program: str
    words: tuple[str, ...]
    culprit: str
    files: tuple[tuple[str, bytes], ...] = ()


# Generated inputs that are valid: reason -> names of the cases
LEGAL: dict[str, tuple[str, ...]] = {
    "any text is valid": ("prepare --jsonl_key=~/x",
                            "prepare --document_separator=~/x",
                            "tokenizer --special_tokens=~/x", "tokenizer --jsonl_key=~/x",
                            "evaluate --jsonl_key=~/x"),
    "plausible values": (*(f"meta.json {key}: 5" for key in ("vocab_size", "num_tokens", "num_documents", "max_token",
                                                             "eod_token", "entropy_nats")),
                         'meta.json tokenizer: "x"', 'meta.json tokenizer_sha256: "x"'),
    "rotary positions take no memory": ("gpt_neox max_position_embeddings: 1000000000",
                                        "llama max_position_embeddings: 1000000000",
                                        "mistral sliding_window: 1000000000", "qwen2 sliding_window: 1000000000"),
    "ALiBi takes no memory": ("bloom seq_length: 1000000000", "mpt max_seq_len: 1000000000"),
    "all layers have a window": ("qwen2 max_window_layers: 0",),
    "Gemma 3 nests these keys": ('gemma3_text rope_parameters: {"full_attention": {"rope_type": "default"}}',),
    "the default": ("gemma hidden_activation: null",),
}
NOTHING = object()  # a setting with this value is removed
TRAIN = "pretrain/train.py"
RUN = {"deepspeed_config": "{world}/ds.json", "model": "tiny", "train_data": "{world}/corpus", "seq_length": "64",
       "train_steps": "50", "save": "{world}/run"}
TOOLS: dict[str, list[str]] = {  # a valid command line of each program
    TRAIN: [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "check": [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "extensions": [],
    "compare": ["--model", "gpt2", "--world_size", "8"],
    "checkpoint list": ["{world}/done"],
    "checkpoint verify": ["{world}/done"],
    "checkpoint prune": ["{world}/done", "--keep_checkpoints", "2"],
    "checkpoint consolidate": ["{world}/done", "{world}/out"],
    "checkpoint diff": ["{world}/done", "{world}/done"],
    "import": ["{world}/hf", "--output", "{world}/out"],
    "export": ["{world}/done", "--output", "{world}/out"],
    "evaluate": ["{world}/done", "--data", "{world}/plain"],
    "summary": ["{world}/done"],
    "corpus": ["{world}/out"],
    "prepare": ["{world}/text.txt", "--tokenizer", "{world}", "--out", "{world}/out"],
    "data hash": ["{world}/foreign"],
    "data verify": ["{world}/corpus"],
    "data info": ["{world}/corpus"],
    "tokenizer": ["{world}/text.txt", "--out", "{world}/out"],
    "config": ["zero2_bf16"],
    "template": ["slurm"],
    "reference": ["metrics"],
}


MAINS: dict[str, Callable[[], Callable[[], Any]]] = {}  # of programs whose own function ends the process


def of_extensions() -> list[ModuleType]:
    """Return the modules wrong_inputs.py of the extensions' tests.

    They may have TOOLS, LEGAL, MAINS, WRONG, PATHS, OUTPUT_FILES, LINES, READERS and write_files.
    STORED: see tests/wrong_inputs/stored.py. PROCESSES: see tests/wrong_inputs/test_wrong_inputs.py.
    """
    return list(modules_of_extensions("wrong_inputs"))


for _module in of_extensions():
    # None: the flags of a run are a valid command line
    TOOLS |= {name: TOOLS[TRAIN] if words is None else words for name, words in getattr(_module, "TOOLS", {}).items()}
    LEGAL |= getattr(_module, "LEGAL", {})
    MAINS |= getattr(_module, "MAINS", {})


def case_of(name: str, program: str, line: str, culprit: str, files: dict[str, bytes] | None = None) -> Case:
    """Return a case for a command line, in which RIGHT is the program's valid one, and REST the same without its first
    word.
    """
    right = TOOLS[program]
    parts = [{"RIGHT": right, "REST": right[1:]}.get(word, [word]) for word in shlex.split(line)]
    return Case(name, program, tuple(word for part in parts for word in part), culprit, tuple((files or {}).items()))


def main_of(program: str) -> Callable[[], Any]:
    """Return the function of a subcommand of ds-pretrain, or of pretrain/train.py. It reads sys.argv."""
    if program == TRAIN:
        from pretrain.train import main

        return main
    name = program.split(" ")[0]
    return MAINS[name]() if name in MAINS else COMMANDS[name].load()


def actions_of(program: str, main: Callable[[], Any]) -> list[argparse.Action]:
    """Return the flags that a program declares, without running it."""
    from pretrain.commands.reference import parser_of

    parser, _ = parser_of(main, [program, "--", "true"])
    _, _, command = program.partition(" ")
    if command:
        parser = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                      ).choices[command]
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]
