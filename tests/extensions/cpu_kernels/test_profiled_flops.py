"""Profilers see functions in C: DeepSpeed's flops profiler, and torch's."""

from pathlib import Path

import pytest
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler

from pretrain.extensions.cpu_kernels.choice import ALL_IN_C, KernelChoice, set_choice
from pretrain.extensions.cpu_kernels.gradient_passes import count_functions_in_c
from pretrain.extensions.cpu_kernels.library import call, has_library
from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tests.support.model_shapes import SHAPES, write_config

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")


def flops_and_losses(folder: Path, choice: KernelChoice, *, counts_c: bool) -> tuple[int, list[float]]:
    """Return the FLOPs of a forward pass that is profiled, and the losses before, during and after it."""
    config = load_model_config(write_config(folder, SHAPES["gpt2"]))
    model = as_module(config)
    initialize_parameters(model, config, seed=1)
    model.bfloat16()
    tokens = torch.arange(66).view(2, 33) % config.vocab_size
    profiler, losses = FlopsProfiler(model), []
    if counts_c:
        count_functions_in_c(profiler)
    set_choice(choice)
    try:
        for profiled in (False, True, False):
            if profiled:
                profiler.start_profile()
            losses.append(model(tokens[:, :-1], tokens[:, 1:], torch.full((2, 32), 1 / 64)).item())
            if profiled:
                flops = int(profiler.get_total_flops())
                profiler.end_profile()
    finally:
        set_choice(None)
    return flops, losses


def test_linear_layers_and_attention_in_c_are_counted(tmp_path: Path) -> None:
    with_torch, _ = flops_and_losses(tmp_path, frozenset(), counts_c=True)
    flops, losses = flops_and_losses(tmp_path, ALL_IN_C, counts_c=True)
    assert flops == pytest.approx(with_torch, rel=0.05)  # attention may count the visible scores only
    assert losses[0] == losses[1] == losses[2]  # the profiler changes no result
    uncounted, _ = flops_and_losses(tmp_path, ALL_IN_C, counts_c=False)
    assert uncounted < 0.8 * flops, "DeepSpeed counts them: delete count_functions_in_c"


def test_torchs_profiler_records_the_names_and_shapes_of_functions_in_c() -> None:
    x = torch.randn(4, 8).bfloat16()
    with torch.profiler.profile(record_shapes=True) as profile:
        call("gelu_tanh", x, torch.empty_like(x), x.numel())
    [event] = [each for each in profile.events() if each.name == "c::gelu_tanh"]
    assert event.input_shapes[:2] == [[4, 8], [4, 8]]
