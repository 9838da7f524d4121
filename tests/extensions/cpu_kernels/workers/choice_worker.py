"""A rank of test_choice_in_runs.py: writes the choice of this rank to choice.RANK.json. Only rank 0 has a compiler."""

import json
import os
from pathlib import Path

from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.extensions.cpu_kernels.choice import as_json, choose, chosen

if __name__ == "__main__":
    world = running_environment()
    if world.rank:
        os.environ["CC"] = "/nowhere/cc"
    init_process_group(world)
    choose(None)
    choice = chosen()
    assert choice is not None
    Path(f"choice.{world.rank}.json").write_text(json.dumps(as_json(choice)))
