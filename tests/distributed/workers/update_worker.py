"""One rank that trains with what extensions replace in the engine, or with DeepSpeed's own functions.

A case: as in `worker.py` with "job": "train", and "plain", words: names of extensions that replace nothing; "late_skip"
if DeepSpeed decides about skipped updates; "all" for both, and for DeepSpeed's reductions on one rank.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.active_extensions import extensions
from pretrain.engine.steps import grad_norm, open_loader, train_batch
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, state_hash
from tests.support.cases_loop import each_case

_FILES = tuple(f"deepspeed/runtime/{name}" for name in ("zero/", "utils", "engine", "bf16_optimizer"))
BAD_STEP = 2  # in this step gradients are NaN or infinite


class CountElements(TorchDispatchMode):
    """Counts the elements that operators get from DeepSpeed's engine and ZeRO optimizers, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while "torch" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        if any(name in frame.f_code.co_filename for name in _FILES):
            self.elements[function.overloadpacket.__name__] += sum(x.numel() for x in args if torch.is_tensor(x))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def functions_of_deepspeed(plain: str) -> Iterator[None]:
    """Keep functions of DeepSpeed: see above."""
    words = plain.split()
    used = [each for each in extensions() if each.name not in words and plain != "all"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("pretrain.active_extensions.extensions", lambda: used))
        if "late_skip" in words or plain == "all":
            stack.enter_context(patch("pretrain.engine.build.late_skip", lambda engine: None))
        if plain == "all":
            stack.enter_context(patch("pretrain.engine.build.skip_reduction_on_one_rank", lambda engine: None))
        yield


def train(case: Case) -> dict[str, Any]:
    plan = plan_of(case)
    with functions_of_deepspeed(case["plain"]):
        engine = engine_of(plan)
    loader, losses, norms = open_loader(engine, plan, "train"), [], []
    for step in range(plan.train_steps):
        batches = loader.step(plan.length.samples_after(step))
        if step == BAD_STEP:
            inputs, (labels, weights) = batches[0]
            batches[0] = (inputs, (labels, weights * float("inf")))
        with CountElements() as counter:
            losses.append(float(train_batch(engine, batches)))
        norms.append(grad_norm(engine))
    loader.close()
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    result = {"losses": losses, "norms": norms, "skipped": engine.skipped_steps, "state": state_hash(engine),
              "passes": {name: count / parameters for name, count in counter.elements.items()},
              "optimizer": type(engine.optimizer).__name__}
    end(engine)
    return result


if __name__ == "__main__":
    each_case(train)
