"""Checkpoints of GPT-NeoX and Megatron-DeepSpeed: 2 pipeline stages x 2 tensor-parallel ranks, adopted at step 6 of 12.

megatron_worker.py trains and saves with DeepSpeed's own code, as the programs do. Weights, optimizer states, step and
schedule are right if the losses of the steps 7 to 12 are those of the original.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.adopt import adopt, plan_adoption
from pretrain.extensions.adopt.foreign_run import ForeignRun
from pretrain.extensions.adopt.megatron.layers import read
from tests.extensions.adopt import WORKERS
from tests.extensions.adopt.adopted import (
    PIPELINE,
    SAVED,
    SEQ_LENGTH,
    STEPS,
    TOLERANCES,
    Layout,
    Original,
    continued_case,
    write_samples,
    zero,
)
from tests.support.launch import run_worker
from tests.support.layouts import relative_difference

RANKS = 4
SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "positions": 128,
                         "rows": 288, "seq_length": SEQ_LENGTH, "stage": 1, "clipping": 1.0}
GPT = {**SIZES, "program": "megatron", "kv_heads": 4, "inner": 256}
CASES = {"neox": {**SIZES, "program": "neox", "precision": "fp32"}, "megatron": {**GPT, "precision": "bf16"},
         # without clipping, because DeepSpeed's norm is wrong without ZeRO: see states.py
         "stage0": {**GPT, "precision": "fp32", "stage": 0, "clipping": 0.0}}
SAME = Layout("2 pipeline stages x 2 tensor-parallel ranks", 4,
              {**PIPELINE.blocks, "tensor_parallel": {"autotp_size": 2}})
Folders = Mapping[str, Path]


@pytest.fixture(scope="module")
def originals(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Train both programs, and return the folder with their checkpoints, and their losses."""
    folder = tmp_path_factory.mktemp("megatron")
    write_samples(corpus, folder / "samples.npy")
    cases = [{"name": name, "samples": "../samples.npy", "save_at": SAVED, "steps": STEPS, **case}
             for name, case in CASES.items()]
    return folder, run_worker(str(WORKERS / "megatron_worker.py"), cases, RANKS, folder / "originals")


@pytest.fixture
def checkpoints(originals: tuple[Path, Any], tmp_path: Path) -> Folders:
    """Copies of the checkpoints, which a test may damage."""
    return {name: Path(shutil.copytree(originals[0] / "originals" / name / f"global_step{SAVED}", tmp_path / name))
            for name in CASES}


