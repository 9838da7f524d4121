"""Wrong inputs made from the programs' own tables: every flag, JSON key and model key, times what can be wrong.

`python -m tests.generated_wrong_inputs FOLDER OUT [NAME]` runs them in this process, where importing torch or deepspeed
fails, and writes a JSON line for each that was not refused as it should be.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib.abc
import importlib.util
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.wrong_inputs import BASE, change, make_world

ROOT = Path(__file__).parent.parent
LONG = "n" * 300
DEEP = 100_000  # levels of nesting
_MOST_SECONDS = 20
TOO_LARGE = str(2**63)
NUMBERS = ("x", "", "nan", "inf", "1e999", "-1", "0", "1.5", TOO_LARGE)
RAW: dict[str, bytes] = {  # contents that are no JSON object
    "empty": b"", "binary": bytes(range(256)), "utf16": '{"a": 1}'.encode("utf-16"), "truncated": b'{"model_type": "gp',
    "list": b"[]", "string": b'"x"', "deep": b'{"a": ' * DEEP, "deep_list": b'{"a": ' + b"[" * DEEP,
    "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}", "twice": b'{"vocab_size": 8, "vocab_size": 8}',
    "nan": b'{"vocab_size": NaN}', "long_key": b'{"' + b"k" * 100_000 + b'": 1}', "comma": b'{"vocab_size" 8}',
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, the files that it needs, and what the refusal must name. {world} is the folder with the files."""

    name: str
    program: str
    words: tuple[str, ...]
    culprit: str
    files: tuple[tuple[str, bytes], ...] = ()


# Made cases that are right after all, with the reason: the beginnings of their names.
_ZEROS = {
    "tools/check_cluster.py": ("rounds", "min_gbit", "max_clock_skew"), "tools/generate.py": ("top_k",),
    "tools/checkpoint.py prune": ("keep_every", "keep_best"),
    "tools/compare_zero.py": ("activation_checkpoint_interval",),
    "launch/supervise.py": ("max_restarts", "backoff_s", "backoff_max_s", "grace_s"),
    "pretrain/train.py": ("lr_warmup_steps", "min_lr_ratio", "eval_interval", "save_interval", "keep_checkpoints",
                          "keep_every", "keep_best", "weight_decay", "adam_epsilon"),
}
_NUMBERS_LIKE_OTHERS = {  # 1.5
    "tools/check_cluster.py": ("timeout", "min_gbit", "max_clock_skew"), "tools/bench.py": ("timeout",),
    "tools/compare_zero.py": ("host_memory_gib", "nvme_gb", "nvme_gbps", "network_gbps", "tokens", "storage_gbps"),
    "tools/generate.py": ("temperature",), "tools/make_corpus.py": ("megabytes",),
    "tools/train_tokenizer.py": ("max_megabytes",),
    "launch/supervise.py": ("backoff_s", "backoff_max_s", "grace_s", "health_timeout_s"),
    "pretrain/train.py": ("save_timeout", "weight_decay", "peak_tflops"),
}


def _flags(flags: dict[str, tuple[str, ...]], value: str) -> tuple[str, ...]:
    return tuple(f"{program} --{flag}={value}" for program, names in flags.items() for flag in names)


