#!/usr/bin/env python3
"""The same as `ds-pretrain replay`."""

import sys
from pathlib import Path

if __name__ == "__main__":  # find the package from any working directory, also without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pretrain.__main__ import program

    program("replay")
