"""Generate text from a checkpoint of any layout, with `generate` of the transformers model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.checkpoint.load.select import select_checkpoint, tokenizer_of
from pretrain.cli import say
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.hf_weights import to_transformers


@dataclass(frozen=True)
class Sampling:
    """Settings of text generation. Temperature 0 is greedy decoding."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint that is loaded into a transformers model, with its tokenizer."""

    folder: Path
    model: Any  # PreTrainedModel
    tokenizer: Tokenizer
    max_positions: int
    unused_tokens: list[int]  # rows of the embedding that belong to no token of the tokenizer


def load_trained_model(path: Path, *, step: int | None = None, tokenizer: str | None = None) -> TrainedModel:
    """Load a checkpoint. `path` is a checkpoint folder or a run folder. Raises ConfigError.

    In a run folder, `step` selects the checkpoint; without `step` it is the newest complete one.
    """
    folder, manifest = select_checkpoint(path, step)
    config = model_config_from(manifest.model, str(folder / MANIFEST))
    loaded = load_tokenizer(tokenizer or tokenizer_of(path))
    return TrainedModel(folder, _transformers_model(folder, config), loaded, config.max_positions,
                        list(range(loaded.vocab_size, config.vocab_size)))


def _transformers_model(folder: Path, config: ModelConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.hf_config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.hf_config["model_type"], **values))
    model.load_state_dict(to_transformers(CheckpointReader(folder).weights(), config))
    return model.to(get_accelerator().device_name()).eval()


def generate(trained: TrainedModel, prompt: str, sampling: Sampling) -> str:
    """Return the prompt and its continuation.

    The continuation ends at the end-of-document token, after max_new_tokens, or at the model's last position. An empty
    prompt begins a new document. Raises ConfigError if the prompt is empty and the tokenizer has no end-of-document
    token, or if the prompt leaves no free position.
    """
    tokens = trained.tokenizer.encode(prompt)
    if not tokens and trained.tokenizer.eod_token is not None:
        tokens = [trained.tokenizer.eod_token]  # a document begins after this token
    free_positions = trained.max_positions - len(tokens)
    if not tokens or free_positions < 1:
        raise ConfigError("--prompt", found=f"{len(tokens)} tokens", expected=f"1 to {trained.max_positions - 1}")
    if free_positions < sampling.max_new_tokens:
        say(f"note: --max_new_tokens {sampling.max_new_tokens} is reduced to {free_positions}: the model has "
            f"{trained.max_positions} positions, and the prompt takes {len(tokens)}")
    torch.manual_seed(sampling.seed)
    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choice = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k,
                  "top_p": sampling.top_p}
    inputs = torch.tensor([tokens], device=trained.model.device)
    output = trained.model.generate(inputs, attention_mask=torch.ones_like(inputs),
                                    max_new_tokens=min(sampling.max_new_tokens, free_positions),
                                    suppress_tokens=trained.unused_tokens or None,
                                    eos_token_id=trained.tokenizer.eod_token, pad_token_id=0, **choice)
    return trained.tokenizer.decode(output[0].tolist())