LEGAL: dict[str, tuple[str, ...]] = {
    "0 turns it off, or means all": _flags(_ZEROS, "0"),
    "a number like others": _flags(_NUMBERS_LIKE_OTHERS, "1.5"),
    "the newest two stay in any case": ("tools/checkpoint.py prune --keep_checkpoints=0",),
    "a seed may be 0": ("tools/generate.py --seed=0", "pretrain/train.py --seed=0"),
    "greedy sampling": ("tools/generate.py --temperature=0",),
    "more than there is takes all": (f"tools/make_corpus.py --megabytes={TOO_LARGE}",
                                     f"tools/train_tokenizer.py --max_megabytes={TOO_LARGE}"),
    "a long run": (f"tools/compare_zero.py --tokens={TOO_LARGE}",),
    "machines may be without them": _flags({"tools/compare_zero.py": ("host_memory_gib", "nvme_gb", "margin")}, "0"),
    "a text of one's own": ("tools/generate.py --prompt=", "tools/generate.py --prompt=~/x",
                            "tools/prepare_data.py --jsonl_key=~/x", "tools/train_tokenizer.py --jsonl_key=~/x",
                            "launch/supervise.py --health_command=~/x"),
    "refused, by the checkpoint's name": ("tools/generate.py --step=0",),
    "set by the launcher": ("pretrain/train.py --local_rank=-1", "pretrain/train.py --local_rank=0"),
    "plausible values": (*(f"meta.json {key}: 5" for key in ("vocab_size", "num_tokens", "num_documents", "max_token",
                                                             "eod_token", "entropy_nats")),
                         'meta.json tokenizer: "x"', 'meta.json tokenizer_sha256: "x"'),
    "rotary positions take no memory": ("gpt_neox max_position_embeddings: 1000000000",
                                        "llama max_position_embeddings: 1000000000"),
    "an architecture that it knows": ('compare_zero model_type: "gptj"',),
}
TRAIN = {"deepspeed_config": "{world}/ds.json", "model": "tiny", "train_data": "{world}/corpus", "seq_length": "64",
         "train_steps": "50", "save": "{world}/run"}
TOOLS: dict[str, list[str]] = {  # a right command line of each program
    "pretrain/train.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
    "tools/check_config.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
    "tools/check_cluster.py": [],
    "tools/bench.py": [],
    "tools/compare_zero.py": ["--model", "gpt2", "--world_size", "8"],
    "tools/checkpoint.py list": ["{world}/done"],
    "tools/checkpoint.py verify": ["{world}/done"],
    "tools/checkpoint.py prune": ["{world}/done", "--keep_checkpoints", "2"],
    "tools/checkpoint.py convert": ["{world}/done", "{world}/out"],
    "tools/checkpoint.py consolidate": ["{world}/done", "{world}/out"],
    "tools/checkpoint.py diff": ["{world}/done", "{world}/done"],
    "tools/generate.py": ["{world}/done"],
    "tools/summarize.py": ["{world}/done"],
    "tools/make_corpus.py": ["{world}/out"],
    "tools/prepare_data.py": ["{world}/text.txt", "--tokenizer", "{world}", "--out", "{world}/out"],
    "tools/train_tokenizer.py": ["{world}/text.txt", "--out", "{world}/out"],
    "launch/supervise.py": ["--save", "{world}/run", "--", "true"],
}


def main_of(program: str) -> Callable[[], Any]:
    """The program's `main`, which reads sys.argv."""
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
    """Raised instead of parsing; holds the parser."""


def actions_of(program: str, main: Callable[[], Any]) -> list[argparse.Action]:
    """The flags that the program declares itself."""
    from pretrain.cli import Parser

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _ParsedError(parser)

    original, sys.argv = Parser.parse_known_args, [program, "--", "true"]
    Parser.parse_known_args = stop  # type: ignore[assignment,method-assign]
    try:
        main()
    except _ParsedError as parsed:
        parser = parsed.args[0]
    finally:
        Parser.parse_known_args = original  # type: ignore[method-assign]
    words = program.split(" ")
    if len(words) > 1:
        parser = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                      ).choices[words[1]]
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


# ---------------------------------------------------------------- flags

def flag_cases() -> Iterator[Case]:
    """Every flag of every program: a missing and an empty value, other types, numbers at and beyond the edge."""
    for program, right in TOOLS.items():
        own = [] if program == "pretrain/train.py" else actions_of(program, main_of(program))
        for action in own:
            flag = action.option_strings[-1] if not isinstance(action, argparse.BooleanOptionalAction) else \
                action.option_strings[0]
            yield from _of_flag(program, right, flag, _values(action), missing=action.nargs not in (0, "?"))
        yield Case(f"{program} --no_such_flag", program, _before_end(right, ["--no_such_flag=1"]), "--no_such_flag")
        yield Case(f"{program} --no_such_flag=LONG", program, _before_end(right, [f"--{LONG}"]), "--nnn")
    yield from _train_flags()


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.nargs == 0:
        return ("x", "")  # --json=x
    if action.choices is not None:
        return ("no-such-choice", "", "5.5")
    is_number = getattr(action.type, "__qualname__", "").split(".")[0] in ("whole_number", "number", "int", "float")
    return NUMBERS if is_number else ("", "~/x")


