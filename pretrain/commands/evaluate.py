"""Evaluate a model: loss, perplexity and bits per byte on data. Extensions may add other scores.

    ds-pretrain evaluate RUN
    ds-pretrain evaluate --num_accelerators 2 RUN --data data/valid book.txt

RUN is a run folder, a checkpoint of any layout, or a transformers folder. Any launcher may start the ranks.
Exit codes: 0 done; 1 a GPU does not compute; 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretrain.active_extensions import extend_parser
from pretrain.analysis.evaluate.data import SPLITS, DataFlags, open_data
from pretrain.analysis.model_source import (
    EvaluationSource,
    choose_partition,
    evaluation_dtype,
    evaluation_source,
    find_tokenizer,
)
from pretrain.cli import Parser, path, path_text, text, whole_number
from pretrain.config.equal_facts import common_facts
from pretrain.data.text_inputs.chunk import FORMATS
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.distributed.device import Device, detect_device
from pretrain.distributed.own_gpu import open_gpu, require_computing
from pretrain.distributed.print_error import run_or_reject
from pretrain.distributed.world import World
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code
from pretrain.paths import check_file
from pretrain.terminal import clear_status, status

if TYPE_CHECKING:
    from pretrain.analysis.evaluate.token_windows import WindowSet

_NOT_COMPARED = ("data", "tokenizer", "scorings")  # as other paths, these may differ between hosts


class Scoring(Protocol):
    """Scores besides the losses. The function of an extension in `Extension.extends` adds flags to the parser.

    It adds a function to the default value `scorings` of the parser: (args) -> a Scoring; None without its flag.
    """

    flag: str  # which asks for the scores

    def prepare(self, source: EvaluationSource, tokenizer: Tokenizer | ConfigError, dtype: str) -> None:
        """Read what the scores need, before torch is imported. Raises ConfigError."""

    def scores(self, source: EvaluationSource, *, seq_length: int | None,
               batch_size: int | None) -> dict[str, dict[str, Any]]:
        """Return name -> metric -> value on rank 0; {} on other ranks. Collective. Raises ConfigError."""


def _parser() -> Parser:
    parser = Parser(description="Evaluate a model: loss, perplexity and bits per byte on data.")
    add = parser.add_argument
    add("run", type=path, metavar="RUN",
        help="run folder, one of its global_stepN folders, or a transformers folder")
    add("--step", type=whole_number(), metavar="N",
        help="step of the checkpoint (default: the newest complete checkpoint)")
    add("--data", nargs="+", type=path_text, default=(), metavar="DATA",
        help="prefix of a .bin/.idx pair, or a file with text, JSON lines or Parquet (default: repeat the run's own "
        "evaluation)")
    add("--split", nargs="+", choices=SPLITS, default=(), help="all documents of these parts of the run's data")
    add("--model_code", type=imported_model_code, metavar="my_model:MyConfig", help=MODEL_CODE_HELP)
    add("--tokenizer", type=path_text, metavar="PATH", help="tokenizer (default: the run's --tokenizer)")
    add("--jsonl_key", type=text, default="text", metavar="KEY",
        help="key of the text in JSON lines, column in a Parquet file (default: %(default)s)")
    add("--format", choices=FORMATS, default="auto", help="format of text files (default: by their content)")
    add("--seq_length", type=whole_number(1), metavar="T",
        help="largest number of tokens that the model sees at once (default: the run's --seq_length)")
    add("--stride", type=whole_number(1), metavar="S",
        help="new tokens of each window; the others are context (default: T, that is, no overlap)")
    add("--max_samples", type=whole_number(1), metavar="N", help="evaluate only the first N windows of each data set")
    add("--micro_batch_size", type=whole_number(1), metavar="B",
        help="windows that a rank computes at once (default: 8192 / T)")
    add("--eod_mask_loss", action=argparse.BooleanOptionalAction,
        help="leave out the prediction that follows an end-of-document token (default: as the run)")
    add("--document_attention", action=argparse.BooleanOptionalAction,
        help="attention sees only the tokens of the same document (default: as the run)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights (default: the run's precision)")
    add("--partition_weights", action=argparse.BooleanOptionalAction,
        help="divide the weights among the ranks with ZeRO-3 (default: only if they do not fit on a device)")
    parser.set_defaults(scorings=())
    extend_parser("evaluate", parser)
    add("--json", type=path, metavar="FILE", help="also write the results to this file")
    return parser


def _data_flags(args: argparse.Namespace, scorings: Sequence[Scoring]) -> DataFlags:
    """Return the flags that choose the data. Raises ConfigError for flags that have no effect."""
    flags = DataFlags(tuple(args.data), tuple(args.split), args.tokenizer, args.jsonl_key, args.seq_length, args.stride,
                      args.max_samples, args.eod_mask_loss, args.document_attention, args.format)
    if scorings and not flags.data and not flags.split:
        for name in ("stride", "max_samples", "eod_mask_loss", "document_attention", "partition_weights"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}", problem=f"it has no effect on {scorings[0].flag}",
                                  remedy="give --data or --split too")
    return flags


def _run(args: argparse.Namespace, world: World) -> int:
    """Check everything, then import torch and evaluate. Raises ConfigError."""
    if args.json is not None:
        check_file(args.json, "--json")
    source, device = evaluation_source(args.run, args.step, complete=world.rank == 0), detect_device()
    dtype = evaluation_dtype(source, device, args.dtype)
    partition = choose_partition(source, dtype, device, world, args.partition_weights)
    tokenizer = find_tokenizer(source, args.tokenizer)
    scorings: list[Scoring] = [found for make in args.scorings if (found := make(args)) is not None]
    flags = _data_flags(args, scorings)
    sets = open_data(source, flags, tokenizer) if flags.data or flags.split or not scorings else []
    for scoring in scorings:
        scoring.prepare(source, tokenizer, dtype)
    known = tokenizer if isinstance(tokenizer, Tokenizer) else None
    for note in source.notes if world.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    status("loading torch and DeepSpeed")
    prepare_deepspeed(device)
    from pretrain.analysis.evaluate.evaluate import Setting, evaluate, table_lines, write_json
    from pretrain.distributed.process_group import init_process_group
    from pretrain.engine.build import deepspeed_output

    with deepspeed_output("error"):
        if world.size > 1:
            init_process_group(world, facts=_facts(args, source, sets, world, device))
            source = source.of_rank_0()
            dtype = evaluation_dtype(source, device, args.dtype)
            partition = choose_partition(source, dtype, device, world, args.partition_weights)
        elif device.kind == "cuda":
            open_gpu(world)
            require_computing(0)
        source.verify(ranks=world.size)
        results = evaluate(source, sets, known, dtype=dtype, partition=partition,
                           micro_batch_size=args.micro_batch_size) if sets else []
        scores: dict[str, dict[str, Any]] = {}
        for scoring in scorings:
            scores |= scoring.scores(source, batch_size=args.micro_batch_size,
                                     seq_length=args.seq_length or source.trained_length)
    clear_status()
    if world.rank == 0:
        setting = Setting(str(source.folder), source.config.num_parameters(), dtype, device.kind, world.size, partition)
        print("\n".join(table_lines(setting, results, scores)))
        if args.json is not None:
            write_json(args.json, setting, results, scores)
    return 0


def _facts(args: argparse.Namespace, source: EvaluationSource, sets: "Sequence[WindowSet]", world: World,
           device: Device) -> dict[str, str]:
    """Return what the ranks must have in common. Paths may differ; rank 0 chooses the checkpoint."""
    flags = {name: value for name, value in vars(args).items()
             if name not in _NOT_COMPARED and not isinstance(value, Path)}
    values = {**{f"--{name}": value for name, value in flags.items()}, "model": source.config.hf_config,
              "windows of each data set": [len(each) for each in sets]}
    return {**common_facts("ds-pretrain evaluate", world, device),
            **{name: json.dumps(value, default=str, sort_keys=True) for name, value in values.items()}}


def main() -> int:
    """Run the program and return its exit code."""
    return run_or_reject(lambda world: _run(_parser().parse_args(), world))

