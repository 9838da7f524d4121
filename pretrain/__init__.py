"""ds-pretrain: pretraining of GPT-style models, run by the DeepSpeed engine."""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036 (a checkout, or `pip --ignore-requires-python`; later imports would fail)
    print(f"ds-pretrain: error: this is Python {sys.version_info[0]}.{sys.version_info[1]}; Python 3.10 to 3.13 is "
          "needed. Remedy: create the environment with a newer one, such as `python3.12 -m venv`", file=sys.stderr)
    sys.exit(2)
