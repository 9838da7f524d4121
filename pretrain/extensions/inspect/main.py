"""Look at data: the documents of a data set, and the tensors of a step of a run."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.cli import Parser, path, prefix, whole_number
from pretrain.data.source_facts import end_notes, learnable_notes, source_facts
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_schedules import BatchSizes, recorded_batch_sizes
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.inspect.documents import inspect_documents, report_lines, write_page
from pretrain.monitor.read_run_folder import newest_path, read_events, read_metrics, read_starts
from pretrain.paths import check_folder
from pretrain.progress import ProgressBar

_MOST_UNLOGGED = 1_000_000  # steps between two rows: a larger distance comes from a damaged row


@dataclass(frozen=True)
class StepPosition:
    """The start of the run that trained a step, and the data position at the beginning of the step."""

    start: dict[str, Any]  # record in run.json
    step: int
    consumed_samples: int


def find_step(run: Path, step: int) -> StepPosition:
    """Find the data position of a step, from 1. Raises ConfigError if the run has not trained this step.

    If a step was trained several times, because of a resume or a rollback, the last time counts.
    """
    starts = _starts_with_steps(run)
    trained = [start for first, start in starts if first < step]
    rows = [row for row in newest_path([row for row in read_metrics(run) if "loss" in row])
            if isinstance(row.get("consumed_samples"), int)]
    last = rows[-1]["step"] if rows else 0
    first = 1 + min(first for first, _ in starts)  # a branch begins after step 0
    if not first <= step <= last:
        raise ConfigError(f"STEP {step}", problem=f"{run} has logged the steps {first} to {last}" if last else
                          f"{run} has logged no step", remedy="give a step that the run has trained")
    # the next logged step: the steps between two logged steps follow one another
    following = next(row for row in rows if row["step"] >= step)
    if following["step"] - step > _MOST_UNLOGGED:
        raise ConfigError(str(run / "metrics.jsonl"), problem=f"it has no row of the {_MOST_UNLOGGED:,} steps from "
                          f"{step} on", remedy="give a step that the run has logged")
    position: int = following["consumed_samples"]
    for number in range(following["step"], step - 1, -1):  # a resume may have changed the batch size
        position -= _batch_sizes(run, [start for first, start in starts if first < number][-1]).ending_at(position)
    return StepPosition(trained[-1], step, position)


def _batch_sizes(run: Path, start: dict[str, Any]) -> BatchSizes:
    try:
        return recorded_batch_sizes(start)
    except (KeyError, TypeError, ValueError):  # ConfigError is a ValueError
        raise ConfigError(f"{run}: run.json", problem="the record of the run's batch size is damaged") from None


def _starts_with_steps(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the starts of the run that trained, each with the number of steps that were done before."""
    steps = [row["step"] for row in read_events(run) if row["event"] == "start"]
    found = list(zip(steps, read_starts(run), strict=False))
    if not found:
        raise ConfigError(str(run), problem="events.jsonl and run.json have no record of a start")
    return found


def _documents(args: argparse.Namespace) -> int:
    if args.html:
        check_folder(args.html.absolute().parent, "--html")
    data, meta = IndexedDataset(args.prefix), read_meta(args.prefix) or {}
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    vocab_size, eod_token = (tokenizer.vocab_size, tokenizer.eod_token) if tokenizer else (
        meta.get("vocab_size"), meta.get("eod_token"))
    part = min(1.0, args.max_documents / max(data.num_documents, 1))
    with ProgressBar("inspecting", int(part * data.num_tokens * data.dtype.itemsize)) as progress:
        report = inspect_documents(data, vocab_size=vocab_size, eod_token=eod_token, most=args.max_documents,
                                   advance=progress.advance)
    notes, where = list[str](), str(args.prefix)
    if data.num_tokens:
        facts = source_facts(data)
        notes = [*end_notes(where, facts, eod_token), *learnable_notes(data, where, facts)]
    print("\n".join([*report_lines(report), *(f"note: {note}" for note in notes)]))
    if args.html:
        write_page(args.html, data, report, tokenizer.decode if tokenizer else None)
        print(f"written: {args.html}")
    return 1 if report.counts["damaged"] else 0


def _step(args: argparse.Namespace) -> int:
    run = Path(args.run)
    position = find_step(run, args.step)
    data = open_data_of_step(run, position.start)
    from pretrain.extensions.inspect.step import check_labels, read_step, step_lines  # imports torch

    found = read_step(position, data)
    problems = check_labels(found.batches)
    lines = step_lines(found, problems, samples=args.samples, tokens=args.tokens)
    print("\n".join([*lines, *(f"note: {note}" for note in data.notes)]))
    return 1 if problems else 0


def _parser() -> Parser:
    parser = Parser(description="Look at data: the documents of a data set, and the tensors of a step of a run. No "
                                "command needs a GPU.",
                    epilog="Exit codes: 0 success; 1 damaged documents, or labels that are not the next tokens; "
                           "2 bad input.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "show the tokens, labels and loss weights that enter the model at a step of a run"
    step = commands.add_parser("step", help=text, description=text)
    step.set_defaults(function=_step)
    step.add_argument("run", metavar="RUN", type=path, help="run folder (--save of the run)")
    step.add_argument("step", metavar="STEP", type=whole_number(1, 2**62), help="number of the step, from 1")
    step.add_argument("--samples", type=whole_number(1, 2**20), default=2,
                      help="samples to show (default: %(default)s)")
    step.add_argument("--tokens", type=whole_number(0, 2**30), default=16,
                      help="positions of each sequence to show (default: %(default)s)")
    text = "find damaged, duplicate and degenerate documents"
    documents = commands.add_parser("documents", help=text, description=text)
    documents.set_defaults(function=_documents)
    documents.add_argument("prefix", metavar="PREFIX", type=prefix, help="path of the data set, without .bin")
    documents.add_argument("--tokenizer", type=path, metavar="PATH", help="tokenizer of the data, to show text")
    documents.add_argument("--html", type=path, metavar="FILE", help="write a page with plots and sampled documents "
                           "(needs matplotlib)")
    documents.add_argument("--max_documents", type=whole_number(1, 2**62), default=1_000_000, metavar="N",
                           help="documents to inspect; of more, evenly spread ones (default: %(default)s)")
    return parser


def main() -> int:
    args = _parser().parse_args()
    return int(args.function(args))
