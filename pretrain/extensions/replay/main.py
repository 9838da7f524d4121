"""Train the steps before a step of a run again, compare them with the flight record, and say what the cause is.

    ds-pretrain replay runs/gpt2@41203
    ds-pretrain replay runs/gpt2@41203 --deepspeed_config zero3_offload_all_cpu --num_accelerators 1

The run folder is only read; all files are in --output. Exit codes: 0 there is a result; 2 bad input.
"""

import argparse
import json
import math
import re
import shlex
import textwrap
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import Parser, path, text, whole_number
from pretrain.errors import ConfigError, format_number, listed, named, printable, reason_of, shorten
from pretrain.extensions.replay.documents import OddDocument, odd_documents
from pretrain.extensions.replay.examine_step import Answer, Layout, Replay, examine, order_of, train_again
from pretrain.extensions.replay.extension import SAMPLES_FILE, ReplayOrder
from pretrain.extensions.replay.result import CAUSES, SURE, Result
from pretrain.extensions.replay.target import Target, find_target, parse_target
from pretrain.monitor.repeatable import OWN_CODE, repeated_config, repeated_flags
from pretrain.paths import check_file, check_folder
from pretrain.shipped import find_layout
from pretrain.stored_json import read_object
from pretrain.terminal import clear_status, status

COLUMNS = 79
_STEPS_AFTER = 3  # steps after the examined one, with and without its odd samples
_KEY = " " * 10  # width of the words before a colon
VERDICT = "verdict.json"  # in the output folder


@dataclass(frozen=True)
class SampleAnswer:
    """Findings of the examination."""

    report: dict[str, Any]  # samples.json
    documents: list[OddDocument]
    command: str  # command of a branch without the samples; "": none stands out

    def lines(self) -> list[str]:
        """Return the lines to print. The command is one line, to be copied."""
        wrapped = [part for line in answer_lines(self.report, self.documents) for part in _wrapped_answer(line)]
        return [*wrapped, *(["skip:     the next line trains a branch without them", self.command]
                            if self.command else [])]

    def to_json(self) -> dict[str, Any]:
        return {**{key: value for key, value in self.report.items() if key not in ("tensors", "ids")},
                **{name: [{key: value for key, value in odd.items() if key != "token_losses"}
                          for odd in self.report[name]] for name in ("odd", "highest")},
                "documents": [asdict(document) for document in self.documents], "command": self.command,
                "lines": answer_lines(self.report, self.documents)}


def ask_about_samples(target: Target, layout: Layout, folder: Path, order: ReplayOrder) -> SampleAnswer:
    """Train up to the step once more, into `folder`, and examine its samples before it. Raises ConfigError."""
    train_again(folder, target, layout, replace(order, steps_after=_STEPS_AFTER))
    path = folder / "run" / SAMPLES_FILE
    try:
        report = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=f"it cannot be read ({reason_of(error)})",
                          remedy=f"see {folder / 'log'}") from None
    documents = [] if target.start["flags"].get("dataset_module") else \
        odd_documents(open_data_of_step(target.run, target.start), report)
    command = branch_command(folder / "branch", target, layout, report["skip"]) if report["odd"] else ""
    return SampleAnswer(report, documents, command)


def branch_command(folder: Path, target: Target, layout: Layout, skip: str) -> str:
    """Write flags, DeepSpeed JSON and model of the run into a folder, and return the command of a branch.

    It trains from the checkpoint of the replay on, with the run's own flags, and leaves these samples out.
    """
    flags = repeated_flags(target.start)
    for name in ("resume_from", "skip_samples"):
        flags.pop(name, None)
    recorded = target.start["flags"].get("skip_samples")
    own: dict[str, Any] = {"skip_samples": ",".join(filter(None, [recorded, skip]))}
    if target.checkpoint is not None:
        flags.pop("init_from", None)
        own = {"resume_from": str(target.checkpoint.absolute()), **own}
    folder.mkdir(parents=True, exist_ok=True)
    files = {"run.yaml": flags, "deepspeed.json": repeated_config(target.start),
             "config.json": target.start["model_config"]}
    for name, values in files.items():
        write_atomically(folder / name, json.dumps(values, indent=1) + "\n")
    words = ["ds-pretrain", "--num_accelerators", str(target.world_size), "--config", str(folder / "run.yaml"),
             "--deepspeed_config", str(folder / "deepspeed.json"), "--model", str(folder / "config.json"),
             *(word for name in OWN_CODE if name in layout.more for word in (f"--{name}", layout.more[name])),
             *(word for name, value in own.items() for word in (f"--{name}", value)),
             "--save", f"{target.run}-without-{target.step}"]
    return shlex.join(words)


def _wrapped_answer(line: str) -> list[str]:
    """Return a line in the columns of a terminal, in which characters of East Asia are two columns wide."""
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    key, colon, value = (text, "", "") if indent else text.partition(":")
    begin = f"{key}:".ljust(len(_KEY)) if colon else indent
    is_wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    return textwrap.wrap(printable(value if colon else text), COLUMNS // 2 if is_wide else COLUMNS,
                         break_on_hyphens=False, initial_indent=begin,
                         subsequent_indent=indent + "  " if indent else _KEY)


