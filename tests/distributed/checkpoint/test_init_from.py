"""--init_from starts every layout from the weights of a transformers folder or of another run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.hf_folder import check_hf_folder
from pretrain.checkpoint.load.reader import CheckpointReader, HFWeights
from tests.support.cases import NO_NVME, case, flags, nvme, nvme_param
from tests.support.first_batch import first_batch
from tests.support.launch import train_ranks
from tests.support.layouts import dp2, fp16, pp2, relative_difference, run_layouts, tensor2

STEPS, SAMPLES, SEQ_LENGTH = 3, 8, 64
MODELS = {
    "llama": LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=192, max_position_embeddings=128),
    "gpt2": GPT2Config(vocab_size=256, n_embd=96, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0),
}


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write a transformers folder of random weights with a large standard deviation, so that its loss is its own."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    model.to(dtype).save_pretrained(folder, **settings)
    return folder


def loss_of_transformers(folder: Path, corpus: str) -> float:
    """Return the loss of the first global batch, computed by transformers in fp32."""
    tokens, labels = first_batch(corpus, split="80,20,0", seq_length=SEQ_LENGTH, samples=SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()))


TRAINED = {"trained_pipeline": pp2(1), "trained_zero2_fp16": fp16(dp2(2))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {"llama": write_model("llama", base / "llama", max_shard_size="300KB"),
            "llama_fp16": write_model("llama", base / "llama_fp16", torch.float16),
            "gpt2_bf16": write_model("gpt2", base / "gpt2_bf16", torch.bfloat16)}


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("init_from")
    (base / "swap").mkdir()
    run_flags = {name: value for name, value in flags(corpus, steps=STEPS).items() if not name.startswith("model")}
    swap = {"offload_optimizer": nvme(base / "swap"), "offload_param": nvme_param(base / "swap")}
    trained = base / "2" / "run-trained"
    cases = {
        "pipeline": (pp2(1), "llama"),
        "zero2": (dp2(2), "gpt2_bf16"),
        "zero3": (dp2(3), "llama"),
        "zero3_bf16": (dp2(3, precision="bf16"), "llama_fp16"),
        "zero1_fp16": (fp16(pp2(1)), "gpt2_bf16"),
        "tensor2_zero3": (tensor2(3), "gpt2_bf16"),
    }
    if not NO_NVME:
        cases["nvme"] = (dp2(3, **swap), "llama")

    def start(name: str, values: dict[str, Any], weights: Path) -> tuple[int, dict[str, Any]]:
        given = {**run_flags, "init_from": str(weights), "emulate_fp16": "fp16" in values}
        return 2, case(name, "start_from_weights", values, given)

    runs = {name: start(name, values, folders[source]) for name, (values, source) in cases.items()}
    # a run of two steps, and runs that start from its checkpoint in another layout
    runs["trained"] = (2, case("trained", "train_and_save", dp2(3, precision="bf16"), {
        **run_flags, "init_from": str(folders["gpt2_bf16"])}, saved_step=2))
    for name, values in TRAINED.items():
        runs[name] = start(name, values, trained)
    found = run_layouts(runs, base)
    for name, result in found.items():
        result["source"] = folders[cases[name][1]] if name in cases else trained
    return found


@pytest.mark.parametrize("name", [
    "pipeline", "zero2", "zero3", "tensor2_zero3", "zero3_bf16", "zero1_fp16",
    pytest.param("nvme", marks=pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}"))])
def test_a_run_starts_from_a_transformers_folder(name: str, results: dict[str, Any], corpus: str) -> None:
    """The first loss is transformers', and the master weights are exactly the folder's."""
    result = results[name]
    within = 3e-3 if name.endswith(("bf16", "fp16")) else 1e-5
    assert relative_difference(result["loss"][:1], [loss_of_transformers(result["source"], corpus)]) <= within
    assert result["loss"][-1] < result["loss"][0]
    assert result["counters"][0] == STEPS
    saved, source = CheckpointReader(Path(result["folder"])), HFWeights(check_hf_folder(result["source"]))
    assert saved.shapes == source.shapes
    assert all(torch.equal(saved.tensor(parameter), source.tensor(parameter)) for parameter in saved.shapes)
    origin = read_manifest(Path(result["folder"])).origin
    assert origin is not None
    assert origin["name"] == str(result["source"])


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_run_starts_from_the_weights_of_another_run(name: str, results: dict[str, Any]) -> None:
    result, trained = results[name], Path(results["trained"]["folder"])
    saved, source = CheckpointReader(Path(result["folder"])), CheckpointReader(trained)
    assert saved.shapes == source.shapes
    assert all(torch.equal(saved.tensor(parameter), source.tensor(parameter)) for parameter in saved.shapes)
    states = [(parameter, state) for parameter in saved.shapes for state in saved.states if state != "fp32"]
    assert not any(saved.tensor(parameter, state).any() for parameter, state in states)
    assert any(source.tensor(parameter, "exp_avg").any() for parameter in source.shapes)
    assert result["counters"][0] == STEPS
    assert result["lr"] == results["zero3"]["lr"]
    assert relative_difference(result["loss"], results["trained_pipeline"]["loss"]) <= 5e-3
    origin = read_manifest(Path(result["folder"])).origin
    assert origin is not None
    assert origin["folder"] == str(trained)


def start_with_wrong_weight(folder: Path, name: str, corpus: str, values: dict[str, Any], *,
                            flips_bit: bool) -> list[str]:
    """Train from folder/hf with one weight that has a flipped bit, or is NaN, on two ranks, one of which reads it.

    Returns exit code and output of each rank.
    """
    tensors = load_file(folder / "hf" / "model.safetensors")
    if flips_bit:
        tensors[name].view(torch.int16)[3, 5] ^= 1 << 14  # the highest bit of the exponent
    else:
        tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    (folder / "ds.json").write_text(json.dumps(values))
    return start(folder, corpus, init_from="hf")


def start(folder: Path, corpus: str, **given: Any) -> list[str]:
    given = {"train_data": corpus, "split": "80,20,0", "seq_length": SEQ_LENGTH, "train_steps": 3,
             "deepspeed_config": "ds.json", "save": "run", **given}
    done = train_ranks(2, [f"--{name}={value}" for name, value in given.items()], folder)
    assert not any("Traceback" in process.stdout for process in done)
    return [f"{process.returncode}: {process.stdout}" for process in done]


def test_weights_with_nan_are_rejected_on_all_ranks(folders: dict[str, Path], corpus: str, tmp_path: Path) -> None:
    shutil.copytree(folders["gpt2_bf16"], tmp_path / "hf")
    name = "transformer.h.1.mlp.c_fc.weight"
    outputs = start_with_wrong_weight(tmp_path, name, corpus, dp2(3), flips_bit=False)
    assert [output[:2] for output in outputs] == ["2:", "2:"]
    assert f"hf: model.safetensors: {name}[3, 5]: this weight is nan. Load" in outputs[0]


def test_a_flipped_bit_is_named_and_a_gradient_of_0(corpus: str, tmp_path: Path) -> None:
    """The square of the value is infinite, so that the last norm makes zeros of all others."""
    write_model("llama", tmp_path / "hf", torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    output, _ = start_with_wrong_weight(tmp_path, name, corpus, dp2(3), flips_bit=True)
    assert re.search(rf"warning: \S*hf has absurd weights: model.safetensors: {name}\[3, 5\] is -?\d\.\d+e\+3\d, and "
                     r"the others have a root mean square of 0\.03", output), output
    assert "warning: step 1: the gradient norm is exactly 0, so that nothing is learned: " in output
    output, _ = start(tmp_path, corpus, train_steps=4)
    assert re.search(r"warning: \S*global_step3 has absurd weights: 2.mlp.down.weight\[3, 5\] is ", output), output
    assert "warning: step 4: the gradient norm is exactly 0" in output
