"""Load checkpoints of bf16 pipelines without ZeRO, which DeepSpeed cannot read back.

Guarded by tests/distributed/test_upstream.py, test_bf16_stage_0_pipeline_checkpoint_can_be_loaded.
"""

from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


def load_checkpoint(engine: DeepSpeedEngine, folder: Path, tag: str) -> dict[str, Any]:
    """Load with `engine.load_checkpoint` and return the client state. RuntimeError if nothing is loaded.

    DeepSpeed 0.19.8 (runtime/engine.py, _load_checkpoint) passes the wrong file to BF16_Optimizer at ZeRO stage 0. The
    load fails with KeyError: 0. In this case a second call loads the optimizer.
    """
    bf16_at_stage_0 = isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization()
    path, client_state = engine.load_checkpoint(str(folder), tag=tag, load_optimizer_states=not bf16_at_stage_0)
    if path is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {folder / tag}")
    if bf16_at_stage_0 and not engine._load_zero_checkpoint(str(folder), tag):
        raise RuntimeError(f"DeepSpeed found no optimizer files in {folder / tag}")
    return client_state
