"""A rank of test_kernel_choice.py: writes the choice of this rank to choice.RANK.json. Only rank 0 has a compiler."""

import json
import os
from pathlib import Path

from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.chosen_operators import choose_kernels
from pretrain.model.kernels.cpu.choice import as_json, chosen

if __name__ == "__main__":
    world = running_environment()
    if world.rank:
        os.environ["CC"] = "/nowhere/cc"
    init_process_group(world)
    choose_kernels(None)
    choice = chosen()
    assert choice is not None
    Path(f"choice.{world.rank}.json").write_text(json.dumps(as_json(choice)))
