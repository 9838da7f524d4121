"""The class of a wrong input, a valid command line of each program, and the generated inputs that are valid."""

import argparse
import dataclasses
import importlib.abc
import importlib.util
import os
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
    """A command line, the files that it needs, and the text that the error must contain.

    {world} is replaced by the path of the folder with the files.
    """

    name: str
    program: str
    words: tuple[str, ...]
    culprit: str
    files: tuple[tuple[str, bytes], ...] = ()


# Generated inputs that are valid. LEGAL below maps the reason to the names of the cases.
_ZEROS = {  # flags for which 0 is valid
    "tools/check_cluster.py": ("rounds", "min_gbit", "max_clock_skew"), "tools/generate.py": ("top_k",),
    "tools/checkpoint.py prune": ("keep_every", "keep_best"),
    "tools/compare_zero.py": ("activation_checkpoint_interval", "embedding_dropout", "attention_dropout",
                              "residual_dropout"),
    "launch/supervise.py": ("max_restarts", "backoff_s", "backoff_max_s", "grace_s"),
    "tools/inspect_data.py step": ("tokens",),
    "pretrain/train.py": ("lr_warmup_steps", "lr_warmup_tokens", "min_lr_ratio", "min_lr", "eval_interval",
                          "save_interval", "keep_checkpoints", "keep_every", "keep_best", "weight_decay",
                          "adam_epsilon", "embedding_dropout", "attention_dropout", "residual_dropout",
                          "rollback_skip_steps", "max_rollbacks", "step_timeout", "first_step_timeout",
                          "replica_check_interval", "first_sample", "label_smoothing", "z_loss",
                          "router_z_loss", "expert_capacity_factor",
                          "gradient_value_clipping", "adaptive_clipping", "noise_scale_interval",
                          "early_stopping_patience", "early_stopping_min_delta"),
}
_FRACTIONS = {  # flags for which 1.5 is valid
    "tools/check_cluster.py": ("timeout", "min_gbit", "max_clock_skew"), "tools/bench.py": ("timeout",),
    "tools/compare_zero.py": ("host_memory_gib", "nvme_gb", "nvme_gbps", "network_gbps", "tokens", "storage_gbps"),
    "tools/export_hf.py": ("shard_size",),
    "tools/generate.py": ("temperature", "repetition_penalty"), "tools/make_corpus.py": ("megabytes",),
    "tools/train_tokenizer.py": ("max_megabytes",),
    "launch/supervise.py": ("backoff_s", "backoff_max_s", "grace_s", "health_timeout_s"),
    "tools/chaos.py": ("stall_s",), "tools/find_lr.py": ("to",),
    "pretrain/train.py": ("save_timeout", "weight_decay", "peak_tflops", "init_std", "exit_after_minutes",
                          "spike_threshold", "step_timeout", "first_step_timeout", "gradient_value_clipping",
                          "adaptive_clipping"),
}


def _flags(flags: dict[str, tuple[str, ...]], value: str) -> tuple[str, ...]:
    return tuple(f"{program} --{flag}={value}" for program, names in flags.items() for flag in names)


LEGAL: dict[str, tuple[str, ...]] = {
    "0 disables it, or means all": _flags(_ZEROS, "0"),
    "the flag accepts fractions": _flags(_FRACTIONS, "1.5"),
    "the newest two are always kept": ("tools/checkpoint.py prune --keep_checkpoints=0",),
    "a seed may be 0": ("tools/generate.py --seed=0", "tools/data.py split --seed=0",
                        "pretrain/train.py --seed=0", "tools/chaos.py --seed=0"),
    "greedy sampling": ("tools/generate.py --temperature=0",),
    "a limit above the size means everything": (f"tools/make_corpus.py --megabytes={TOO_LARGE}",
                                     f"tools/train_tokenizer.py --max_megabytes={TOO_LARGE}"),
    "a long run": (f"tools/compare_zero.py --tokens={TOO_LARGE}",),
    "a machine may have none of this resource": _flags(
        {"tools/compare_zero.py": ("host_memory_gib", "nvme_gb", "margin")}, "0"),
    "any text is valid": ("tools/generate.py --prompt=", "tools/generate.py --prompt=~/x",
                            "tools/generate.py --stop=~/x", "tools/generate.py --jsonl_key=~/x",
                            "tools/prepare_data.py --jsonl_key=~/x",
                            "tools/prepare_data.py --document_separator=~/x",
                            "tools/train_tokenizer.py --jsonl_key=~/x",
                            "tools/evaluate.py --jsonl_key=~/x",
                            "launch/supervise.py --health_command=~/x"),
    "rejected with the name of the checkpoint instead of the flag": ("tools/generate.py --step=0",
                                                                     "tools/evaluate.py --step=0",
                                                                     "tools/export_hf.py --step=0"),
    "set by the launcher": ("pretrain/train.py --local_rank=-1", "pretrain/train.py --local_rank=0",
                            "tools/evaluate.py --local_rank=-1", "tools/evaluate.py --local_rank=0"),
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
TRAIN = {"deepspeed_config": "{world}/ds.json", "model": "tiny", "train_data": "{world}/corpus", "seq_length": "64",
         "train_steps": "50", "save": "{world}/run"}
TOOLS: dict[str, list[str]] = {  # a valid command line of each program
    "pretrain/train.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
    "tools/check_config.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
    "tools/sanity_check.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
    "tools/find_lr.py": [word for name, value in TRAIN.items() for word in (f"--{name}", value)],
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
    "tools/chaos.py": ["--faults", "5", "--", "ds-pretrain",
                       *(word for name, value in TRAIN.items() for word in (f"--{name}", value))],
}


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

    original, sys.argv = Parser.parse_known_args, [program, "--", "true"]
    Parser.parse_known_args = stop  # type: ignore[assignment,method-assign]
    environment = dict(os.environ)
    try:
        main()
    except _ParsedError as parsed:
        parser = parsed.args[0]
    finally:
        Parser.parse_known_args = original  # type: ignore[method-assign]
        os.environ.clear()  # some programs export RANK, which would turn the processes of later tests into ranks
        os.environ.update(environment)
    words = program.split(" ")
    if len(words) > 1:
        parser = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                      ).choices[words[1]]
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]
