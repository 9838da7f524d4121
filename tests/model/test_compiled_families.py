"""A block of each family is one graph for torch's compiler, forward and backward: it has no graph breaks."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from pretrain.model.config import load_model_config
from pretrain.model.families import FAMILIES
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module, compile_blocks
from pretrain.model.layers.block import Block
from tests.support.model_shapes import SHAPES, write_config
from tests.support.tensors import relative_error

# by family; --compile_blocks is rejected for models with experts, whose numbers of tokens differ between steps
NAMES = {str(values["model_type"]): name for name, values in reversed(SHAPES.items())
         if not {"num_experts", "num_local_experts"} & values.keys()}


def counting(graphs: Counter[str], name: str) -> Callable[..., Any]:
    """Return a compiler that counts its graphs, and runs them as they are."""
    def compile_graph(graph: Any, inputs: Any) -> Any:
        graphs[name] += 1
        return make_boxed_func(graph)

    return compile_graph


@pytest.mark.parametrize("family", NAMES)
def test_a_block_is_one_graph_forward_and_one_backward(family: str, tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, SHAPES[NAMES[family]]))
    module = as_module(config)
    initialize_parameters(module, config, seed=0)
    block = next(each for each in module.modules() if isinstance(each, Block))
    graphs: Counter[str] = Counter()
    torch._dynamo.reset()
    counters.clear()
    results = []
    for is_compiled in (False, True):
        if is_compiled:
            backend = aot_autograd(fw_compiler=counting(graphs, "forward"), bw_compiler=counting(graphs, "backward"))
            compile_blocks(module, seq_length=16, device=torch.device("cpu"), backend=backend)
        torch.manual_seed(0)
        x_BTD = torch.randn(2, 16, config.hidden_size, requires_grad=True)
        output = block(x_BTD)
        output.square().sum().backward()
        results.append((output.detach(), x_BTD.grad))
    assert graphs == {"forward": 1, "backward": 1}
    assert not counters["graph_break"]
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-5


def test_the_families_are_all_without_experts() -> None:
    with_experts = {name for name in FAMILIES if "moe" in name or name == "mixtral"}
    assert NAMES.keys() == FAMILIES.keys() - with_experts
