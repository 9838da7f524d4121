"""Tests on a CUDA GPU: `pytest -m gpu`. Without one they are skipped."""

import pytest

from pretrain.distributed.device import wants_cpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs a CUDA GPU and a CUDA build of torch; DS_ACCELERATOR=cpu must not be set"
    for item in items:
        if "/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if wants_cpu():
                item.add_marker(pytest.mark.skip(reason=reason))
