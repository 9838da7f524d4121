"""Print the files that are shipped with the package: DeepSpeed JSONs, and templates of scripts.

    ds-pretrain config zero3_bf16 > mine.json
    ds-pretrain template slurm > pretrain.sbatch
"""

import sys
from pathlib import Path

from pretrain.cli import Parser, text
from pretrain.shipped import TEMPLATES, find_template, layout_names, shipped_folder, shipped_layout


def config_main() -> None:
    """List the DeepSpeed JSONs, or print one."""
    args = _parser("Print a DeepSpeed JSON of this package, to change it. --deepspeed_config NAME uses it as it is.",
                   "a layout such as zero3_bf16").parse_args()
    if args.name is None:
        print("\n".join(layout_names()))
    else:
        _print_file(shipped_layout(args.name))


def template_main() -> None:
    """List the templates, or print one."""
    args = _parser("Print a file to start from: a run's YAML, a hostfile, a script for SLURM ...",
                   f"one of {', '.join(TEMPLATES)}").parse_args()
    if args.name is None:
        for name, file in TEMPLATES.items():
            print(f"{name:<17}{_title(shipped_folder('launch') / file)}")
    else:
        _print_file(find_template(args.name))


def _parser(description: str, names: str) -> Parser:
    parser = Parser(description=description)
    parser.add_argument("name", metavar="NAME", nargs="?", type=text, help=f"{names}; without a name: print a list")
    return parser


def _print_file(path: Path) -> None:
    sys.stdout.write(path.read_text(encoding="utf-8"))


def _title(path: Path) -> str:
    """Return the first comment of a file, up to its first full stop or colon."""
    comments = (line.lstrip("# ").rstrip() for line in path.read_text(encoding="utf-8").splitlines()
                if line.startswith("# "))
    return next(comments, "").partition(". ")[0].partition(": ")[0].rstrip(".")
