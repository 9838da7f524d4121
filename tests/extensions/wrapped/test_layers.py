"""Wrapped decoders: transformers' modules, layer by layer, compute what transformers' own model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pretrain.checkpoint.load.hf_folder import check_hf_folder
from pretrain.checkpoint.load.reader import HFWeights
from pretrain.errors import ConfigError
from pretrain.extensions.wrapped.parts import UnknownPartsError, find_parts
from pretrain.extensions.wrapped.read import unread_keys
from pretrain.model import own_models
from pretrain.model.config import load_model_config, model_config_from
from pretrain.model.hf_weights import to_transformers
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_specs import CausalLM, as_module, build_specs
from pretrain.model.layers.vocabulary import TrainingLoss
from pretrain.model.own_models import import_own_model
from pretrain.model.skeleton import create_skeleton
from tests.support import own_model
from tests.support.hf_models import needs_transformers
from tests.support.rejection import rejection
from tests.support.wrapped_models import WRAPPED_MODELS

TOLERANCE = 1e-5  # tolerance of a gradient's largest value, fp32
OWN = "tests.support.own_model:MyConfig"


@pytest.fixture(autouse=True)
def no_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_models, "_own_models", {})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids_BT = torch.randint(3, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()


def their_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens_BT, labels_BT = batch()
    loss = F.cross_entropy(model(input_ids=tokens_BT).logits.flatten(0, 1), labels_BT.flatten())
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(module: nn.Module, loss: torch.Tensor, theirs: Any) -> None:
    """Compare loss and all gradients with those of transformers' model with the same weights."""
    expected, gradients = their_gradients(theirs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    own = {name: parameter.grad for name, parameter in module.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert len(own) == len(gradients) > 10
    for name, gradient in zip(own, (gradients[name] for name in module.config.their_names()), strict=True):
        assert (own[name] - gradient).abs().max() <= TOLERANCE * largest, name


def modules(values: dict[str, Any]) -> tuple[CausalLM, CausalLM]:
    """Return the plain module, and the layers of a pipeline, with the same initial weights."""
    config = model_config_from(values, "test")
    plain, pipeline = as_module(config), CausalLM(build_specs(config, ends_in_loss=True))
    for module in (plain, pipeline):
        initialize_parameters(module, config, seed=3)
        module.config = config
    return plain, pipeline


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=needs_transformers("5.20", "it does not have this model") if name == "gemma4_text" else ())
    for name in WRAPPED_MODELS])
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    plain, pipeline = modules(WRAPPED_MODELS[name])
    values = dict(WRAPPED_MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    found = theirs.load_state_dict(to_transformers(dict(plain.named_parameters()), plain.config), strict=False)
    assert found.unexpected_keys == []
    tokens_BT, labels_BT = batch()
    labels = labels_BT, torch.full(labels_BT.shape, 1 / labels_BT.numel())
    loss = plain(tokens_BT, *labels)
    loss.backward()
    assert_equal(plain, loss, theirs)
    loss = pipeline.layers[-1](pipeline(tokens_BT), labels)  # as DeepSpeed calls the layers and the loss function
    loss.backward()
    theirs.zero_grad()
    assert_equal(pipeline, loss, theirs)


@pytest.mark.parametrize("name", ["opt", "mamba2"])
def test_weights_of_a_transformers_folder_are_read(name: str, tmp_path: Path) -> None:
    values = dict(WRAPPED_MODELS[name])
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values),
                                              dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    weights = HFWeights(check_hf_folder(tmp_path))
    for (ours, _), name in zip(weights.config.named_parameters(), weights.config.their_names(), strict=True):
        assert torch.equal(weights.tensor(ours), theirs.get_parameter(name)), name


