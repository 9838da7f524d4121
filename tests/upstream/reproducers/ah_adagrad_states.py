"""DeepSpeed: a bf16 pipeline at ZeRO stage 0 with torch's Adagrad cannot be saved: KeyError.

BF16_Optimizer (runtime/bf16_optimizer.py) gives the optimizer fp32 tensors instead of the parameters. The states that
Adagrad has made for the parameters at its construction remain, and `state_dict` does not find their parameters.

python ah_adagrad_states.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
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
config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
with tempfile.TemporaryDirectory() as folder:
    try:  # some versions of torch need the states already in the first step
        engine.train_batch(iter(lambda: (torch.ones(2, 8).bfloat16(), torch.zeros(2, 8).bfloat16()), None))
        engine.save_checkpoint(folder, tag="saved")
    except KeyError as error:
        print(f"save_checkpoint: expected success, found KeyError: {error}")
        sys.exit(1)
print("save_checkpoint: expected success, found success")
