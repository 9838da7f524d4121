"""DeepSpeed: the precision of Muon's orthogonalization on CPUs depends on the CPU.

`ns_compute_dtype` (runtime/zero/muon/original_muon.py) returns fp16 on CPUs with fp16 instructions, and fp32 on others:
the same run gives other losses on another CPU.

python t_muon_dtype.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
from unittest import mock

os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import original_muon

torch.manual_seed(0)
matrix, results = torch.randn(16, 16), []
for fp16 in (False, True):
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self, fp16=fp16: fp16):
        results.append(original_muon.muon_update(matrix.clone(), torch.zeros_like(matrix)).float())
difference = float((results[0] - results[1]).abs().max())
print(f"largest difference between updates on CPUs with and without fp16: expected 0, found {difference:.2g}")
sys.exit(0 if difference == 0 else 1)
