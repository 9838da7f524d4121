"""Runs of transformers.Trainer with any TrainingArguments continue here with the same losses.

The Trainer is real: tests/distributed/workers/other_programs.py. test_trainer_settings.py compares the table of all
fields with the class.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions.adopt.deepspeed.trainer_settings import TAKEN
from tests.extensions.adopt.adopted import TOLERANCES, Original, measure, trainer, zero

WSD = {"num_decay_steps": 5, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}
# Each row changes several settings. In the default run, each schedule and optimizer is in the slow rows alone.
QUICK: dict[str, Original] = {
    "smoothing": trainer(None, "llama", "fp32", zero(1), schedule="polynomial", label_smoothing_factor=0.2,
                         lr_scheduler_kwargs={"lr_end": 2e-4}, max_grad_norm=0.3),
    "experts, no clipping": trainer(2, "mixtral", "fp32", zero(0), schedule="inverse_sqrt", max_grad_norm=0.0,
                                    learning_rate=3e-3, data_seed=5),
    "no clipping": trainer(None, "qwen3", "fp32", zero(2), schedule="warmup_stable_decay", warmup_steps=0.25,
                           lr_scheduler_kwargs=WSD, label_smoothing_factor=0.1, max_grad_norm=0.0)}
SLOW: dict[str, Original] = {
    "sgd": trainer(None, "gpt2", "fp32", zero(0), schedule="constant", optim="sgd", optim_args="momentum=0.9",
                   learning_rate=0.05, weight_decay=0.0, max_grad_norm=0.2),
    "adagrad": trainer(None, "llama", "fp32", zero(0), schedule="constant_with_warmup", optim="adagrad",
                       learning_rate=0.01, weight_decay=0.0),
    "betas": trainer(None, "gpt2", "fp32", zero(1), schedule="cosine_with_restarts", adam_beta1=0.8, adam_beta2=0.9,
                     adam_epsilon=1e-4, optim="adamw_torch", weight_decay=0.5),
    "epochs": trainer(None, "llama", "fp32", zero(3), schedule="cosine_warmup_with_min_lr", max_steps=-1,
                      lr_scheduler_kwargs={"min_lr_rate": 0.2}, num_train_epochs=1, per_device_train_batch_size=1,
                      gradient_accumulation_steps=4, gradient_checkpointing=True),
    "half": trainer(None, "qwen3", "bf16", zero(1), schedule="cosine_with_min_lr", label_smoothing_factor=0.1,
                    lr_scheduler_kwargs={"min_lr": 1e-4}),
    "ranks": trainer(None, "gpt2", "fp32", zero(0), schedule="linear", average_tokens_across_devices=False, seed=3,
                     accepted=("settings",), dataloader_drop_last=True),
    "smoothed experts": trainer(1, "router_logits", "fp32", zero(0), label_smoothing_factor=0.1),
    "ZeRO-3, experts": trainer(3, "mixtral", "fp32", zero(1), schedule="inverse_sqrt", max_grad_norm=0.5),
}
# fields of TAKEN that no row can vary: other versions and GPUs alone have them, or the JSON has them
_WITHOUT_A_ROW = {"adafactor", "warmup_ratio", "deepspeed_plugin", "hf_deepspeed_config", "mixed_precision", "fp16",
                  "auto_find_batch_size", "deepspeed"}


def named(rows: Mapping[str, Original]) -> list[Original]:
    """Return the rows with names of their own, which are those of their folders."""
    return [replace(each, source=name) for name, each in rows.items()]


@pytest.mark.parametrize("rows", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["", "all"])
def test_losses_are_those_of_the_trainer(rows: dict[str, Original], corpus: str, tmp_path: Path) -> None:
    originals = named(rows)
    found = measure(originals, corpus, tmp_path)
    limits = {each.name: TOLERANCES[each.precision] for each in originals}
    print(found)
    assert len(found) == len(rows)
    assert {key: value for key, value in found.items() if not value <= limits[key[0]]} == {}


def test_each_setting_that_is_taken_over_has_a_row() -> None:
    varied: set[Any] = set()
    for each in (*QUICK.values(), *SLOW.values()):
        varied |= each.case["arguments"].keys()
    assert TAKEN - varied - {"max_steps"} == _WITHOUT_A_ROW
