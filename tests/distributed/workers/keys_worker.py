"""One rank of tests/distributed/test_accepted_keys.py: two steps, without the minute that inductor needs to compile."""

import functools
from typing import Any
from unittest.mock import patch

import torch

from pretrain.engine import build
from pretrain.model.layer_specs import compile_blocks
from tests.distributed.workers import worker
from tests.support.cases_loop import each_case


def two_steps(case: dict[str, Any]) -> dict[str, Any]:
    """Train two steps. "compile" in the JSON traces the blocks, and does not compile them."""
    torch._dynamo.reset()  # it compiles the forward function of a class for at most 8 models of a process
    with patch.object(build, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager")):
        return worker.two_steps(case)


if __name__ == "__main__":
    each_case(two_steps)
