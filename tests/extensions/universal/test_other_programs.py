"""Universal checkpoints and exports for transformers.Trainer: other programs continue with equal losses.

A run of this program saves at step 6 and continues to step 12. From its exports, plain DeepSpeed engines of the
transformers model and the Trainer continue on the same samples.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.distributed.requirements import is_at_least
from pretrain.extensions.universal.write_universal import convert, export_trainer, export_universal
from tests.support.cases import case, config, flags
from tests.support.launch import run_worker
from tests.support.layouts import MODEL_WITH_EXPERTS, dp2, pp2, relative_difference, run_layouts
from tests.support.model_shapes import write_config

SAVED, STEPS, LAST = 6, 12, 18  # the first checkpoint, of this program; the second one, of another program; the end
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 72, "rms_norm_eps": 1e-5}
# If the JSON has an optimizer, the Trainer makes one group of all parameters: biases and norms would decay, too.
WITHOUT_DECAY = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}}
WARMUP = {"optimizer": WITHOUT_DECAY, "scheduler": {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 9, "warmup_type": "linear"}}}
LOAD = {"checkpoint": {"load_universal": True}}


def json_of(values: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with other blocks."""
    return {**values, **others}


SOURCES = {"gpt2": json_of(dp2(1)), "llama": json_of(pp2(1), **WARMUP), "bf16": json_of(pp2(1, precision="bf16")),
           "experts": json_of(dp2(1)), "linear": json_of(dp2(1), optimizer=WITHOUT_DECAY)}
FLAGS = {"llama": {}, "linear": {"lr_schedule": "linear", "lr_warmup_steps": 3, "lr_decay_steps": STEPS, "min_lr": 0.0,
                                 "lr_counts_from_0": True}}
CONSTANT = {"lr_schedule": "constant", "lr_warmup_steps": 0}
WITHIN = {"bf16": 5e-4}


def elsewhere(values: dict[str, Any], *, optimizer: bool = True) -> dict[str, Any]:
    """Return the JSON of another program."""
    values = {key: value for key, value in (values | LOAD).items() if key != "pipeline"}
    return values if optimizer else {key: value for key, value in values.items() if key != "optimizer"}


PLAIN = {"gpt2-zero1": dp2(1), "gpt2-zero2": dp2(2), "gpt2-zero3": dp2(3), "llama-zero2": json_of(dp2(2), **WARMUP),
         "llama-zero3": json_of(dp2(3), **WARMUP), "bf16-zero2": dp2(2, precision="bf16"), "experts-zero1": dp2(1)}
# layouts in which the checkpoint of a plain loop continues here: number of ranks, JSON
CONTINUED = {"gpt2-zero2": {"zero2": (2, dp2(2)), "pipeline": (2, pp2(1)), "zero3": (1, config(3))},
             "llama-zero3": {"zero3": (2, dp2(3)), "pipeline": (2, pp2(1))},
             "bf16-zero2": {"zero2": (2, dp2(2, precision="bf16")), "pipeline": (2, pp2(1, precision="bf16")),
                            "zero1": (1, config(1, precision="bf16"))}}
REAL_ROWS = 250  # ds_to_universal removes the other rows, as if they padded the vocabulary, which has 256 tokens
INFO = {"llama-zero2": {"vocabulary_parameter_patterns": ["model.embed_tokens.weight", "lm_head.weight"],
                        "original_vocab_size": REAL_ROWS}}
# At ZeRO-3 the Trainer's JSON needs an optimizer: see write_universal.py.
TRAINER = {"gpt2-trainer2": dp2(2), "llama-trainer1": json_of(dp2(1), **WARMUP),
           "llama-trainer3": json_of(dp2(3), **WARMUP), "bf16-trainer1": dp2(1, precision="bf16"),
           "linear-trainer1": json_of(dp2(1), optimizer=WITHOUT_DECAY),
           "linear-trainer2": json_of(dp2(2), optimizer=WITHOUT_DECAY)}
