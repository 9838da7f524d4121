"""Decoders of transformers train as transformers' own: loss and gradients of a tiny copy of each config.

The default tests prove some model types, the slow ones all of them, and that the results are those of
decoders.csv of the extension. Models with faults are rejected, with the place of the fault.
"""

import csv
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pretrain.errors import ConfigError
from pretrain.extensions.wrapped import main as models
from pretrain.extensions.wrapped.all_decoders import VALUES, ModelResult, prove_all, prove_model_type
from pretrain.extensions.wrapped.extension import their_model_types
from pretrain.extensions.wrapped.prove import prove_wrapped, tiny_config
from pretrain.extensions.wrapped.read import wrapped_config
from pretrain.extensions.wrapped.runner import digits_of, ids_of
from pretrain.extensions.wrapped.tiny import tiny_copy
from pretrain.model.config import model_config_from
from pretrain.model.own_models import default_values, import_own_model
from tests.extensions.wrapped.unusual_sizes import unusual_config
from tests.support.broken_models import crash, hang
from tests.support.hf_models import needs_transformers
from tests.support.launch import ROOT

TABLE = (ROOT / "pretrain/extensions/wrapped/decoders.csv").read_text(encoding="utf-8")
FAULTY = "tests.support.broken_models:FaultyConfig"
# what is special about each of them
EXAMPLES = {
    "deepseek_v3": "latent attention, groups of experts, first layers without experts", "gpt_oss": "windows, sinks",
    "glm4_moe": "partial rotary positions", "granitemoehybrid": "Mamba-2, attention, experts, scaled logits",
    "cohere2": "tied head, layers without positions", "falcon": "one key head, parallel residual",
    "opt": "learned positions with an offset", "codegen": "layers that return tuples",
    "qwen3_next": "gated delta rule", "lfm2_moe": "short convolutions", "mamba2": "no attention",
    "gemma4_text": "inputs of each layer that depend on the tokens",
    "deepseek_v4": "streams of hidden states, experts that the token ids choose",
    "llama4_text": "ids that the model moves", "gpt_neo": "masks inside the layers", "apertus": "trained activations"}


# not in older versions of transformers, or with other configs there
NEWER = {"gemma4_text", "deepseek_v4", "gpt_neo"}


@pytest.mark.parametrize("model_type", [
    pytest.param(name, marks=needs_transformers("5.20", "it does not have this model") if name in NEWER else ())
    for name in EXAMPLES])
def test_examples_train_as_in_transformers(model_type: str) -> None:
    result = prove_model_type(model_type)
    assert (result.wrapped, result.reason) == (True, "")


@needs_transformers("5.20", "its xLSTM fails in another way")
def test_a_model_that_mixes_dtypes_trains_in_fp32_only() -> None:
    """xLSTM of transformers 5.23 multiplies an fp32 matrix and a bf16 one."""
    config = tiny_config(CONFIG_MAPPING["xlstm"]())
    with pytest.raises(ConfigError, match="trains in fp32, and not in bf16: RuntimeError"):
        prove_wrapped(config, "bf16")
    assert prove_wrapped(config).difference < 1e-5


def test_token_ids_survive_in_16_bits() -> None:
    ids = torch.tensor([[0, 1, 255, 256, 65_535, 65_536, 262_143, 2**24 - 1]])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(ids_of(digits_of(ids, dtype)), ids)


def test_a_family_of_ours_is_proved_in_both_ways() -> None:
    result = prove_model_type("qwen3_moe")
    assert (result.own_family, result.wrapped) == (True, True), result.reason


def _published() -> dict[str, str]:
    """Return how each model_type of the published table trains."""
    rows = csv.DictReader(line for line in TABLE.splitlines() if not line.startswith("#"))
    return {row["model_type"]: row["trains_as"] for row in rows}


def test_the_published_table_has_all_decoders_and_at_least_60_train() -> None:
    table = _published()
    assert sum(how != "no" for how in table.values()) >= 60
    page = (ROOT / "pretrain/extensions/wrapped/README.md").read_text(encoding="utf-8").partition("Wrapped are")[2]
    assert re.findall("`([^`]*)`", page) == [name for name, how in table.items() if how == "wrapped"]
    if f"transformers {version('transformers')}," not in TABLE:
        pytest.skip("the table is of another version of transformers")
    assert set(table) == their_model_types()


@pytest.mark.slow
def test_the_verdicts_are_those_of_the_published_table() -> None:
    """About three minutes."""
    results = {result.model_type: result for result in prove_all(sorted(their_model_types()))}
    assert {name: models._how(result) for name, result in results.items()} == _published()


