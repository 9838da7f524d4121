"""DeepSpeed: checkpoints of a bf16 pipeline at ZeRO stage 0 cannot be loaded: KeyError: 0.

`_load_checkpoint` (runtime/engine.py) passes the wrong file to BF16_Optimizer at stage 0.

python u_bf16_pipeline_resume.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

deepspeed.init_distributed()
module = PipelineModule([LayerSpec(torch.nn.Linear, 8, 8) for _ in range(2)], num_stages=1, loss_fn=torch.nn.MSELoss())
config = {"train_batch_size": 2, "bf16": {"enabled": True}}
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.Adam(module.parameters()), config=config)
engine.train_batch(iter(lambda: (torch.ones(2, 8).bfloat16(), torch.zeros(2, 8).bfloat16()), None))
with tempfile.TemporaryDirectory() as folder:
    engine.save_checkpoint(folder, tag="saved")
    try:
        loaded, _ = engine.load_checkpoint(folder, tag="saved")
    except KeyError as error:
        print(f"load_checkpoint: expected success, found KeyError: {error}")
        sys.exit(1)
print(f"load_checkpoint: expected success, found {loaded}")
sys.exit(0 if loaded else 1)