def _train_flags() -> Iterator[Case]:
    from pretrain.arguments import RunArguments

    program, right = "pretrain/train.py", TOOLS["pretrain/train.py"]
    for f in dataclasses.fields(RunArguments):
        flag, kind = f"--{f.name}", str(f.type)
        numeric, switch = "int" in kind or "float" in kind, "bool" in kind
        values = NUMBERS if numeric else ("maybe", "2") if switch else ("", "~/x")
        yield from _of_flag(program, right, flag, values, missing=not switch)
        for shape, text in (("list", "[1]"), ("mapping", "{a: 1}")):
            yield Case(f"yaml {f.name}: {shape}", program, ("--config", "{world}/in.yaml"), f.name,
                       (("in.yaml", f"model: tiny\n{f.name}: {text}\n".encode()),))
        yield Case(f"yaml {f.name} twice", program, ("--config", "{world}/in.yaml"), f"in.yaml:3: {f.name}",
                   (("in.yaml", f"{f.name}: 1\n\n{f.name}: 1\n".encode()),))


def _of_flag(program: str, right: list[str], flag: str, values: tuple[str, ...], *, missing: bool) -> Iterator[Case]:
    for value in values:
        yield Case(f"{program} {flag}={value[:20]}", program, _before_end(right, [f"{flag}={value}"]), flag)
    if missing:
        words = ["--save", "{world}/run", flag, "--", "true"] if "--" in right else [*right, flag]
        yield Case(f"{program} {flag} (no value)", program, tuple(words), flag)


def _before_end(right: list[str], words: list[str]) -> tuple[str, ...]:
    """The right words and these, in front of a supervised command."""
    end = right.index("--") if "--" in right else len(right)
    return (*right[:end], *words, *right[end:])


# ---------------------------------------------------------------- files and folders

UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
              "long": "{world}/" + LONG, "proc": "/proc/self/none"}
UNWRITABLE = {"under a file": "{world}/file/x", "long": "{world}/" + LONG, "proc": "/proc/x", "proc below": "/proc/x/y"}
READ_FLAGS = {"--deepspeed_config": "deepspeed_config", "--model": "model", "--tokenizer": "tokenizer",
              "--train_data": "", "--valid_data": "", "--test_data": "", "--config": "config"}


def _name_of(path: str) -> str:
    """The part of a path that must be in the message, which cuts long paths."""
    return path.rsplit("/", 1)[1][:50]


def path_cases() -> Iterator[Case]:
    """Every path that is read or written, each in a place where that cannot be."""
    train = "pretrain/train.py"
    for flag, (what, path) in itertools.product(READ_FLAGS, UNREADABLE.items()):
        yield Case(f"{flag} {what}", train, (*TOOLS[train], flag, path), _name_of(path))
    for flag in ("--save", "--checkpoint_mirror"):
        for what, path in UNWRITABLE.items():
            yield Case(f"{flag} {what}", train, (*TOOLS[train], flag, path), flag)
    yield Case("--save file", train, (*TOOLS[train], "--save", "{world}/file"), "--save")
    for what, url in {"the run folder": "{world}/run", "inside": "{world}/run/mirror", "dots": "{world}/x/../run",
                      "file URL": "file://{world}/run", "protocol": "s4://bucket/x", "no protocol": "://x"}.items():
        yield Case(f"--checkpoint_mirror {what}", train, (*TOOLS[train], "--checkpoint_mirror", url),
                   "--checkpoint_mirror")
    for command in ("list", "verify", "prune", "convert", "consolidate", "diff"):
        program = f"tools/checkpoint.py {command}"
        for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
            yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
    for command, (what, path) in itertools.product(("convert", "consolidate"), {
            **UNWRITABLE, "file": "{world}/file", "other folder": "{world}/done"}.items()):
        program = f"tools/checkpoint.py {command}"
        yield Case(f"{program} to {what}", program, ("{world}/done", path), _name_of(path))
    for program in ("tools/generate.py", "tools/summarize.py"):
        for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
            yield Case(f"{program} {what}", program, (path,), _name_of(path))
    yield Case("generate --step", "tools/generate.py", ("{world}/done", "--step", "7"), "global_step7")
    for what, path in UNREADABLE.items():
        yield Case(f"generate --tokenizer {what}", "tools/generate.py", ("{world}/done", "--tokenizer", path),
                   "--tokenizer")
        for program in ("tools/prepare_data.py", "tools/train_tokenizer.py"):
            yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
    yield from _output_cases()


