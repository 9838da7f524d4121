"""Tests that export optimizer states need the extension that does."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("pretrain.extensions.universal") else ["test_distributed_weights.py"]