def model_of(run: ForeignRun) -> transformers.PreTrainedModel:
    """Return transformers' model with the master weights of a run."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**run.config))
    missing, unexpected = model.float().load_state_dict({name: run.read(name, "fp32") for name in run.shapes},
                                                        strict=False)
    assert (set(missing), unexpected) == (set() if "lm_head.weight" in run.shapes else {"lm_head.weight"}, [])
    return model


@pytest.mark.parametrize("name", CASES)
def test_transformers_continues_with_the_losses_of_the_original(
        name: str, originals: tuple[Path, dict[str, list[float]]], checkpoints: Folders) -> None:
    run = read(checkpoints[name], None)
    assert (run.omissions, run.step, run.optimizer_step, run.consumed_samples, run.precision) == \
        ((), SAVED, SAVED, SAVED * 8, CASES[name]["precision"])
    assert {key: run.schedule[key] for key in ("type", "warmup_steps", "total_steps", "last_step")} == \
        {"type": "cosine", "warmup_steps": 3, "total_steps": STEPS, "last_step": SAVED}
    model, params = model_of(run), run.optimizer["params"]
    groups = [{"params": [tensor], "weight_decay": run.weight_decay[name]} for name, tensor in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=run.schedule["next_rate"], betas=params["betas"], eps=params["eps"])
    for tensor_name, tensor in model.named_parameters():
        optimizer.state[tensor] = {"step": torch.tensor(run.optimizer_step),
                                   **{state: run.read(tensor_name, state) for state in run.states}}
    samples = torch.from_numpy(np.load(originals[0] / "samples.npy").astype(np.int64))
    batch = samples[SAVED * 8:][:8]
    losses = []
    for _ in range(2):  # the second one shows that the moments are right
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if CASES[name]["clipping"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CASES[name]["clipping"])
        optimizer.step()
        batch = samples[(SAVED + 1) * 8:][:8]
    assert relative_difference(losses, originals[1][name][SAVED:SAVED + 2]) < TOLERANCES[str(CASES[name]["precision"])]


@pytest.mark.slow
def test_adopted_runs_continue_in_other_layouts(corpus: str, originals: tuple[Path, dict[str, list[float]]],
                                                tmp_path: Path) -> None:
    cases: dict[int, list[dict[str, Any]]] = {}
    expected = {}
    for name in CASES:
        run = read(originals[0] / "originals" / name / f"global_step{SAVED}", None)
        adopt(plan_adoption(run, frozenset()), tmp_path / name)
        original = Original(name, "", run.precision, (), {})
        for layout in (SAME, zero(2), zero(3, 1)):
            case = continued_case(original, layout, tmp_path / name, corpus)
            cases.setdefault(layout.ranks, []).append(case)
            expected[case["name"]] = name
    for ranks, own in cases.items():
        results = run_worker("layout_worker.py", own, ranks, tmp_path / f"continued{ranks}")
        for case_name, result in results.items():
            name = expected[case_name]
            assert relative_difference(result["after"]["loss"], originals[1][name][SAVED:]) < \
                TOLERANCES[str(CASES[name]["precision"])], case_name


def test_rows_that_pad_the_vocabulary_are_left_out(checkpoints: Folders) -> None:
    complete = read(checkpoints["neox"], None)
    run = read(checkpoints["neox"], {**complete.config, "vocab_size": 256})
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for state in ("fp32", *run.states):
            assert torch.equal(run.read(name, state), complete.read(name, state)[:256])
    assert any(note.startswith("32 of the 288 rows") for note in run.notes)
    assert "found 288 rows in the parts of all ranks; expected at least vocab_size 320. Name the config.json" in \
        rejected(checkpoints["neox"], {**complete.config, "vocab_size": 320})


def rejected(folder: Path, config: dict[str, Any] | None = None) -> str:
    """Return the line with which a checkpoint is rejected, when it is opened or when its weights are read."""
    try:
        run = read(folder, config)
        for name in run.shapes:
            run.read(name, "fp32")
    except ConfigError as error:
        return str(error)
    pytest.fail("it was not rejected")


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrite a file of torch.save. `edit` changes the content, or returns another one."""
    content = torch.load(path, weights_only=False)
    other = edit(content)
    torch.save(content if other is None else other, path)


class Hostile:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("hostile", "w")


def without(name: str) -> Callable[[Any], Any]:
    """Return an edit that removes an entry."""
    return lambda content: {key: value for key, value in content.items() if key != name}


def with_value(name: str, value: Any) -> Callable[[Any], Any]:
    """Return an edit that adds or replaces an entry."""
    return lambda content: {**content, name: value}