def answer_lines(report: dict[str, Any], documents: Sequence[OddDocument]) -> list[str]:
    """Return the lines about the samples of a step."""
    if not report["odd"]:
        line = f"samples:  none of the {len(report['ids'])} samples of step {report['step']} stands out from those " \
               "of the neighbouring steps, by loss or gradient norm; the highest losses are"
        return [line, *_sample_lines(report, report["highest"], documents)]
    number = len(report["odd"])
    unsure = all(odd["certainty"] != "sure" for odd in report["odd"])
    lines = [f"samples:  {'unsure: ' if unsure else ''}{number} of {len(report['ids'])} samples of step "
             f"{report['step']} stand{'s' if number == 1 else ''} out"]
    lines += _sample_lines(report, report["odd"], documents)
    lines += _layer_lines(report)
    lines.append("without:  loss and gradient norm with these samples, and with them left out")
    for after, (whole, without) in enumerate(zip(report["with_all"], report["without_odd"], strict=True)):
        lines.append(f"  step {report['step'] + after}: loss {whole[0]:.4f}, {without[0]:.4f} without; gradient norm "
                     f"{whole[1]:.4g}, {without[1]:.4g} without")
    return lines


def _sample_lines(report: dict[str, Any], samples: Sequence[dict[str, Any]],
                  documents: Sequence[OddDocument]) -> list[str]:
    """Return the lines about samples and their documents. In large steps, the norms of some are not measured."""
    lines = []
    for sample in samples:
        norm = "" if math.isnan(sample["grad_norm"]) else \
            f", gradient norm {format_number(sample['grad_norm'])} (usual {format_number(report['usual_sample_norm'])})"
        lines.append(f"  sample {sample['id']}: loss {sample['loss']:.3f} (usual {report['usual_loss']:.3f}){norm}")
        for document in (each for each in documents if each.sample == sample["id"]):
            lines += _document_lines(document)
    return lines


def _document_lines(document: OddDocument) -> list[str]:
    lines = [f"    document {document.document} of {document.prefix}: {document.document_tokens:,} tokens, "
             f"{document.tokens:,} of them in the sample, from token {document.first_token:,} of the .bin on; loss "
             f"{document.loss:.3f}"]
    where = document.position or ", ".join(document.inputs[:3]) + (", ..." if len(document.inputs) > 3 else "")
    lines += [f"    from {where}"] if where else []
    lines += [f"    {line}" for line in document.odd]
    return [*lines, f"    {document.excerpt!r}"]


def _layer_lines(report: dict[str, Any]) -> list[str]:
    """Return where the gradient of the step is larger than those of the neighbouring steps."""
    def ratios(norms: dict[str, list[float]]) -> list[tuple[str, float]]:
        return [(name, step / usual) for name, (step, usual) in norms.items() if usual > 0]

    layers, tensors = ratios(report["layers"]), ratios(report["tensors"])
    larger = [f"{name} ({ratio:.1f} times)" for name, ratio in sorted(layers, key=lambda row: -row[1]) if ratio >= 1.5]
    if not larger:
        return []
    worst = ", ".join(f"{name} ({ratio:.1f} times)" for name, ratio in sorted(tensors, key=lambda row: -row[1])[:3])
    return [f"layers:   {len(larger)} of {len(layers)} have a larger gradient than in the neighbouring steps, most of "
            f"all {', '.join(larger[:3])}; tensors: {worst}"]


