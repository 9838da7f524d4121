"""FLOPs of the step-time estimate."""

from pretrain.memory.estimate.model_shape import shape_of
from pretrain.memory.step_time.time_model import model_flops_per_token
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.flops import flops_per_token


def test_flops_equal_those_of_the_progress_line() -> None:
    for name in preset_names():
        config = load_model_config(name)
        assert model_flops_per_token(shape_of(config), 0, 1024) == flops_per_token(config, 1024), name
