"""Universal checkpoints and exports for transformers.Trainer: other programs continue with equal losses, and back.

A run of this program saves at step 6 and continues to step 12. From its exports, plain DeepSpeed engines of the
transformers model and the Trainer continue on the same samples. DeepSpeed's own ds_to_universal then converts their
checkpoints, and `read` returns exactly what their engines hold.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from pretrain.checkpoint.adopt.adopt import adopt, plan_adoption
from pretrain.checkpoint.adopt.deepspeed.universal import read
from pretrain.checkpoint.adopt.foreign_run import ForeignRun
from pretrain.checkpoint.adopt.sources import find_source
from pretrain.checkpoint.convert.export_trainer import export_trainer
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.convert.universal import convert, export_universal
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.distributed.deepspeed_version import is_at_least
from pretrain.model.config import ModelConfig, model_config_from
from tests.support.cases import case, config, flags
from tests.support.launch import run_worker
from tests.support.layouts import MODEL_WITH_EXPERTS, dp2, pp2, relative_difference, run_layouts
from tests.support.model_shapes import write_config
from tests.support.tensors import from_transformers

SAVED, STEPS, LAST = 6, 12, 18  # the first checkpoint, of this program; the second one, of another program; the end
MODEL_VOCAB = 256
FIRST = "first-trainer"  # a run of the Trainer from step 0, which saves at SAVED
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 72,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
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
# At ZeRO-3 the Trainer's JSON needs an optimizer: see convert/universal.py.
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


def trainer_arguments(name: str, values: dict[str, Any]) -> dict[str, Any]:
    params = values["optimizer"]["params"]
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": params["lr"],
            "adam_beta2": 0.95, "weight_decay": params["weight_decay"], "max_grad_norm": 1.0,
            "lr_scheduler_type": "linear" if name.startswith("linear") else "constant", "bf16": name.startswith("bf16"),
            "warmup_steps": {"linear": 3, "llama": 9}.get(name.split("-")[0], 0)}


@pytest.fixture(scope="module")
def work(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("universal")
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
    others.append({"name": FIRST, "program": "first_trainer", "model": GPT2, "samples": common["samples"],
                   "save_at": SAVED, "steps": STEPS, "config": elsewhere(dp2(2), optimizer=False) | {"checkpoint": {}},
                   "arguments": trainer_arguments("gpt2", dp2(2))})
    theirs = run_worker("resumed_elsewhere.py", others, 2, folder / "others")
    return Work(folder, ours, theirs, folder / "others")


@pytest.mark.parametrize("name", [name for name in (*PLAIN, *TRAINER) if name != "experts-zero1"])
def test_other_programs_continue_with_equal_losses(name: str, work: Work) -> None:
    source = name.split("-")[0]
    expected = work.ours[source]["after"]["loss"]
    distance = relative_difference(work.theirs[name][:STEPS - SAVED], expected)
    print(f"{name}: losses within {distance:.1e} of this program's: {expected}")
    assert distance <= WITHIN.get(source, 1e-5)


def config_of(source: str, work: Work) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work.folder / source / "theirs/config.json").read_text())
    return found


def ours_of(run: ForeignRun, config: ModelConfig, state: str) -> dict[str, torch.Tensor]:
    return from_transformers({name: run.read(name, state) for name in run.shapes}, config)


@pytest.mark.parametrize("names", ["ours", "theirs"])
@pytest.mark.parametrize("source", SOURCES)
def test_an_export_comes_back_bit_for_bit(source: str, names: str, work: Work) -> None:
    folder, reader = work.folder / source / names, CheckpointReader(work.checkpoint(source))
    values = json.loads((folder / "config.json").read_text())
    run, config = read(folder, values), model_config_from(values, "config.json")
    assert run.states == ("exp_avg", "exp_avg_sq")
    assert (run.step, run.optimizer_step, run.skipped_steps) == (SAVED, SAVED, 0)
    assert (run.consumed_samples, run.global_batch_size, run.seq_length) == (SAVED * 8, 8, 64)
    assert run.precision == ("bf16" if source == "bf16" else "fp32")
    assert run.optimizer["type"] == "AdamW"
    assert run.schedule["last_step"] == SAVED
    assert run.weight_decay == {key: 0.0 if source in ("llama", "linear") or len(shape) == 1 else 0.1
                                for key, shape in run.shapes.items()}
    for state in ("fp32", *run.states):
        found = ours_of(run, config, state)
        assert found.keys() == reader.shapes.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, reader.tensor(name, state)), (name, state)


@pytest.fixture(scope="module")
def converted(work: Work) -> dict[str, Path]:
    """Convert the checkpoints of the plain loops with DeepSpeed's own tool. Each ZeRO stage has another form."""
    folders = {}
    for name in PLAIN:
        folders[name] = work.elsewhere / name / f"global_step{STEPS}_universal"
        ds_to_universal.main(argparse.Namespace(
            input_folder=str(work.elsewhere / name / f"global_step{STEPS}"), output_folder=str(folders[name]),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=True))
    return folders


