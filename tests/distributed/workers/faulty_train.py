"""Program `faulty_train.py FAULTS.json FLAGS`: one rank of pretrain/train.py with faults.

Keys of FAULTS.json, all optional:
    factors      {first sample of a global batch: factor of its loss, such as "nan"}
    rank         the only rank that has these factors (default: all ranks)
    kill_in      function "module:name", whose first call kills the process
    set          {"module:name": value of this variable}
    flip_bit_at  step before which the last rank flips a bit of a weight's copy. At ZeRO-0 nothing overwrites the copy:
                 each rank updates its own
    call         ["module:function", argument]: called with the engine and the argument before the first step
    signal_at    [number of a signal, step before which the last rank sends it to itself]
    pause_s      seconds without work before each step, of a run that trains until something happens
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pretrain import step_loop
from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process import end_process
from pretrain.train import main
from tests.distributed.workers.worker import flip_bit

LAST_RANK = int(os.environ["WORLD_SIZE"]) - 1


def set_variable(path: str, value: Any) -> None:
    module, _, name = path.partition(":")
    setattr(importlib.import_module(module), name, value)


def spoil(factors: dict[int, float], rank: int | None) -> None:
    """Multiply the loss weights of the given global batches of the training data."""
    step = Loader.step

    def spoiled(self: Loader, consumed_samples: int) -> list[MicroBatch]:
        micro_batches = step(self, consumed_samples)
        if self.dataset.name == "train" and consumed_samples in factors and rank in (None, int(os.environ["RANK"])):
            for _, (_, weights_BT) in micro_batches:
                weights_BT.mul_(factors[consumed_samples])
        return micro_batches

    Loader.step = spoiled  # type: ignore[method-assign]


def disturb_steps(flip_bit_at: int | None, signal_at: tuple[int, int] | None, call: tuple[str, Any] | None,
                  pause_s: float) -> None:
    """Flip a bit, send a signal or wait before a step; or call a function before the first step."""
    train_batch = step_loop.train_batch

    def disturbed(engine: Any, micro_batches: list[MicroBatch]) -> Any:
        if engine.global_steps + 1 == flip_bit_at:
            flip_bit(engine, "mlp.up.weight", bit=20)
        if signal_at and engine.global_steps + 1 == signal_at[1] and int(os.environ["RANK"]) == LAST_RANK:
            os.kill(os.getpid(), signal_at[0])
        if call and engine.global_steps == 0:
            module, _, name = call[0].partition(":")
            getattr(importlib.import_module(module), name)(engine, call[1])
        time.sleep(pause_s)
        return train_batch(engine, micro_batches)

    step_loop.train_batch = disturbed


if __name__ == "__main__":
    faults = json.loads(Path(sys.argv[1]).read_text())
    spoil({int(first): float(factor) for first, factor in faults.get("factors", {}).items()}, faults.get("rank"))
    disturb_steps(faults.get("flip_bit_at"), faults.get("signal_at"), faults.get("call"), faults.get("pause_s", 0.0))
    for path, value in faults.get("set", {}).items():
        set_variable(path, value)
    if faults.get("kill_in"):
        set_variable(faults["kill_in"], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    end_process(main(sys.argv[2:]))
