#!/usr/bin/env python3
"""The same as `ds-pretrain tokenizer`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.argv.insert(1, "tokenizer")

from pretrain.__main__ import program  # noqa: E402

if __name__ == "__main__":
    program()
