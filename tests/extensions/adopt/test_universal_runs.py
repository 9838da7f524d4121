"""DeepSpeed's own ds_to_universal converts checkpoints of other programs; `read` returns what their engines hold.

Their runs continue here with equal losses, and return to their own programs. The other programs, and the runs of this
program from whose exports they continue, are those of tests/extensions/universal/test_other_programs.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.extensions.adopt.adopt import adopt, plan_adoption
from pretrain.extensions.adopt.deepspeed.universal import read
from pretrain.extensions.adopt.foreign_run import ForeignRun
from pretrain.extensions.adopt.sources import find_source
from pretrain.extensions.universal.write_universal import export_trainer, export_universal
from pretrain.model.config import ModelConfig, model_config_from
from tests.extensions.universal.test_other_programs import (
    CONSTANT,
    CONTINUED,
    INFO,
    LAST,
    PLAIN,
    REAL_ROWS,
    SAVED,
    SOURCES,
    STEPS,
    WARMUP,
    WITHIN,
    Work,
    elsewhere,
    trainer_arguments,
    work,
)
from tests.support.cases import case
from tests.support.launch import run_worker
from tests.support.layouts import dp2, relative_difference
from tests.support.tensors import from_transformers

__all__ = ["work"]  # a fixture
MODEL_VOCAB = 256
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 72,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


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
    samples, arguments = str(work.folder / "ours/2/samples-samples.npy"), trainer_arguments("gpt2", dp2(2))
    first = {"name": "trainer", "program": "trainer", "model": GPT2, "samples": samples, "save_at": SAVED,
             "steps": STEPS, "config": elsewhere(dp2(2), optimizer=False) | {"checkpoint": {}}, "arguments": arguments}
    trained = run_worker("other_programs.py", [first], 2, work.folder / "first")
    source = find_source(work.folder / "first/trainer", step=SAVED, config=None)
    assert source is not None
    adopt(plan_adoption(source.read(), frozenset()), work.folder / "adopted/trainer")
    folder = work.folder / "returned"
    folder.mkdir()
    export_trainer(plan_export(work.folder / "adopted/trainer", folder / f"checkpoint-{SAVED}"))
    export_universal(plan_export(adopted["gpt2-zero2"], folder / "universal", with_tokenizer=False))
    common = {"samples": samples, "save_at": None}
    cases = [{"name": "trainer", "program": "trainer", "export": str(folder / f"checkpoint-{SAVED}"), "from": SAVED,
              "to": STEPS, **common, "arguments": arguments,
              "config": elsewhere(dp2(2), optimizer=False)},
             {"name": "plain", "program": "plain", "export": str(folder / "universal"), "from": STEPS, "to": LAST,
              **common, "config": elsewhere(dp2(2))}]
    found = run_worker("resumed_elsewhere.py", cases, 2, work.folder / "back")
    own = {"trainer": trained["trainer"][SAVED:], "plain": work.theirs["gpt2-zero2"][STEPS - SAVED:]}
    for name, expected in own.items():
        distance = relative_difference(found[name], expected)
        print(f"{name} after import and export: losses within {distance:.1e} of its own: {expected}")
        assert distance <= 1e-5, name
