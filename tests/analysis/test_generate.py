"""Limits of text generation. tests/test_quickstart.py tests generation from a checkpoint of a real run."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.analysis.generate import Sampling, TrainedModel, generate
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import ConfigError


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    """Return a model with 8 positions and random weights. The tokens of its tokenizer are single digits."""
    config = AutoConfig.for_model("gpt2", vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    tokenizer = Tokenizer(Path("digits"), 10, None, "", encode=lambda text: [int(digit) for digit in text],
                          decode=lambda tokens: "".join(map(str, tokens)))
    return TrainedModel(Path(), AutoModelForCausalLM.from_config(config).eval(), tokenizer, 8, [])


@pytest.mark.parametrize(("requested", "generated"), [(3, 3), (5, 5), (50, 5)])
def test_fewer_tokens_than_requested_are_reported(trained: TrainedModel, capsys: pytest.CaptureFixture[str],
                                                  requested: int, generated: int) -> None:
    assert len(generate(trained, "123", Sampling(max_new_tokens=requested))) == 3 + generated
    note = ("ds-pretrain: note: --max_new_tokens 50 is reduced to 5: the model has 8 positions, and the prompt "
            "takes 3\n")
    assert capsys.readouterr().err == (note if requested > generated else "")


def test_a_prompt_without_a_free_position_is_rejected(trained: TrainedModel) -> None:
    with pytest.raises(ConfigError, match="8 tokens"):
        generate(trained, "12345678", Sampling())