def _output_cases() -> Iterator[Case]:
    places = {**UNWRITABLE, "file": "{world}/file"}
    for what, path in places.items():
        yield Case(f"make_corpus {what}", "tools/make_corpus.py", (path,), _name_of(path))
        yield Case(f"train_tokenizer --out {what}", "tools/train_tokenizer.py",
                   ("{world}/text.txt", "--out", path), _name_of(path))
    for what, path in {**UNWRITABLE, "slash": "{world}/nvme/", "dot": ".", "dot dot": "..", "suffix": "x.bin"}.items():
        yield Case(f"prepare_data --out {what}", "tools/prepare_data.py",
                   (*TOOLS["tools/prepare_data.py"], "--out", path), "--out")
    for flag, (what, path) in itertools.product(("--json", "--csv", "--plot", "--write"), {
            **UNWRITABLE, "folder": "{world}/nvme", "no folder": "{world}/none/x"}.items()):
        if what != "folder":
            path += ".html" * (flag == "--plot")
        yield Case(f"compare_zero {flag} {what}", "tools/compare_zero.py",
                   (*TOOLS["tools/compare_zero.py"], flag, path), flag)
    for what, path in {**UNREADABLE, **UNWRITABLE, "file": "{world}/file"}.items():
        yield Case(f"bench --write {what}", "tools/bench.py", ("--write", path), "--write")
        yield Case(f"compare_zero --configs {what}", "tools/compare_zero.py",
                   (*TOOLS["tools/compare_zero.py"], "--configs", path), _name_of(path))
    for what, path in UNREADABLE.items():
        yield Case(f"compare_zero --model {what}", "tools/compare_zero.py", ("--model", path, "--world_size", "8"),
                   "--model")
        yield Case(f"supervise --hostfile {what}", "launch/supervise.py",
                   ("--hostfile", path, "--save", "{world}/run", "--", "deepspeed", "pretrain/train.py"), "--hostfile")
        yield Case(f"supervise YAML {what}", "launch/supervise.py",
                   ("--", "deepspeed", "pretrain/train.py", "--config", path), "--config")
    for what, path in UNWRITABLE.items():
        yield Case(f"supervise --save {what}", "launch/supervise.py", ("--save", path, "--", "true"), "--save")
        yield Case(f"check_cluster --save {what}", "tools/check_cluster.py", ("--save", path), "--save")


# ---------------------------------------------------------------- contents of files

