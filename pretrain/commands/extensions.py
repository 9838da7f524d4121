"""List the extensions of this environment: what they are for, their flags and subcommands, where they come from.

    ds-pretrain extensions
    ds-pretrain extensions --extension my_module:EXTENSION
"""

import importlib.util

from pretrain.active_extensions import activate, extensions
from pretrain.cli import Parser
from pretrain.extension import Extension


def main() -> None:
    """Print the list."""
    parser = Parser(description="List the extensions of this environment: those of this package, and those of other "
                                "packages, which name them as entry points of ds_pretrain.extensions.")
    parser.add_argument("--extension", nargs="+", default=[], metavar="my_module:EXTENSION",
                        help="list these extensions of your own code, too (default: none)")
    for spec in parser.parse_args().extension:
        activate(spec)
    print("\n\n".join(_description(each) for each in extensions()))


def _description(extension: Extension) -> str:
    """Return the lines about an extension."""
    missing = [package for package in extension.requires if importlib.util.find_spec(package) is None]
    lines = [f"{extension.name} ({extension.origin}): {extension.summary}"]
    rows = {"flags": " ".join(f"--{name}" for name in extension.flags), "commands": " ".join(extension.commands),
            "adds to": " ".join(extension.extends),
            "reads": " ".join(f"{scheme}://" for scheme in {**extension.token_files, **extension.text_inputs}),
            "missing packages": " ".join(missing)}
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in rows.items() if value)])
