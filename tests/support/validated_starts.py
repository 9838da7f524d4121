"""pytest plugin: the tests of tests/gpu only validate their command lines, as for a machine with GPUs.

`pytest -p tests.support.validated_starts tests/gpu/test_runs.py`
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed import device
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from tests.gpu import runs

_VALID = list[Path]()  # run folders
_GPU = Device("cuda", fp16=True, bf16=True, memory_bytes=80 * 2**30)


def _validate(folder: Path, config: Path | str, flags: dict[str, Any], *, ranks: int = 1,
              program: str = "pretrain/train.py", **environ: str) -> runs.Run:
    """Raise ConfigError if a run would be rejected. Returns a run without output."""
    args = parse_arguments(runs.words_of(folder, config, flags))
    if args.resume == "required":  # of the run that this one stands for
        args = replace(args, resume="auto")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        check_start(args, world_size=ranks, device=_GPU)
    _VALID.append(folder)
    return runs.Run(folder, "")


# before tests/gpu/conftest.py and the tests are imported
device.wants_cpu = lambda: False
device.compiles_cuda = lambda: True
torch.cuda.device_count = lambda: 8
runs.start = _validate
runs.kernels_compute = lambda: True


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Let a test pass whose command lines are valid: its runs have no results."""
    number = len(_VALID)
    with contextlib.suppress(Exception):
        try:
            yield
        except ConfigError as error:
            pytest.fail(f"the command line is rejected: {error}", pytrace=False)
    assert len(_VALID) > number, "the test starts no run"
    return True
