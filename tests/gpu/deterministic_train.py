"""pretrain/train.py with torch's deterministic kernels, where a kernel has a variant without atomic additions."""

import os
import runpy
import warnings

from tests.support.launch import ROOT

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch

warnings.filterwarnings("ignore", message=".*deterministic.*")
torch.use_deterministic_algorithms(True, warn_only=True)
runpy.run_path(str(ROOT / "pretrain" / "train.py"), run_name="__main__")