def content_cases() -> Iterator[Case]:
    """Files of every format that hold something else."""
    train, right = "pretrain/train.py", TOOLS["pretrain/train.py"]
    for what, raw in RAW.items():
        yield Case(f"DeepSpeed JSON: {what}", train, (*right, "--deepspeed_config", "{world}/in.json"), "in.json",
                   (("in.json", raw),))
        for program, flags in ((train, right), ("tools/compare_zero.py", ["--world_size", "8"])):
            yield Case(f"{program} config.json: {what}", program, (*flags, "--model", "{world}/in.json"), "in.json",
                       (("in.json", raw),))
        if what not in ("twice", "string", "comma", "long_key"):
            yield Case(f"tokenizer.json: {what}", train, (*right, "--tokenizer", "{world}/in.json"), "in.json",
                       (("in.json", raw),))
            yield Case(f"tokenizer.model: {what}", train, (*right, "--tokenizer", "{world}/in.model"), "in.model",
                       (("in.model", raw),))
            yield Case(f".idx: {what}", train, (*right, "--train_data", "{world}/in"), "in.idx",
                       (("in.idx", raw), ("in.bin", b"")))
            yield Case(f"run.json: {what}", "tools/summarize.py", ("{world}/broken",), "run.json",
                       (("broken/run.json", raw),))
        if what not in ("twice", "nan", "long_key", "digits"):
            yield Case(f".meta.json: {what}", train, (*right, "--train_data", "{world}/plain"), "plain.meta.json",
                       (("plain.meta.json", raw),))
        yield Case(f"hostfile: {what}", "launch/supervise.py", (
            "--hostfile", "{world}/in.hosts", "--save", "{world}/run", "--", "deepspeed", "pretrain/train.py"),
            "in.hosts", (("in.hosts", raw),))
    for what, raw in {"list": b"- a", "string": b"x", "binary": bytes(range(256)), "utf16": "a: 1".encode("utf-16"),
                      "deep": b"[" * DEEP, "deep mapping": b"{a: " * DEEP, "deep value": b"save: " + b"[" * 3000,
                      "unclosed": b"a: [1", "tab": b"a:\n\t- 1", "unknown": b"no_such_key: 1",
                      "tag": b"a: !!python/x y",
                      "anchor": b"a: *none", "NUL": b'valid_data: "a\\0b"', "complex key": b"? [a, b]\n: 1",
                      "spellings": b"save-interval: 1\nsave_interval: 1\n", "digits": b"seed: " + b"9" * 5000,
                      "date": b"seed: 2024-99-99", "long key": b"k" * 1000 + b": 1",
                      "documents": b"a: 1\n---\nb: 2\n"}.items():
        culprit = {"NUL": "--valid_data", "digits": "--seed", "date": "--seed", "long key": "kkk"}.get(what, "in.yaml")
        yield Case(f"YAML: {what}", train, (*right, "--config", "{world}/in.yaml"), culprit, (("in.yaml", raw),))
    yield Case("YAML twice", train, (*right, "--config", "{world}/in.yaml", "--config", "{world}/in.yaml"), "--config",
               (("in.yaml", b"seed: 1"),))
    yield from _metadata_cases()
    yield from _row_cases()
    yield from _text_cases()