def main() -> int:
    """Run the program and return its exit code. Raises ConfigError."""
    parser = Parser(description="Train the steps before a step of a run again, compare them with what the flight "
                                "recorder wrote, and say what the cause of a bad step is.",
                    epilog="Exit code 0: there is a verdict; 2: bad input, or the step cannot be trained again.")
    add = parser.add_argument
    add("target", metavar="RUN@STEP", type=text, help="run folder (the value of --save) and the step in question")
    add("--output", type=path, metavar="FOLDER", help="folder for the replays (default: RUN/replays/step_STEP)")
    add("--repeats", type=whole_number(1, 100), default=2, metavar="N",
        help="replays of a step that is not reproduced (default: %(default)s)")
    add("--before_rollback", type=whole_number(1, 10**6), metavar="N",
        help="the step as it was before the N-th rollback of the run (default: its last time)")
    add("--json", type=path, metavar="FILE", help="also write the verdict to this file")
    add("--deepspeed_config", type=text, metavar="FILE",
        help="another layout, for example zero3_offload_all_cpu: values are then compared with a tolerance")
    add("--num_accelerators", "--num_gpus", dest="ranks", type=whole_number(1, 100_000), metavar="N",
        help="ranks on this host (default: the hosts and ranks of the run)")
    add("--hostfile", type=path, metavar="FILE", help="hosts for the ranks; required if the run trained on several")
    for name in OWN_CODE:
        add(f"--{name}", type=_own_code, metavar="MODULE:NAME",
            help="the run's own code, if it has any: a record alone never imports code")
    args = parser.parse_args()
    run, step = parse_target(args.target)
    config = None if args.deepspeed_config is None else find_layout(args.deepspeed_config)
    for flag, file in (("--deepspeed_config", config), ("--hostfile", args.hostfile)):
        if file is not None and not file.is_file():
            raise ConfigError(flag, problem=f"there is no file {file}", remedy="name a file")
    if args.hostfile is not None and args.ranks is not None:
        raise ConfigError("--num_accelerators", problem="--hostfile sets the number of ranks",
                          remedy="give one of the two flags")
    if args.json is not None:
        check_file(args.json, "--json")
    target = find_target(run, step, args.before_rollback)
    output = args.output or run / "replays" / f"step_{step}"
    check_folder(output, "--output")
    if args.output is not None and output.is_dir() and any(output.iterdir()) and not (output / VERDICT).is_file():
        raise ConfigError(f"--output {output}", problem="the folder is not empty, and holds no replay",
                          remedy="name a new folder")
    ranks = None if args.ranks == target.world_size and config is None else args.ranks
    layout = Layout(config, ranks, args.hostfile, args.ranks is not None,
                    {name: getattr(args, name) for name in OWN_CODE if getattr(args, name)})

    def train(number: int, order: ReplayOrder) -> Replay:
        folder = output / f"replay_{number}"
        status(f"replay {number}: steps {target.first_step + 1} to {step}, log {folder / 'log'}")
        return train_again(folder, target, layout, order)

    answer = examine(target, train, repeats=args.repeats, is_other_layout=layout.is_other)
    samples = None
    if answer.result.kind == "reproducible":
        status(f"examining the samples of step {step}, log {output / 'samples' / 'log'}")
        try:
            samples = ask_about_samples(target, layout, output / "samples", order_of(target))
        except ConfigError as error:  # the result is known
            answer.notes.append(f"the samples of the step were not examined: {error}")
    values = _record(target, answer, samples)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / VERDICT, values)
    if args.json is not None:
        args.json.write_text(values, encoding="utf-8")
    clear_status()
    print("\n".join([*result_lines(target, answer.result, answer.notes),
                     *(samples.lines() if samples is not None else []), f"written:  {output / VERDICT}"]))
    return 0


def _own_code(word: str) -> str:
    """Argparse type: a module and a name in it."""
    if not re.fullmatch(r"[\w.]+:\w+", text(word)):
        raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected MODULE:NAME, such as my_data:build")
    return word


def _record(target: Target, answer: Answer, samples: SampleAnswer | None) -> str:
    """Return the text of verdict.json."""
    values: dict[str, Any] = {
        "run": str(target.run.absolute()), "step": target.step, "time": time.time(), "start": target.number,
        "checkpoint": None if target.checkpoint is None else str(target.checkpoint.absolute()),
        "first_step": target.first_step + 1, "replays": [str(each.run) for each in answer.replays],
        "compared_steps": len(answer.run.compared) if answer.run else 0,
        "complete_steps": len(answer.run.complete) if answer.run else 0,
        "verdict": answer.result.to_json(), "notes": answer.notes,
        "samples": None if samples is None else samples.to_json()}
    return json.dumps(values, indent=1) + "\n"


def result_lines(target: Target, result: Result, notes: Sequence[str]) -> list[str]:
    """Return the lines about a result: what it is, the observations, and what to do."""
    lines = _wrapped(f"{target.run}@{target.step}: {_headline(result)}", "", "  ")
    if result.certainty != SURE:
        for reason in result.reasons:
            lines += _wrapped(reason, "unsure:   ")
        if result.also:
            others = [CAUSES[kind].text for kind in result.also[:4]]
            lines += _wrapped(f"it may also be that {'; or that '.join(others)}"
                              if len(result.also) <= 4 else "nothing is known about the cause", "          ")
    for each in result.evidence:
        lines += _wrapped(each, "evidence: ")
    lines += _wrapped(result.remedy, "remedy:   ")
    for note in notes:
        lines += _wrapped(note, "note:     ")
    return lines


def _headline(result: Result) -> str:
    where = [f"from step {result.step} on"] if result.step is not None else []
    if result.ranks:
        where.append(named("rank", result.ranks) + (f" on {listed(result.hosts)}" if result.hosts else ""))
    if result.pipeline_stage is not None:
        where.append(f"pipeline stage {result.pipeline_stage}")
    if result.operator is not None:
        where.append(f"operator {result.operator}")
    elif result.layer is not None:
        where.append(f"layer {result.layer}")
    again = ", and it happens again in the replays" if result.now and result.kind != "nondeterministic" else ""
    begin = "" if result.certainty == SURE else "probably, "
    return begin + result.text + (f" ({'; '.join(where)})" if where else "") + again


def _wrapped(line: str, begin: str, indent: str | None = None) -> list[str]:
    return textwrap.wrap(printable(line), COLUMNS, initial_indent=begin, break_on_hyphens=False,
                         subsequent_indent=" " * len(begin) if indent is None else indent)
