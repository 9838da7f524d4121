"""Our copies of the formulas of DeepSpeed's estimators, compared with DeepSpeed's own functions."""

from itertools import product

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from pretrain.config.layout import Layout
from pretrain.extensions.planner.deepspeed_formulas import deepspeed_estimate, largest_layer_parameters
from pretrain.model.config import model_config_from
from pretrain.model.layer_specs import as_module
from tests.support.model_shapes import SHAPES

PARAMETERS = (10**9, 1_234_567_891)  # no number of GPUs below divides the second one, so that rounding is tested


@pytest.mark.parametrize(("zero_stage", "offload_optimizer", "offload_param"), [
    (2, "none", "none"), (2, "cpu", "none"), (3, "none", "none"), (3, "cpu", "none"), (3, "cpu", "cpu")])
def test_formulas_equal_those_of_deepspeed(zero_stage: int, offload_optimizer: str, offload_param: str) -> None:
    model = model_config_from(SHAPES["llama"], "test")
    offloads = offload_optimizer != "none"
    for parameters, nodes, gpus in product(PARAMETERS, (1, 3, 4), (2, 8)):
        layout = Layout(world_size=nodes * gpus, zero_stage=zero_stage, offload_optimizer=offload_optimizer,
                        offload_param=offload_param)
        if zero_stage == 2:
            host, device = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=gpus, num_nodes=nodes,
                                                                 cpu_offload=offloads)
        else:
            host, device, _ = estimate_zero3_model_states_mem_needs(
                parameters, largest_layer_parameters(model), num_gpus_per_node=gpus, num_nodes=nodes,
                cpu_offload=offloads, cpu_offload_params=offload_param != "none")
        found = deepspeed_estimate(layout, num_parameters=parameters, model=model, nodes=nodes, gpus_per_node=gpus)
        assert found is not None
        assert (found.device_bytes, found.host_bytes) == (device, host), (parameters, nodes, gpus)


@pytest.mark.parametrize("name", SHAPES)
def test_the_largest_layer_equals_that_of_deepspeed(name: str) -> None:
    config = model_config_from(SHAPES[name], "test")
    assert largest_layer_parameters(config) == model_to_params(as_module(config))[1]
