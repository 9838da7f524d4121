"""FLOPs of the step-time estimate."""

from pretrain.memory.estimate.model_shape import shape_of
from pretrain.memory.step_time.time_model import model_flops_per_token
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.flops import flops_per_token


def test_flops_equal_those_of_the_progress_line() -> None:
    for name in preset_names():
        config = load_model_config(name)
        for length in (1024, 16384):  # some presets have a window of 4096
            found = model_flops_per_token(shape_of(config), 0, length)
            assert found == flops_per_token(config, length), (name, length)
