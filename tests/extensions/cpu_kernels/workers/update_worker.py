"""One rank of test_update_passes.py: a case of tests/distributed/workers/update_worker.py.

Unless its functions are DeepSpeed's, C functions pass over the gradients, whatever is faster here, and Adam updates in
several pieces.
"""

from typing import Any
from unittest.mock import patch

from tests.distributed.workers.update_worker import train
from tests.distributed.workers.worker import Case
from tests.support.cases_loop import each_case

_PASSES = "pretrain.extensions.cpu_kernels.gradient_passes"


def train_in_c(case: Case) -> dict[str, Any]:
    if case["plain"]:
        return train(case)
    with patch(f"{_PASSES}.in_c", lambda _, x, *dtypes: x.dtype in dtypes), patch(f"{_PASSES}.PIECE_ELEMENTS", 1280):
        return train(case)


if __name__ == "__main__":
    each_case(train_in_c)
