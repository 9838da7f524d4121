"""Python imports this module at its start: it installs the sandbox of the process that started it."""

import os
import sys

if "FOREIGN_SANDBOX" in os.environ:
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))
    from tests.foreign_files.sandbox import install

    sys.path.pop()
    install()
