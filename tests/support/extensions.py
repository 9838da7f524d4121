"""Find what the tests of extensions bring for tests of everything: tests/extensions/NAME/MODULE.py, if it exists."""

import importlib
from collections.abc import Iterator
from types import ModuleType

from tests.support.launch import ROOT


def modules_of_extensions(module: str) -> Iterator[ModuleType]:
    """Import the modules of this name.

    page_commands: NOT_RUN_BECAUSE and SMALLER, as in tests/support/pages.py. wrong_inputs: see tests/wrong_inputs.
    foreign_files: FILES and commands, as in tests/foreign_files/commands.py; perhaps PICKLES and write_files(world).
    """
    for path in sorted(ROOT.glob(f"tests/extensions/*/{module}.py")):
        yield importlib.import_module(f"tests.extensions.{path.parent.name}.{module}")
