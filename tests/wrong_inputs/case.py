"""The class of a wrong input, a valid command line of each program, and the generated inputs that are valid."""

import argparse
import dataclasses
import importlib.abc
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONG = "n" * 300
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
    "any text is valid": ("tools/generate.py --prompt=", "tools/generate.py --prompt=~/x",
                            "tools/generate.py --stop=~/x", "tools/generate.py --jsonl_key=~/x",
                            "tools/prepare_data.py --jsonl_key=~/x",
                            "tools/prepare_data.py --document_separator=~/x",
                            "tools/train_tokenizer.py --jsonl_key=~/x",
                            "tools/evaluate.py --jsonl_key=~/x",
                            "launch/supervise.py --health_command=~/x"),
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
    "an architecture that this tool supports": ('compare_zero model_type: "opt"',),
}
TRAIN = "pretrain/train.py"
RUN = {"deepspeed_config": "{world}/ds.json", "model": "tiny", "train_data": "{world}/corpus", "seq_length": "64",
       "train_steps": "50", "save": "{world}/run"}
TOOLS: dict[str, list[str]] = {  # a valid command line of each program
    TRAIN: [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "tools/check_config.py": [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "tools/sanity_check.py": [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "tools/find_lr.py": [word for name, value in RUN.items() for word in (f"--{name}", value)],
    "tools/check_cluster.py": [],
    "tools/bench.py": [],
    "tools/compare_zero.py": ["--model", "gpt2", "--world_size", "8"],
    "tools/checkpoint.py list": ["{world}/done"],
    "tools/checkpoint.py verify": ["{world}/done"],
    "tools/checkpoint.py prune": ["{world}/done", "--keep_checkpoints", "2"],
    "tools/checkpoint.py convert": ["{world}/done", "{world}/out"],
    "tools/checkpoint.py consolidate": ["{world}/done", "{world}/out"],
    "tools/checkpoint.py diff": ["{world}/done", "{world}/done"],
    "tools/import_hf.py": ["{world}/hf", "--output", "{world}/out"],
    "tools/average_checkpoints.py": ["{world}/done", "--last", "2", "--output", "{world}/out"],
    "tools/export_hf.py": ["{world}/done", "--output", "{world}/out"],
    "tools/generate.py": ["{world}/done"],
    "tools/evaluate.py": ["{world}/done", "--data", "{world}/plain"],
    "tools/summarize.py": ["{world}/done"],
    "tools/report.py": ["{world}/done"],
    "tools/make_corpus.py": ["{world}/out"],
    "tools/prepare_data.py": ["{world}/text.txt", "--tokenizer", "{world}", "--out", "{world}/out"],
    "tools/data.py hash": ["{world}/foreign"],
    "tools/data.py verify": ["{world}/corpus"],
    "tools/data.py info": ["{world}/corpus"],
    "tools/data.py merge": ["{world}/out", "{world}/corpus", "{world}/foreign"],
    "tools/data.py split": ["{world}/corpus", "--proportions", "9,1", "--out", "{world}/out", "{world}/other"],
    "tools/inspect_data.py documents": ["{world}/corpus"],
    "tools/inspect_data.py step": ["{world}/done", "1"],
    "tools/train_tokenizer.py": ["{world}/text.txt", "--out", "{world}/out"],
    "launch/supervise.py": ["--save", "{world}/run", "--", "true"],
}


def case_of(name: str, program: str, line: str, culprit: str, files: dict[str, bytes] | None = None) -> Case:
    """Return a case for a command line, in which RIGHT is the program's valid one, and REST the same without its first
    word.
    """
    right = TOOLS[program]
    parts = [{"RIGHT": right, "REST": right[1:]}.get(word, [word]) for word in shlex.split(line)]
    return Case(name, program, tuple(word for part in parts for word in part), culprit, tuple((files or {}).items()))


def main_of(program: str) -> Callable[[], Any]:
    """Return the `main` function of a program. It reads sys.argv."""
    path = ROOT / program.split(" ")[0]
    if path.name == "train.py":
        from pretrain.train import main

        return main
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return (lambda: module.main(sys.argv[1:])) if path.stem in ("check_cluster", "check_config") else module.main


class _ParsedError(Exception):
    """Carries the parser out of `main` before `main` runs the program."""


def actions_of(program: str, main: Callable[[], Any]) -> list[argparse.Action]:
    """Return the flags that a program declares, without running it."""
    from pretrain.cli import Parser

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _ParsedError(parser)

    original, words, sys.argv = Parser.parse_known_args, sys.argv, [program, "--", "true"]
    Parser.parse_known_args = stop  # type: ignore[assignment,method-assign]
    environment = dict(os.environ)
    try:
        main()
    except _ParsedError as parsed:
        parser = parsed.args[0]
    finally:
        Parser.parse_known_args, sys.argv = original, words  # type: ignore[method-assign]
        os.environ.clear()  # some programs export RANK, which would turn the processes of later tests into ranks
        os.environ.update(environment)
    _, _, command = program.partition(" ")
    if command:
        parser = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                      ).choices[command]
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]
