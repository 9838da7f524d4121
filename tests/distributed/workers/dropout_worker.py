"""One rank of tests/distributed/test_sequence_dropout.py: the dropout masks of a sequence-parallel engine."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from pretrain.engine.steps import open_loader, train_batch
from pretrain.model.kernels import torch_attention
from pretrain.model.kernels.torch_attention import torch_causal_attention
from tests.distributed.workers.worker import Case, end, engine_of, plan_of
from tests.support.cases_loop import each_case


def masks(case: Case) -> list[dict[str, Any]]:
    """Return, for each rank, the masks of one step: of hidden states [n, B, t, D], of attention [n, B, H, T, T].

    A mask is True where an element is dropped. Attention shows its probabilities if the values are the unit matrix.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    hidden: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []

    def keep(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        hidden.append((output == 0) & (inputs[0] != 0))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
        state = torch.get_rng_state()
        unit = torch.eye(q.shape[2]).expand(*q.shape[:3], -1)
        scores.append((torch_causal_attention(q, k, unit, **settings) == 0).tril())
        torch.set_rng_state(state)
        return torch_causal_attention(q, k, v, **settings)

    for module in engine.module.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.register_forward_hook(keep)
    loader = open_loader(engine, plan, "train")
    with patch.object(torch_attention, "torch_causal_attention", attend):
        train_batch(engine, loader.step(0))
    loader.close()
    end(engine)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"hidden": torch.stack(hidden).int().tolist(),
                                   "attention": torch.stack(scores).int().tolist()})
    return found


if __name__ == "__main__":
    each_case(masks)