def _metadata_cases() -> Iterator[Case]:
    """PREFIX.meta.json with values of other types."""
    right = {"vocab_size": 512, "num_tokens": 20000, "num_documents": 100, "max_token": 499, "eod_token": 0,
             "tokenizer": "t", "tokenizer_sha256": "ab" * 32, "entropy_nats": 5.0}
    for key, value in itertools.product(right, ("[1]", "{}", "-1", "true", "1e999", TOO_LARGE, '"x"', "5")):
        text = json.dumps({**right, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"meta.json {key}: {value}", "pretrain/train.py",
                   (*TOOLS["pretrain/train.py"], "--train_data", "{world}/plain"), key,
                   (("plain.meta.json", text.encode()),))


def _row_cases() -> Iterator[Case]:
    """run.json and metrics.jsonl with values of other types."""
    start = json.dumps([{"flags": {"train_data": None, "valid_data": None}, "train_steps": 5}]).encode()
    row = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0}
    for key, value in itertools.product(row, ('"x"', "[]", "{}", "true", "NaN", "1e999")):
        text = json.dumps({**row, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"metrics.jsonl {key}: {value}", "tools/summarize.py", ("{world}/broken",), key,
                   (("broken/run.json", start), ("broken/metrics.jsonl", text.encode())))
    for value in ('"x"', "[]", "{}", "true", "NaN"):
        text = f'{{"split": "valid", "step": 1, "eval_loss": {value}}}'
        yield Case(f"metrics.jsonl eval_loss: {value}", "tools/summarize.py", ("{world}/broken",), "eval_loss",
                   (("broken/run.json", start), ("broken/metrics.jsonl", text.encode())))
    for what, text in {"number": "[5]", "no flags": "[{}]", "flags": '[{"flags": 5}]',
                       "steps": '[{"flags": {}, "train_steps": "x"}]', "none": "[]", "object": "{}"}.items():
        for program in ("tools/summarize.py", "tools/generate.py"):
            if program == "tools/generate.py" and what == "steps":
                continue  # it does not read them
            yield Case(f"{program} run.json: {what}", program, ("{world}/done",), "run.json",
                       (("done/run.json", text.encode()),))


def _text_cases() -> Iterator[Case]:
    """Inputs of prepare_data and train_tokenizer."""
    for what, (name, raw) in {
            "not UTF-8": ("in.txt", b"\xff\xfe\x00"), "no gzip": ("in.gz", b"text"), "no JSON": ("in.jsonl", b"text"),
            "cut gzip": ("in.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"), "empty": ("in.txt", b""),
            "no key": ("in.jsonl", b'{"txt": "a"}'), "number": ("in.jsonl", b'{"text": 5}'),
            "list": ("in.jsonl", b'["a"]'), "deep": ("in.jsonl", b"[" * DEEP),
            "surrogate": ("in.jsonl", b'{"text": "\\ud800"}'), "digits": ("in.jsonl", b"9" * 5000)}.items():
        for program in ("tools/prepare_data.py", "tools/train_tokenizer.py"):
            yield Case(f"{program}: {what}", program, (f"{{world}}/{name}", *TOOLS[program][1:-1], "{world}/new/out"),
                       name, ((name, raw),))


# ---------------------------------------------------------------- keys of the DeepSpeed JSON

_WRONG_KINDS = {
    "bool": ('"yes"', "1", "[]", "{}", "0.5"), "int": ('"x"', "1.5", "true", "[]", "{}", "1e999", TOO_LARGE, "NaN"),
    "number": ('"x"', "true", "[]", "{}", "1e999", "-1e999", "NaN", '""'), "str": ("5", "true", "[]", "{}"),
    "list": ('"x"', "5", "{}", "true"), "pair": ("5", "[0.9]", '[0.9, "x"]', "[0.9, true]", "[0.9, 1e999]", "{}"),
}


def json_cases() -> Iterator[Case]:
    """Every key of the schema with values of other types and beyond its range."""
    from pretrain.ds_optimizers import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS
    from pretrain.ds_schema import REMOVED, TREE

    yield from _tree_cases(TREE, "", {})
    seen: dict[str, Any] = {}
    for name, tree in {**OPTIMIZERS, **TORCH_OPTIMIZERS}.items():
        yield _json_case("optimizer.params", "5", {"optimizer.type": name}, name)
        new = {key: value for key, value in tree.items() if seen.get(key) != value}
        seen.update(tree)
        yield from _tree_cases(new, "optimizer.params.", {"optimizer.type": name, "optimizer.params": {}}, name)
    for name, tree in SCHEDULERS.items():
        changes = {"scheduler": {"type": name, "params": {}}}
        yield _json_case("scheduler.params", "5", {"scheduler": {"type": name}}, name)
        yield from _tree_cases(tree, "scheduler.params.", changes, name)
    for dotted in REMOVED:
        yield _json_case(dotted, "12345", {}, "removed")
    for value in ("5", "null", '"no-such"', "[]", "{}", "true"):
        yield _json_case("optimizer.type", value, {}, "type")
        yield _json_case("scheduler", f'{{"type": {value}}}', {}, "type")


def _tree_cases(tree: dict[str, Any], prefix: str, changes: dict[str, Any], about: str = "") -> Iterator[Case]:
    from pretrain.ds_schema import Key

    for name, key in tree.items():
        dotted = f"{prefix}{name}"
        if dotted in ("optimizer.params", "scheduler.params", "scheduler.type", "optimizer.type"):
            continue  # their own cases
        if not isinstance(key, Key):
            for value in ("5", '"x"', "[]", "true"):
                yield _json_case(dotted, value, changes, about)
            yield _json_case(f"{dotted}.no_such_key", "1", changes, about)
            yield from _tree_cases(key, f"{dotted}.", changes, about)
            continue
        if key.refused:
            yield _json_case(dotted, "12345", changes, about)
            continue
        values = list(_WRONG_KINDS.get(key.kind, ()))
        values += [str(key.low - 1)] if key.low is not None else []
        values += [str(key.high + 1)] if key.high is not None and key.kind != "pair" else []
        values += ['"no-such-word"'] if key.words else []
        values += [] if key.null or key.kind == "any" else ["null"]
        for value in values:
            yield _json_case(dotted, value, changes, about)


def _json_case(dotted: str, value: str, changes: dict[str, Any], about: str) -> Case:
    document = json.loads(json.dumps(BASE))
    for where, changed in changes.items():
        change(document, where, copy.deepcopy(changed))
    parent = dotted.rpartition(".")[0]
    if dotted.endswith(("max_live_parameters", "no_such_key")) and parent == "zero_optimization":
        change(document, "zero_optimization.stage", 3)
    change(document, dotted, "VALUE")
    before, after = json.dumps(document, indent=1).split('"VALUE"')
    # numbers that no JSON holds are found while reading, which names the line
    unreadable = any(number in value for number in ("NaN", "1e999", TOO_LARGE))
    culprit = f"in.json:{before.count(chr(10)) + 1}: " if unreadable else dotted.split(".")[-1]
    return Case(f"JSON {about} {dotted}: {value[:20]}", "pretrain/train.py",
                (*TOOLS["pretrain/train.py"], "--deepspeed_config", "{world}/in.json"),
                culprit, (("in.json", (before + value + after).encode()),))


# ---------------------------------------------------------------- keys of the model's config.json

_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 128},
    "gpt_neox": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
                 "intermediate_size": 64, "max_position_embeddings": 128, "rotary_pct": 1.0},
    "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
              "intermediate_size": 64, "max_position_embeddings": 128},
}
_WRONG_TYPES: dict[type, tuple[str, ...]] = {
    int: ('"x"', "1.5", "true", "[]", "{}", "-1", "0", "1e999", "NaN", TOO_LARGE, "1000000000"),
    float: ('"x"', "true", "[]", "{}", "-1", "1e999", "-1e999", "NaN", "1e300"), bool: ('"true"', "1", "[]", "null"),
    str: ("5", "[]", "{}", "true", "null", '"no-such"', '""'),
    dict: ('"x"', "5", "[1]", "true", '{"rope_type": 5}', '{"rope_type": []}', '{"rope_type": "no-such"}',
           '{"type": "linear"}', '{"rope_type": "linear", "factor": "x"}', '{"rope_type": "linear", "factor": 1e999}',
           '{"rope_type": "linear", "factor": -1}', '{"rope_theta": "x"}', '{"rope_theta": []}', '{"rope_theta": -5}',
           '{"partial_rotary_factor": "x"}', '{"partial_rotary_factor": 2}', '{"no_such_key": 1}',
           '{"full_attention": {"rope_type": "default"}}'),
}


