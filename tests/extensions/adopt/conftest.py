"""Tests that export optimizer states need the extension that does."""

from importlib.util import find_spec

_NEED_IT = ["test_exports.py", "test_universal_runs.py", "test_adopted_runs.py"]
collect_ignore = [] if find_spec("pretrain.extensions.universal") else _NEED_IT