def masters(edit: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Return an edit of the master weights of each group in a ZeRO file."""
    def change_groups(content: Any) -> None:
        groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[:] = [edit(group) for group in groups]
    return change_groups


# name of a checkpoint, file, what is changed in it (None: it is removed), and the error
DAMAGE: dict[str, tuple[str, str, Callable[[Any], Any] | None, str]] = {
    "part of a layer": ("neox", "layer_03-model_01-model_states.pt", None,
                        "layer_03-model_01-model_states.pt: the file is missing. The checkpoint is incomplete"),
    "block": ("neox", "layer_03-model_0?-model_states.pt", None, "there is no file of a block in layer 3"),
    "last block": ("neox", "layer_05-model_0?-model_states.pt", None, "found blocks in the layers 2 to 4"),
    "mp rank": ("megatron", "mp_rank_01_model_states.pt", None, "mp_rank_01_model_states.pt: the file is missing"),
    "stage": ("megatron", "*mp_rank_0[23]_*_states.pt", None,
              "it has 2 mp_rank files, and mp_rank_00_model_states.pt records 4"),
    "partition": ("megatron", "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt", None,
                  "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt: the file is missing"),
    "hostile layer": ("neox", "layer_02-model_00-model_states.pt", with_value("x", Hostile()),
                      "found a pickle that needs"),
    "hostile args": ("megatron", "mp_rank_00_model_states.pt", with_value("args", Hostile()),
                     "found a pickle that needs"),
    "unknown parameter": ("neox", "layer_02-model_0?-model_states.pt",
                          with_value("attention.q_norm.weight", torch.ones(2)), "attention.q_norm.weight: the "
                          "checkpoint has this parameter, and the model of the config.json does not"),
    "missing parameter": ("neox", "layer_02-model_0?-model_states.pt", without("post_attention_layernorm.scale"),
                          "norm2.weight of block 0: the model of the config.json has this parameter, and the "
                          "checkpoint does not"),
    "no tensor": ("neox", "layer_02-model_00-model_states.pt", with_value("mlp.linear1.weight", 1),
                  "mlp.linear1.weight: found a int; expected a tensor"),
    "other shape": ("neox", "layer_02-model_00-model_states.pt", with_value("mlp.linear1.weight", torch.ones(3, 64)),
                    "mlp.linear1.weight: found a part of shape [3, 64]; expected [96, 64], of 2 parts of [96, 64]"),
    "masters of another save": ("neox", "zero_pp_rank_0_mp_rank_00_optim_states.pt", masters(lambda group: group + 1),
                                "it is not the rounded master weight in"),
    "tied copy": ("megatron", "bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt",
                  masters(lambda group: group * (1 + 2**-20) if len(group) > 10**4 else group),  # matrices
                  "the tied embedding of this pipeline stage differs"),
    "short partition": ("neox", "zero_pp_rank_0_mp_rank_01_optim_states.pt", masters(lambda group: group[:7]),
                        " elements of parameter group 0; expected "),
    "another optimizer": ("neox", "zero_pp_rank_0_mp_rank_01_optim_states.pt", with_value("optimizer_state_dict", {}),
                          "optim_states.pt: there is nothing at ['optimizer_state_dict', 'single_partition_of_fp32_"),
    "unknown step": ("neox", "mp_rank_00_model_states.pt", with_value("global_steps", "six"),
                     "global_steps: found six; expected a whole number"),
    "empty layer": ("neox", "layer_00-model_00-model_states.pt", lambda _: {}, "layer_00-model_00-model_states.pt: "
                    "word_embeddings.weight: the file has no such parameter; layer_00-model_01-model_states.pt has it"),
    "empty layer on all ranks": ("neox", "layer_00-model_0?-model_states.pt", lambda _: {},
                                "found parameters with names such as"),
    "empty mp rank": ("megatron", "mp_rank_01_model_states.pt", lambda _: {},
                      "mp_rank_01_model_states.pt: global_steps: found nothing; expected a number of steps"),
    "no args": ("megatron", "mp_rank_00_model_states.pt", without("args"),
                "the checkpoint does not describe its model"),
    "no settings": ("neox", "configs/*.yml", None, "the checkpoint does not describe its model"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_rejected_in_one_line(damage: str, checkpoints: Folders,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    name, pattern, edit, message = DAMAGE[damage]
    folder = checkpoints[name]
    monkeypatch.chdir(folder)
    paths = list(folder.glob(pattern))
    assert paths
    for path in paths:
        if edit is None:
            path.unlink()
        else:
            change(path, edit)
    line = rejected(folder)
    assert message in line
    assert "\n" not in line
    assert not (folder / "hostile").exists()


def test_files_that_are_cut_off_or_no_pickles_are_rejected(checkpoints: Folders) -> None:
    path = checkpoints["neox"] / "layer_02-model_00-model_states.pt"
    content = path.read_bytes()
    for damaged in (content[:-100], content[:10], b"", pickle.dumps({"x": 1})):
        path.write_bytes(damaged)
        assert f"{path}: found an unreadable file" in rejected(checkpoints["neox"])


def test_copies_that_differ_are_averaged_with_consent_alone(checkpoints: Folders) -> None:
    def shift(content: Any) -> None:
        content["input_layernorm.scale"] += 0.5
    for path in checkpoints["neox"].glob("*zero*"):
        path.unlink()
    change(checkpoints["neox"] / "layer_02-model_01-model_states.pt", shift)
    run = read(checkpoints["neox"], None)
    assert {omission.name for omission in run.omissions} == {"optimizer", "other_states"}
    assert "the copies of 1 parameters on tensor-parallel ranks differ by up to 0.5" in run.omissions[-1].reason
    own = torch.load(checkpoints["neox"] / "layer_02-model_00-model_states.pt")["input_layernorm.scale"]
    assert torch.allclose(run.read("model.layers.0.input_layernorm.weight", "fp32"), own + 0.25)


def test_the_run_is_recorded(checkpoints: Folders, tmp_path: Path) -> None:
    run = read(checkpoints["megatron"], None)
    adopt(plan_adoption(run, frozenset()), tmp_path / "run")
    source = json.loads((tmp_path / f"run/checkpoints/global_step{SAVED}/imported_from.json").read_text())
    assert source["program"] == "Megatron-DeepSpeed, 2 pipeline stages, tensor parallelism 2, ZeRO over 1"
    assert set(source["files"]) == {path.name for path in checkpoints["megatron"].iterdir()}