def model_cases() -> Iterator[Case]:
    """Every key of a config.json that changes the model, in the file and as an override."""
    from pretrain.model.config_keys import FIXED, KEYS, NULLABLE

    for architecture, own in _MODELS.items():
        for key, default in KEYS[architecture].items():
            kind = NULLABLE.get(key, type(default))
            for value in _WRONG_TYPES[kind]:
                culprit = "rope" if kind is dict else key
                yield _model_case(architecture, own, key, value, culprit)
            for value in (*NUMBERS[:6], TOO_LARGE) if kind in (int, float) else ("no-such", ""):
                yield Case(f"--model_overrides {architecture} {key}={value}", "pretrain/train.py",
                           (*TOOLS["pretrain/train.py"], "--model", f"{{world}}/{architecture}.json",
                            "--model_overrides", f"{key}={value}"), key if value else "--model_overrides",
                           ((f"{architecture}.json", json.dumps({"model_type": architecture, **own}).encode()),))
        for key, fixed in FIXED.items():
            yield _model_case(architecture, own, key, "12345" if fixed != 12345 else "1", key)
        yield _model_case(architecture, own, "no_such_key", "1", "no_such_key")
    for value in ("5", "null", "[]", "{}", "true", '"gptj"', '"x"', '""'):
        yield _model_case("gpt2", {}, "model_type", value, "model_type")
        yield dataclasses.replace(_model_case("gpt2", {}, "model_type", value, "model_type"),
                                  name=f"compare_zero model_type: {value}", program="tools/compare_zero.py",
                                  words=("--model", "{world}/in.json", "--world_size", "8"))
    yield from _foreign_model_cases()