def test_initial_weights_depend_on_the_seed_and_the_layer_alone() -> None:
    config = model_config_from(WRAPPED_MODELS["granite"], "test")
    first, other = as_module(config), as_module(config)
    initialize_parameters(first, config, seed=3)
    specs = build_specs(config)[2:3]  # a pipeline stage has some of the layers
    alone = specs[0].build()
    holder = nn.Module()
    holder.add_module("2", alone)
    initialize_parameters(holder, config, seed=3)
    initialize_parameters(other, config, seed=4)
    name = "layer.mlp.up_proj.weight"
    assert torch.equal(alone.get_parameter(name), first.get_parameter(f"2.{name}"))
    assert not torch.equal(first.get_parameter(f"2.{name}"), first.get_parameter(f"3.{name}"))
    assert not torch.equal(first.get_parameter(f"2.{name}"), other.get_parameter(f"2.{name}"))
    assert float(first.get_parameter(f"2.{name}").detach().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(label_smoothing=0.1, z_loss=1e-2)])
def test_the_loss_of_logits_is_the_fused_loss(terms: LossTerms) -> None:
    torch.manual_seed(0)
    x_BTD, weight_VD = torch.randn(2, 5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(0, 30, (2, 5)), torch.rand(2, 5)
    fused, given = TrainingLoss(terms, plain_operators=True), TrainingLoss(terms)
    losses = fused(x_BTD, weight_VD, labels), given.of_logits(x_BTD @ weight_VD.t(), labels)
    gradients = [torch.autograd.grad(loss, (x_BTD, weight_VD)) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    squares = fused.take_squares(), given.take_squares()
    assert (squares[0] is None) == (squares[1] is None) == (terms.z_loss == 0)
    if squares[0] is not None:
        torch.testing.assert_close(*squares)


def test_16_bit_layers_keep_the_dtype_of_their_buffers() -> None:
    module = as_module(model_config_from(WRAPPED_MODELS["deepseek_v3"], "test")).bfloat16()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}
    assert module(batch()[0]).dtype == torch.bfloat16


def test_dropout_between_the_embedding_and_the_first_layer_is_applied_once() -> None:
    """CodeGen has nothing else there, and in evaluation mode nothing at all."""
    values = {"model_type": "codegen", "vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4,
              "n_positions": 32, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    assert all(layer.class_name != "EmbeddingNorm" for layer in
               model_config_from({**values, "embd_pdrop": 0.0}, "test").layers())
    config = model_config_from({**values, "embd_pdrop": 0.5}, "test")
    module = as_module(config)
    initialize_parameters(module, config, seed=3)
    embedded = module.layers[1](module.layers[0](batch()[0]))
    assert float((embedded == 0).float().mean()) == pytest.approx(0.5, abs=0.1)
    module.eval()
    assert not (module.layers[1](module.layers[0](batch()[0])) == 0).any()


@needs_transformers("5.20", "it does not read the older key of the windows")
def test_published_configs_with_keys_of_other_programs_are_read() -> None:
    """Transformers ignores them. Other names of known keys, and keys that older versions wrote, are read."""
    published = {"layer_switch": 2, "use_parallel_block": True, "sliding_window_pattern": 2, "num_heads": 4,
                 "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float16", "pretraining_tp": 1}
    values = {**WRAPPED_MODELS["cohere"], **published, "model_type": "cohere2"}
    config = model_config_from(values, "test")
    assert unread_keys(config.hf_config) == ["layer_switch", "use_parallel_block", "num_heads", "pretraining_tp"]
    assert [layer.window for layer in config.layers() if layer.kind == "block"][1] == 0
    assert "quantization_config" not in config.hf_config  # the weights of a run are not quantized


class TokenDependentLayers(own_model.MyForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, decay=hidden[:, :, :1] * hidden[:, :1, :1])
        return self.lm_head(self.norm(hidden)),


class ScaledBetweenLayers(own_model.MyForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, decay=torch.eye(input_ids.shape[1])) * 0.5
        return self.lm_head(self.norm(hidden)),


class LayersTwice(own_model.MyForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden, decay=torch.eye(input_ids.shape[1]))
        return self.lm_head(self.norm(hidden)),


class FailingForward(own_model.MyForCausalLM):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.config.missing


class UnusedModule(own_model.MyForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.Linear(4, 4)


class DirectParameter(own_model.MyForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(("model_class", "problem"), [
    (TokenDependentLayers, "the argument decay of layers.1 (Tensor) depends on what decoder layers before it"),
    (ScaledBetweenLayers, "layers.1 must get the hidden states that layers.0 returned; it gets something else"),
    (LayersTwice, "each of the 3 modules must be called exactly once, in order; called were layers.0, layers.1"),
    (FailingForward, "the forward function failed with AttributeError: .*missing.* (test_layers.py:"),
    (UnusedModule, "extra is not called for text, but has parameters"),
    (DirectParameter, "the parameter gain belongs to the module that contains the decoder layers")])
def test_other_models_are_rejected_with_what_was_found(model_class: Any, problem: str) -> None:
    with pytest.raises(UnknownPartsError, match=f"layers: {problem}".replace("(", r"\(").replace(")", r"\)")):
        find_parts(create_skeleton(own_model.MyConfig(), model_class))


def test_a_model_of_the_users_code_computes_what_it_computes_alone() -> None:
    import_own_model(OWN, None)
    config = load_model_config(OWN, "hidden_size=16,num_hidden_layers=2,scale=0.25")
    assert config.num_layers == 2
    module = as_module(config)
    initialize_parameters(module, config, seed=3)
    alone = own_model.MyForCausalLM(own_model.MyConfig(hidden_size=16, num_hidden_layers=2, scale=0.25))
    alone.load_state_dict(to_transformers(dict(module.named_parameters()), config))
    torch.testing.assert_close(module(batch()[0]), alone(batch()[0]).logits)


@pytest.mark.parametrize(("model", "code", "problem"), [
    ("missing_module:MyConfig", None, "--model missing_module:MyConfig: there is no module missing_module in "),
    ("tests.support.own_model:MyConfg", None,
     "has no subclass MyConfg of transformers' PreTrainedConfig. Did you mean \"MyConfig\"?"),
    ("tests.support.own_model:MyLayer", None, "has no subclass MyLayer of transformers' PreTrainedConfig"),
    ("transformers:LlamaConfig", None, 'found model_type "llama" in LlamaConfig; expected a name that no model'),
    ("folder", "own_model", "--model_code: found 'own_model'; expected MODULE:CONFIG_CLASS"),
    (OWN, "tests.support.own_model:Other", "--model / --model_code: found two classes"),
    ("tests.support.wrapped_models:WRAPPED_MODELS", None, "has no subclass WRAPPED_MODELS")])
def test_wrong_model_code_is_rejected(model: str, code: str | None, problem: str) -> None:
    assert problem in rejection(import_own_model, model, code)


def test_a_module_without_a_model_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_model.py").write_text("from transformers import PreTrainedConfig\n"
                                          "class LonelyConfig(PreTrainedConfig):\n    model_type = 'lonely'\n")
    (tmp_path / "broken.py").write_text("from tests.support.own_model import MyForCausalLM, MyConfig\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="found no PreTrainedModel with config_class = LonelyConfig in "):
        import_own_model("no_model:LonelyConfig", None)
    with pytest.raises(ConfigError, match=r"the import of broken failed: ZeroDivisionError: .*broken.py:2"):
        import_own_model("broken:MyConfig", None)


@pytest.mark.parametrize(("changes", "overrides", "problem"), [
    ({"embeding_multiplier": 2.0}, None, "embeding_multiplier: this is not a key of a granite config"),
    ({}, "embeding_multiplier=2", "--model_overrides embeding_multiplier: this is not a key of a granite config.json"),
    ({}, "hidden_size=x", "--model_overrides hidden_size: found 'x'; expected a whole number"),
    ({}, "model_type=olmo", "--model_overrides model_type: this is not a key"),
    ({"num_attention_heads": "four"}, None, "transformers cannot build this model: "),
    ({"model_type": "granitee"}, None, 'model_type: found "granitee"'),
    ({"model_type": "t5"}, None, 'model_type: found "t5"')])
def test_wrong_configs_are_rejected(changes: dict[str, Any], overrides: str | None, problem: str,
                                    tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**WRAPPED_MODELS["granite"], **changes}))
    assert problem in rejection(load_model_config, str(path), overrides)
