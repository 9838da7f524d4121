"""One rank of the tests of compiled blocks and of other products: train, and count graphs and kept weights."""

import functools
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from pretrain.engine import build
from pretrain.engine.steps import eval_batch, open_loader
from pretrain.model.layer_specs import compile_blocks
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, resume, steps
from tests.support.cases_loop import each_case


def train(case: Case) -> dict[str, Any]:
    """Train and evaluate. "backend" replaces the compiler of --compile_blocks, and counts the graphs."""
    plan = plan_of(case)
    counter = CompileCounterWithBackend(case.get("backend", "aot_eager"))
    build.compile_blocks = functools.partial(compile_blocks, backend=counter)
    torch._dynamo.reset()
    counters.clear()
    engine = engine_of(plan)
    kept = _KeptWeights(engine.module)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        rows = steps(engine, plan, 0, plan.train_steps)
    loader = open_loader(engine, plan, "train")
    evaluated = float(eval_batch(engine, loader.step(0)))
    loader.close()
    end(engine)
    return {**rows, "eval": evaluated, "graphs": counter.frame_count, "breaks": len(counters["graph_break"]),
            "saved_weights": kept.saved, "largest_kept_weight": kept.largest}


class _KeptWeights:
    """Counts the saved weights of ZeRO-3, and finds the largest that keeps its memory after DeepSpeed has freed it.

    DeepSpeed frees the memory of a parameter. A view of it, such as the transpose in a linear layer, keeps its memory.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters, self.saved, self.largest = list(module.parameters()), 0, 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = {parameter.untyped_storage().data_ptr() for parameter in self.parameters
                    if hasattr(parameter, "ds_shape") and parameter.numel()}
        if tensor.untyped_storage().data_ptr() in gathered:
            self.saved += 1
            if not isinstance(tensor, torch.nn.Parameter):
                self.largest = max(self.largest, tensor.numel())
        return tensor


if __name__ == "__main__":
    each_case(lambda case: {"train": train, "resume": resume}[case["job"]](case))
