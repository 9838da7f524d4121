#!/usr/bin/env python3
"""Measure this project beside what people would use instead, and beside the machine's limit.

    python tools/bench.py                                            # a training step, on what is there
    python tools/bench.py --what all --write tools/performance.md    # everything, into the tables of that page
    python tools/bench.py --preset h200-llama-1b --seq_length 8192 --json
    python tools/bench.py --explain                                  # what makes it fast, and when

Further flags of pretrain/train.py go to this project's contender. Exit codes: 0 all was measured; 1 a contender failed,
a line each; 2 bad input.
"""

import os
import sys
from pathlib import Path

from rich.console import Console

from pretrain.bench.levers import explain
from pretrain.bench.report import (
    as_json,
    busy,
    check_markers,
    gpu_names,
    heading,
    markdown,
    show,
    write_between_markers,
)
from pretrain.bench.run_sections import measure
from pretrain.bench.settings import add_flags, settings_of
from pretrain.cli import Parser, run_main


def main() -> int:
    """The exit code. Raises ConfigError."""
    parser = Parser(prog="tools/bench.py", description="This project beside others and beside the machine's limit.")
    add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the preset's two markers")
    parser.add_argument("--explain", action="store_true", help="what makes training fast here: each lever, and when")
    own, extra = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    if own.explain:
        console.print(explain())
        return 0
    gpus = gpu_names()
    settings = settings_of(own, extra, gpus=len(gpus))
    if own.write is not None:
        check_markers(own.write, settings.preset_name)
    head = heading(settings, _without_write(sys.argv[1:]))
    warning = busy(head, settings)
    devices = len(gpus) if settings.device.kind == "cuda" else len(os.sched_getaffinity(0))
    sections = []
    if not own.json:
        console.print(f"{head['device']}, {head['date']}: {head['shape']}. {warning}\n")
    for section in measure(settings, lambda text: print(text, file=sys.stderr, flush=True), devices=devices):
        sections.append(section)
        if not own.json:
            show(section, console)
    if own.json:
        print(as_json(head, sections))
    if own.write is not None:
        write_between_markers(own.write, settings.preset_name, markdown(head, sections, warning))
    return 1 if any(section.failures for section in sections) else 0


def _without_write(words: list[str]) -> list[str]:
    """The command as a reader would give it again: where its figures were written to is no part of it."""
    at = next((index for index, word in enumerate(words) if word == "--write"), None)
    words = words if at is None else words[:at] + words[at + 2 :]
    return [word for word in words if not word.startswith("--write=")]


if __name__ == "__main__":
    run_main(main)