WITHOUT_OPTIMIZER = ("gpt2-trainer2", "bf16-trainer1", "linear-trainer2")  # in the JSON: torch's, made by the Trainer


if not is_at_least("0.19.4"):  # before, ZeRO-3 loads only bare tensors
    for cases in (PLAIN, TRAINER, CONTINUED):
        for name in [name for name in cases if name.endswith("3")]:
            del cases[name]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Work:
    """The folders and losses of all programs."""

    folder: Path
    ours: dict[str, Any]  # results of train_and_save
    theirs: dict[str, list[float]]
    elsewhere: Path  # where the other programs ran

    def checkpoint(self, source: str) -> Path:
        return Path(self.ours[source]["folder"])


_made: list[Work] = []


def trainer_arguments(name: str, values: dict[str, Any]) -> dict[str, Any]:
    params = values["optimizer"]["params"]
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": params["lr"],
            "adam_beta2": 0.95, "weight_decay": params["weight_decay"], "max_grad_norm": 1.0,
            "lr_scheduler_type": "linear" if name.startswith("linear") else "constant", "bf16": name.startswith("bf16"),
            "warmup_steps": {"linear": 3, "llama": 9}.get(name.split("-")[0], 0)}


@pytest.fixture(scope="module")
def work(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Tests of other modules must not change its files, either: it is made once."""
    if not _made:
        _made.append(_make(corpus, tmp_path_factory.mktemp("universal")))
    return _made[0]


def _make(corpus: str, folder: Path) -> Work:
    models = {"llama": write_config(folder / "llama", LLAMA), "experts": write_config(folder / "experts",
                                                                                       MODEL_WITH_EXPERTS)}

    def flags_of(name: str) -> dict[str, Any]:
        found = flags(corpus, layers=2, steps=STEPS, overrides="n_positions=72", **FLAGS.get(name, CONSTANT))
        if name in models:
            found = {key: value for key, value in found.items() if key != "model_overrides"} | {"model": models[name]}
        return found

    cases = {name: (2, case(name, "train_and_save", values, flags_of(name), saved_step=SAVED))
             for name, values in SOURCES.items()}
    cases["samples"] = 2, case("samples", "write_samples", SOURCES["gpt2"], flags_of("gpt2"))
    ours = run_layouts(cases, folder / "ours")
    for name in SOURCES:
        checkpoint = Path(ours[name]["folder"])
        export_universal(plan_export(checkpoint, folder / name / "theirs", with_tokenizer=False))
        convert(checkpoint, folder / name / "ours")
        if name != "experts":
            export_trainer(plan_export(checkpoint, folder / name / f"checkpoint-{SAVED}"))
    common = {"samples": str(folder / "ours/2/samples-samples.npy"), "from": SAVED}
    others = [{"name": name, "program": "plain", "export": str(folder / name.split("-")[0] / "theirs"), **common,
               "config": elsewhere(values), "to": LAST if name in CONTINUED else STEPS, "save_at": STEPS,
               "client_state": {"universal_checkpoint_info": INFO.get(name, {})}}
              for name, values in PLAIN.items()]
    others += [{"name": name, "program": "trainer", "export": str(folder / name.split("-")[0] / f"checkpoint-{SAVED}"),
                **common, "to": STEPS, "arguments": trainer_arguments(name, values),
                "config": elsewhere(values, optimizer=name not in WITHOUT_OPTIMIZER)}
               for name, values in TRAINER.items()]
    theirs = run_worker("resumed_elsewhere.py", others, 2, folder / "others")
    return Work(folder, ours, theirs, folder / "others")


@pytest.mark.parametrize("name", [name for name in (*PLAIN, *TRAINER) if name != "experts-zero1"])
def test_other_programs_continue_with_equal_losses(name: str, work: Work) -> None:
    source = name.split("-")[0]
    expected = work.ours[source]["after"]["loss"]
    distance = relative_difference(work.theirs[name][:STEPS - SAVED], expected)
    print(f"{name}: losses within {distance:.1e} of this program's: {expected}")
    assert distance <= WITHIN.get(source, 1e-5)
