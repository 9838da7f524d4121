#!/usr/bin/env python3
"""Compare the speed and memory of this project with other training programs and with the limits of the machine.

    python tools/bench.py                                            # one training step on this machine
    python tools/bench.py --write pretrain/pages/measurements        # writes the table into this folder, as CSV
    python tools/bench.py --preset h200-llama-1b --seq_length 8192 --json
    python tools/bench.py --what step,profile                        # and where the time of a step goes

pretrain/pages/measurements.md has the results. Flags of pretrain/train.py are passed to this project only, not to the
other programs. Exit codes: 0 everything was measured; 1 a measurement failed, one line for each; 2 bad input.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # find both packages from any working directory, also without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.cli import Parser, run_main
from tools.benchmarks.report import as_json, check_folder, csv_file, csv_text, gpu_names, heading, markdown
from tools.benchmarks.settings import add_flags, validate_flags


def main() -> int:
    """Measure, print the tables or JSON, and with --write write CSV files. Return the exit code. Raises ConfigError."""
    parser = Parser(description="Compare the speed and memory of this project with other training "
                                "programs and with the limits of the machine.")
    add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--write", type=Path, metavar="FOLDER",
                        help="write each table into FOLDER/PRESET_SECTION.csv")
    flags, train_flags = parser.parse_known_args()
    settings = validate_flags(flags, train_flags, gpus=len(gpu_names()))
    if flags.write is not None:
        check_folder(flags.write)
    from tools.benchmarks.sections import run_sections  # imports torch, which takes seconds

    head = heading(settings, _without_write(sys.argv[1:]))
    sections = []
    for section in run_sections(settings, lambda text: print(text, file=sys.stderr, flush=True)):
        sections.append(section)
        if not flags.json:
            print(f"{markdown(head, section)}\n", flush=True)
        if flags.write is not None and section.rows:  # what could not be measured keeps its older table
            csv_file(flags.write, head, section).write_text(csv_text(head, section), encoding="utf-8")
    if flags.json:
        print(as_json(head, sections))
    return 1 if any(section.failures for section in sections) else 0


def _without_write(words: list[str]) -> list[str]:
    """Remove --write FOLDER from the command line: a reader who repeats the measurement does not need it."""
    position = next((index for index, word in enumerate(words) if word == "--write"), None)
    words = words if position is None else words[:position] + words[position + 2 :]
    return [word for word in words if not word.startswith("--write=")]



if __name__ == "__main__":
    run_main(main)
