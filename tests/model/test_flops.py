"""FLOPs per token, calculated by hand."""

from dataclasses import replace

from pretrain.model.config import load_model_config
from pretrain.model.flops import flops_per_token


def test_flops_count_tied_and_untied_heads_once() -> None:
    gpt2, llama = load_model_config("gpt2"), load_model_config("llama3-8b")
    # matrices with a product: all parameters without embeddings and without the last norm, plus the head
    gpt2_matrices = 124_439_808 - 1024 * 768 - 2 * 768
    llama_matrices = 8_030_261_248 - 128_256 * 4096 - 4096
    assert flops_per_token(gpt2, 1024) == 6 * gpt2_matrices + 12 * 12 * 768 * 1024
    assert flops_per_token(llama, 8192) == 6 * llama_matrices + 12 * 32 * 4096 * 8192


def test_a_window_limits_the_keys_of_its_layer() -> None:
    config = load_model_config("mistral-7b")
    assert set(config.windows) == {4096}
    full = replace(config, windows=())
    assert flops_per_token(config, 2048) == flops_per_token(full, 2048)
    saved = 12 * 32 * 32 * 128 * (16384 - 4096)
    assert flops_per_token(full, 16384) - flops_per_token(config, 16384) == saved