@pytest.mark.parametrize(("model_type", "changes", "expected"), [
    ("deepseek_v3", {}, {"num_hidden_layers": 5, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
                         "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    ("gemma3_text", {}, {"num_hidden_layers": 12, "sliding_window": 8, "head_dim": 32}),
    ("jamba", {"num_hidden_layers": 64}, {"num_hidden_layers": 13}),
    ("falcon", {}, {"num_kv_heads": 4, "num_hidden_layers": 2}),
    ("qwen3", {"num_hidden_layers": 48}, {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 8, "eos_token_id": [151645, 151643], "max_position_embeddings": 40960},
     {"num_key_value_heads": 2, "eos_token_id": [99, 98], "vocab_size": 100, "max_position_embeddings": 64})])
def test_tiny_copies_keep_the_kinds_of_layers_and_the_relations_of_sizes(
        model_type: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    tiny = tiny_copy(CONFIG_MAPPING[model_type](**changes)).to_dict()
    assert {key: tiny[key] for key in expected} == expected


_SIX_HEADS = {"vocab_size": 120, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
              "intermediate_size": 72, "num_hidden_layers": 2, "max_position_embeddings": 64, "mamba_d_state": 8,
              "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# sizes that the copy with the usual sizes cannot have
UNUSUAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 6, "mamba_d_head": 16,
                         "mamba_n_groups": 3, "num_local_experts": 6, "num_experts_per_tok": 5,
                         "shared_intermediate_size": 40},
    "glm4_moe": {"head_dim": 12, "partial_rotary_factor": 0.5, "n_routed_experts": 18, "n_group": 3, "topk_group": 2,
                 "num_experts_per_tok": 6, "moe_intermediate_size": 12, "first_k_dense_replace": 1}}


@pytest.mark.parametrize("model_type", UNUSUAL)
@needs_transformers("5.20", "its configs have other checks")
def test_sizes_that_divide_in_the_model_alone_are_proved(model_type: str) -> None:
    """The numbers of heads, groups and experts have factors that the usual tiny sizes lack."""
    config = model_config_from({**_SIX_HEADS, **UNUSUAL[model_type], "model_type": model_type}, "config.json")
    assert prove_wrapped(config).difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@needs_transformers("5.20", "it has other models")
def test_all_wrapped_decoders_with_unusual_sizes_are_proved(part: int) -> None:
    """Every model that transformers can build with 6 heads, 3 groups or 18 experts trains, if its defaults do."""
    rejected = {}
    for model_type in [name for name, how in _published().items() if how != "no"][part::4]:
        try:
            config = wrapped_config(unusual_config(model_type, VALUES.get(model_type, {})), model_type)
        except ConfigError:  # sizes that this model does not have
            continue
        try:
            prove_wrapped(config)
        except ConfigError as error:
            rejected[model_type] = str(error)
    assert rejected == {}


def _faulty(fault: str) -> dict[str, Any]:
    import_own_model(FAULTY, None)
    return {**default_values(FAULTY), "fault": fault}


def test_a_model_of_own_code_is_proved() -> None:
    proof = prove_wrapped(model_config_from(_faulty(""), "mine"))
    assert (proof.num_layers, proof.without_gradient) == (2, ())
    assert proof.difference < 1e-5


@pytest.mark.parametrize(("fault", "message"), [
    ("between", r"layers\.1 must get the hidden states that layers\.0 returned"),
    ("factor", r"the argument factor of layers\.1 \(Tensor\) depends on what decoder layers before it"),
    ("twice", r"each of the 6 modules must be called exactly once, in order")])
def test_models_that_are_no_stack_of_layers_are_rejected(fault: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from(_faulty(fault), "mine")


@pytest.mark.parametrize(("fault", "message"), [
    ("detach", r"gradients of the plain module differ.*the first is layers\.0\.\S+, by .*; the outputs of all decoder "
               r"layers are equal"),
    ("no gradient", r"gradients of the plain module differ.*the first is layers\.0\.\S+, by"),
    ("sees later tokens", r"logits depend on later tokens"),
    ("is random", r"other logits each time"),
    ("other loss", r"the loss of transformers' model is not the mean cross-entropy")])
def test_models_that_train_in_another_way_are_rejected(fault: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prove_wrapped(model_config_from(_faulty(fault), "mine"))


def test_the_first_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is between the layers 1 and 2, where a tensor changes in place. The tiny copy needs three layers."""
    monkeypatch.setattr("pretrain.extensions.wrapped.tiny._depth", lambda model, depths: (6, 6))
    with pytest.raises(ConfigError, match=r"the loss of the plain module is .* the first layer whose output differs is "
                                          r"layers\.2, by"):
        prove_wrapped(model_config_from(_faulty("between, in place"), "mine"))


def test_crashes_and_hangs_of_a_proof_are_verdicts() -> None:
    (crashed,), (hung,) = (list(prove_all(["gpt2"], proof=proof, seconds=1)) for proof in (crash, hang))
    assert "its process ended with exit code 3" in crashed.reason
    assert "no result after 1 s" in hung.reason


def _run(*words: str) -> int:
    sys.argv = ["ds-pretrain models", *words]
    return models.main()


def test_the_command_lists_families_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    printed = capsys.readouterr().out
    assert re.search(r"^llama3-8b +llama +8,030,261,248 +32 +4,096 +128,256$", printed, re.MULTILINE)
    families, _, _ = printed.partition("\n\n")
    assert "qwen3_moe" in families
    assert max(map(len, printed.splitlines())) <= 80


def test_the_command_writes_a_table_and_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    def without_processes(names: list[str]) -> list[ModelResult]:
        return [ModelResult(name, wrapped=name != "bert", reason="a|b" if name == "bert" else "") for name in names]

    monkeypatch.setattr("pretrain.extensions.wrapped.all_decoders.prove_all", without_processes)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- table -->\nold\n<!-- end of the table -->\n\nmore\n")
    assert _run("--prove", "opt", "bert", "--output", str(page)) == 2
    assert "1 of 2 model types train" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- table -->\n1 of 2 model types train: transformers ")
    assert "| `bert` | no | a\\|b |\n| `opt` | wrapped |  |\n<!-- end of the table -->\n\nmore\n" in text
    table = tmp_path / "decoders.csv"
    assert _run("--prove", "opt", "bert", "--output", str(table)) == 2
    assert table.read_text().splitlines()[1:] == ["model_type,trains_as,remark", "bert,no,a|b", "opt,wrapped,"]
    assert _run("--prove", "opt") == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--output", "x.md"], "--output: it has no effect without --prove"),
    (["--prove", "gpt_os"], 'Did you mean "gpt_oss"'),
    (["--prove", "opt", "--output", "/nowhere/x.md"], "--output: there is no folder /nowhere")])
def test_wrong_flags_are_rejected(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _run(*words)
