"""Train the steps before a step of a run again, compare them with the flight record, and say what the cause is.

    ds-pretrain replay runs/gpt2@41203
    ds-pretrain replay runs/gpt2@41203 --deepspeed_config zero3_offload_all_cpu --num_accelerators 1

The run folder is only read; all files are in --output. Exit codes: 0 there is a verdict; 2 bad input.
"""

import argparse
import json
import re
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import Parser, path, text, whole_number
from pretrain.errors import ConfigError, listed, named, printable, shorten
from pretrain.extensions.replay.examine_step import Answer, Replay, order_of, question
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.launch import Layout, train_again
from pretrain.extensions.replay.result import CAUSES, SURE, Verdict
from pretrain.extensions.replay.sample_answer import COLUMNS, SampleAnswer, ask_about_samples
from pretrain.extensions.replay.target import Target, find_target, parse_target
from pretrain.monitor.repeatable import OWN_CODE
from pretrain.paths import check_file, check_folder
from pretrain.shipped import find_layout
from pretrain.terminal import clear_status, status

VERDICT = "verdict.json"  # in the output folder


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

    answer = question(target, train, repeats=args.repeats, is_other_layout=layout.is_other)
    samples = None
    if answer.verdict.kind == "reproducible":
        status(f"examining the samples of step {step}, log {output / 'samples' / 'log'}")
        try:
            samples = ask_about_samples(target, layout, output / "samples", order_of(target))
        except ConfigError as error:  # the verdict is known
            answer.notes.append(f"the samples of the step were not examined: {error}")
    values = _record(target, answer, samples)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / VERDICT, values)
    if args.json is not None:
        args.json.write_text(values, encoding="utf-8")
    clear_status()
    print("\n".join([*verdict_lines(target, answer.verdict, answer.notes),
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
        "verdict": answer.verdict.to_json(), "notes": answer.notes,
        "samples": None if samples is None else samples.to_json()}
    return json.dumps(values, indent=1) + "\n"


def verdict_lines(target: Target, verdict: Verdict, notes: Sequence[str]) -> list[str]:
    """Return the lines about a verdict: what it is, the evidence, and what to do."""
    lines = _wrapped(f"{target.run}@{target.step}: {_headline(verdict)}", "", "  ")
    if verdict.certainty != SURE:
        for reason in verdict.reasons:
            lines += _wrapped(reason, "unsure:   ")
        if verdict.also:
            others = [CAUSES[kind].text for kind in verdict.also[:4]]
            lines += _wrapped(f"it may also be that {'; or that '.join(others)}"
                              if len(verdict.also) <= 4 else "nothing is known about the cause", "          ")
    for each in verdict.evidence:
        lines += _wrapped(each, "evidence: ")
    lines += _wrapped(verdict.remedy, "remedy:   ")
    for note in notes:
        lines += _wrapped(note, "note:     ")
    return lines


def _headline(verdict: Verdict) -> str:
    where = [f"from step {verdict.step} on"] if verdict.step is not None else []
    if verdict.ranks:
        where.append(named("rank", verdict.ranks) + (f" on {listed(verdict.hosts)}" if verdict.hosts else ""))
    if verdict.pipeline_stage is not None:
        where.append(f"pipeline stage {verdict.pipeline_stage}")
    if verdict.operator is not None:
        where.append(f"operator {verdict.operator}")
    elif verdict.layer is not None:
        where.append(f"layer {verdict.layer}")
    again = ", and it happens again in the replays" if verdict.now and verdict.kind != "nondeterministic" else ""
    begin = "" if verdict.certainty == SURE else "probably, "
    return begin + verdict.text + (f" ({'; '.join(where)})" if where else "") + again


def _wrapped(line: str, begin: str, indent: str | None = None) -> list[str]:
    return textwrap.wrap(printable(line), COLUMNS, initial_indent=begin, break_on_hyphens=False,
                         subsequent_indent=" " * len(begin) if indent is None else indent)