def _foreign_model_cases() -> Iterator[Case]:
    """Models that only compare_zero reads."""
    mixtral = {"model_type": "mixtral", **_MODELS["llama"], "num_key_value_heads": 2, "num_local_experts": 4}
    for key, value in itertools.product([*list(mixtral)[1:], "head_dim", "num_experts_per_tok"], (
            '"x"', "-1", "0", "1.5", "[]", "1e999", TOO_LARGE)):
        text = json.dumps({**mixtral, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"mixtral {key}: {value}", "tools/compare_zero.py",
                   ("--model", "{world}/in.json", "--world_size", "8"), key, (("in.json", text.encode()),))


def _model_case(architecture: str, own: dict[str, Any], key: str, value: str, culprit: str) -> Case:
    text = json.dumps({"model_type": architecture, **own, key: "VALUE"}).replace('"VALUE"', value)
    return Case(f"{architecture} {key}: {value}", "pretrain/train.py",
                (*TOOLS["pretrain/train.py"], "--model", "{world}/in.json"), culprit, (("in.json", text.encode()),))


# ---------------------------------------------------------------- running them

def made_cases() -> list[Case]:
    """All of them, those that are legal too."""
    return [*flag_cases(), *path_cases(), *content_cases(), *json_cases(), *model_cases()]


def cases() -> list[Case]:
    """Those that must be refused."""
    legal = {name for names in LEGAL.values() for name in names}
    return [case for case in made_cases() if case.name not in legal]


class _NoTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importing torch or deepspeed fails; asking whether they are installed does not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name in ("torch", "deepspeed") else None

    def create_module(self, spec: Any) -> Any:
        raise AssertionError(f"{spec.name} was imported: the input was not refused before")

    def exec_module(self, module: Any) -> None: ...


def _no_process(self: Any, words: Any, *_: Any, **__: Any) -> None:
    if words[0] != "nvidia-smi":
        raise AssertionError(f"{words} was started: the input was not refused before")
    raise FileNotFoundError


def _took_too_long(*_: Any) -> None:
    raise AssertionError(f"{_MOST_SECONDS} s of processor time, and not refused")


def run_case(case: Case, world: Path) -> str:
    """What is wrong with the refusal; "" where it is as it should be."""
    written = [world / name for name, _ in case.files]
    kept = {path: path.read_bytes() for path in written if path.exists()}
    made = {path.parent for path in written if not path.parent.exists()}
    for (_, content), path in zip(case.files, written, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    before = sorted(world.rglob("*"))
    try:
        code, out, err = _run(case, world)
        after = sorted(world.rglob("*"))
    finally:
        for path in written:
            path.unlink(missing_ok=True)
        for path, content in kept.items():
            path.write_bytes(content)
        for folder in made:
            folder.rmdir()
    left = [str(path) for path in after if path not in before] + [str(path) for path in before if path not in after]
    said = err.splitlines()
    culprit = case.culprit.replace("{world}", str(world))
    for wrong, problem in ((left, f"left behind or removed: {left[:3]}"), (code != 2, f"exit code {code}"),
                           (out != "", "output"), ("Traceback" in err, "traceback"), (len(said) != 1, "lines"),
                           (len(err) > 2000, "a line of over 2000 characters"),
                           (not err.startswith("ds-pretrain: error: "), "start"),
                           (culprit not in err, f"no {culprit} in it")):
        if wrong:
            return f"{problem}: {err[-1500:]} {out[:300]}"
    return ""


def _run(case: Case, world: Path) -> tuple[Any, str, str]:
    from pretrain.cli import run_main

    words = [*case.program.split(" ")[1:], *(word.replace("{world}", str(world)) for word in case.words)]
    environment = dict(os.environ)
    sys.argv = [case.program, *words]
    out, err, code = io.StringIO(), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main = main_of(case.program)
            signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)
            run_main(main)
    except SystemExit as end:
        code = end.code
    except BaseException:
        err.write(traceback.format_exc())
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.environ.clear()
    os.environ.update(environment)
    return code, out.getvalue(), err.getvalue()


def main(folder: str, out: str, only: str = "") -> None:
    """Run the cases whose name holds `only`."""
    import pretrain.distributed

    pretrain.distributed._SECONDS_TO_TELL = 0.0
    sys.meta_path.insert(0, _NoTorch())
    subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign,assignment]
    signal.signal(signal.SIGPROF, _took_too_long)
    world = Path(folder)
    make_world(world)
    (world / "tmp").mkdir()
    (world / "cwd").mkdir()
    tempfile.tempdir = str(world / "tmp")
    os.chdir(world / "cwd")
    os.environ.update(DS_ACCELERATOR="cpu", TMPDIR=str(world / "tmp"))
    with open(out, "w", encoding="utf-8") as file:
        for case in cases():
            if only in case.name:
                file.write(json.dumps([case.name, run_case(case, world)]) + "\n")
                file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