@pytest.mark.parametrize("name", PLAIN)
def test_what_ds_to_universal_writes_is_read_exactly(name: str, work: Work, converted: dict[str, Path]) -> None:
    """The tensors, steps and groups are those of the engine."""
    source = name.split("-")[0]
    run = read(converted[name], config_of(source, work))
    live = torch.load(work.elsewhere / name / "live.pt")
    assert {key for key, _ in live} == run.shapes.keys()
    for (key, state), expected in live.items():
        found = run.read(key, state)
        assert found.dtype == torch.float32
        if name in INFO and len(expected) == MODEL_VOCAB:
            assert not found[REAL_ROWS:].any()
            found, expected = found[:REAL_ROWS], expected[:REAL_ROWS]
        assert torch.equal(found, expected), (key, state)
    assert len(run.notes) == (2 if name in INFO else 0)
    assert (run.step, run.optimizer_step, run.skipped_steps) == (STEPS, STEPS, 0)
    assert (run.consumed_samples, run.global_batch_size) == (STEPS * 8, 8)
    decay = run.ds_config["optimizer"]["params"]["weight_decay"]  # type: ignore[index]
    assert run.weight_decay == {key: decay if len(shape) > 1 else 0.0 for key, shape in run.shapes.items()}
    assert run.optimizer["params"]["betas"] == [0.9, 0.95]
    assert run.optimizer["params"]["weight_decay"] == decay
    assert run.schedule.get("last_step") == (STEPS if source == "llama" else None)


@pytest.fixture(scope="module")
def adopted(work: Work, converted: dict[str, Path]) -> dict[str, Path]:
    """The run folders of the converted checkpoints."""
    runs = {name: work.folder / "adopted" / name for name in CONTINUED}
    (work.folder / "adopted").mkdir()
    for name, run in runs.items():
        adopt(plan_adoption(read(converted[name], config_of(name.split("-")[0], work)), frozenset()), run)
    return runs


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_converted_checkpoints_continue_here_with_equal_losses(ranks: int, work: Work, adopted: dict[str, Path],
                                                               corpus: str) -> None:
    """The plain loop and this program continue from the same step, in several layouts here."""
    cases = []
    for name, layouts in CONTINUED.items():
        own = {"train_data": corpus, "split": "80,20,0", "seq_length": 64, "train_steps": LAST, "seed": 1234,
               "resume_from": str(adopted[name]), "override": ["seed"],
               "model": str(work.folder / name.split("-")[0] / "theirs"),
               **({} if name.startswith("llama") else CONSTANT)}
        for layout, (needed, values) in layouts.items():
            values = {**values, **WARMUP} if name.startswith("llama") else values
            if needed == ranks:
                cases.append((name, layout, case(f"{name}_{layout}", "continue_run", values, own)))
    found = run_worker("layout_worker.py", [each for *_, each in cases], ranks, work.folder / f"continued{ranks}")
    for name, layout, each in cases:
        losses = found[each["name"]]["after"]["loss"]
        distance = relative_difference(losses, work.theirs[name][STEPS - SAVED:])
        print(f"{name} in {layout}: losses within {distance:.1e} of the plain loop's: {losses}")
        assert distance <= WITHIN.get(name.split("-")[0], 1e-5), (name, layout)


def test_runs_return_to_their_own_programs(work: Work, adopted: dict[str, Path]) -> None:
    """The Trainer, or a plain loop, then an import, then an export: the same program continues as without them."""
    source = find_source(work.elsewhere / FIRST, step=SAVED, config=None)
    assert source is not None
    adopt(plan_adoption(source.read(), frozenset()), work.folder / "adopted" / FIRST)
    folder = work.folder / "returned"
    folder.mkdir()
    export_trainer(plan_export(work.folder / "adopted" / FIRST, folder / f"checkpoint-{SAVED}"))
    export_universal(plan_export(adopted["gpt2-zero2"], folder / "universal", with_tokenizer=False))
    common = {"samples": str(work.folder / "ours/2/samples-samples.npy"), "save_at": None}
    cases = [{"name": "trainer", "program": "trainer", "export": str(folder / f"checkpoint-{SAVED}"), "from": SAVED,
              "to": STEPS, **common, "arguments": trainer_arguments("gpt2", dp2(2)),
              "config": elsewhere(dp2(2), optimizer=False)},
             {"name": "plain", "program": "plain", "export": str(folder / "universal"), "from": STEPS, "to": LAST,
              **common, "config": elsewhere(dp2(2))}]
    found = run_worker("resumed_elsewhere.py", cases, 2, work.folder / "back")
    own = {"trainer": work.theirs[FIRST][SAVED:], "plain": work.theirs["gpt2-zero2"][STEPS - SAVED:]}
    for name, expected in own.items():
        distance = relative_difference(found[name], expected)
        print(f"{name} after import and export: losses within {distance:.1e} of its own: {expected}")
        assert distance <= 1e-5, name
