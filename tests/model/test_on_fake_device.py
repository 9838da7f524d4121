"""The model on a device other than the CPU: no tensor on the wrong device, and no value that the host reads."""

import subprocess
import sys

import pytest
import torch
from torch.utils import backend_registration

from pretrain.distributed.process import ROOT
from tests.model.on_fake_device import PRESETS


@pytest.mark.skipif(not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
                    reason="this torch has no devices that Python implements")
def test_families_run_on_another_device_without_reading_values():
    """The counted operators of a block are those of the measurements."""
    command = [sys.executable, "-m", "tests.model.on_fake_device"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.partition(",")[0] in PRESETS]  # not DeepSpeed's log
    assert len(rows) == len(PRESETS)
    if torch.__version__.startswith("2.13."):
        assert "\n".join(rows) in (ROOT / "pretrain/pages/measurements/gpu_operators.csv").read_text(encoding="utf-8")
