"""The implementation of a model of transformers: its own modules, layer by layer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pretrain.active_extensions import model_flags
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout_rules import EXPERT, SEQUENCE, TENSOR, ZERO, Rule
from pretrain.config.model_of_run import DROPOUTS
from pretrain.errors import counted
from pretrain.extensions.wrapped.decoder import Decoder
from pretrain.extensions.wrapped.file_format import conversions_from_files, file_tensors
from pretrain.model.config_keys import IGNORED
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.hf_names import TensorRule
from pretrain.model.implementation import FromFiles, LayerBytes, Shape, ToFiles
from pretrain.model.init_methods import Initialization
from pretrain.model.operator_memory import MicroBatch

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec

    from pretrain.config.plan import Plan
    from pretrain.distributed.parallel_groups import ParallelGroups
    from pretrain.model.layers.vocabulary import TrainingLoss
    from pretrain.model.recompute import Recompute

_INITIAL_VALUES = ("init_method", "output_init_method", "init_std", "mup_base_width")
_OF_EXPERTS = ("router_aux_loss", "router_z_loss", "expert_capacity_factor")


@dataclass(frozen=True)
class WrappedDecoder:
    """Implements model/implementation.py for a decoder. Equal configs have the same one."""

    decoder: Decoder
    trains_padding_row = False

    def layers(self, config: ModelConfig) -> tuple[Layer, ...]:
        return self.decoder.layers

    def settings(self, config: ModelConfig) -> Mapping[str, Any]:
        return {key: value for key, value in config.hf_config.items() if key not in IGNORED}

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        return [TensorRule(ours, parameter.shape, (theirs,))
                for (ours, parameter), theirs in zip(config.named_parameters(), config.their_names(), strict=True)]

    def head_name(self, config: ModelConfig) -> str:
        return self.decoder.layers[-1].their_names[0]

    def name_in_module(self, config: ModelConfig, name: str) -> str:
        return name

    def from_files(self, config: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[FromFiles]:
        return conversions_from_files(self.decoder.model, shapes)

    def to_files(self, config: ModelConfig, dtype: str) -> Iterator[ToFiles]:
        return file_tensors(config, self.decoder.model, dtype)

    def rules(self, plan: "Plan") -> Iterator[Rule]:
        """Parallelism inside of layers, and flags that change what a layer computes or how it starts."""
        args, layout, model = plan.args, plan.layout, plan.model
        its = f"the layers of {model.architecture} are transformers' own modules"
        for key, size in ((TENSOR, layout.tensor_parallel_size), (SEQUENCE, layout.sequence_parallel_size),
                          (EXPERT, layout.expert_parallel_size)):
            yield Rule(size > 1, key, problem=f"{its}, which cannot be divided among ranks",
                       remedy='use ZeRO, or "pipeline": {"stages": N}; remove the key')
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            yield Rule(plan.get(f"{ZERO}.{name}"), f"{ZERO}.{name}", problem=f"{its}, of which DeepSpeed's "
                       "quantization does not support all shapes", remedy="remove the key")
        yield Rule(args.document_attention, "--document_attention", problem=f"{its}, which see all tokens of a sample",
                   remedy="leave the flag out; --eod_mask_loss and --packing best_fit have an effect")
        yield Rule(args.compile_blocks, "--compile_blocks", problem=f"{its}, which may not be one graph",
                   remedy="leave the flag out")
        yield Rule(args.recompute in ("attention", "mlp"), "--recompute", "blocks or none",
                   f"{its}, which are recomputed as a whole")
        yield Rule(args.mlp_tiles > 1, "--mlp_tiles", "1", its)
        for name in _INITIAL_VALUES:
            yield Rule(getattr(args, name) != getattr(RunArguments, name), f"--{name}", problem="it has no effect: the "
                       f"_init_weights of {model.architecture} in transformers draws the initial weights",
                       remedy="leave the flag out; --model_overrides initializer_range=0.01 or the like has an effect")
        for name in DROPOUTS:
            yield Rule(getattr(args, name) is not None, f"--{name}", problem=f"it has no effect: {its}",
                       remedy="--model_overrides changes the dropouts of the config.json, under its own keys")
        for name in _OF_EXPERTS:
            yield Rule(getattr(args, name) != getattr(type(args), name), f"--{name}", problem="it has no effect: "
                       f"{its}, whose loss is the cross-entropy", remedy="leave the flag out")
        for name in model_flags(args):
            yield Rule(True, f"--{name}", problem=its, remedy="leave the flag out")

    def notes(self, plan: "Plan") -> list[str]:
        from pretrain.extensions.wrapped.read import unread_keys

        model = plan.model
        notes = [f"{model.architecture} is trained with the model's own modules: without tensor and sequence "
                 "parallelism and this program's kernels" +
                 (", so that --plain_operators has no effect" if plan.args.plain_operators else "")]
        if unread := unread_keys(model.hf_config):
            notes.append(f"{model.architecture} of transformers has no such key, and ignores it: {', '.join(unread)}")
        return notes

    def has_dropout(self, config: ModelConfig) -> bool:
        found = [value for key, value in config.hf_config.items() if "drop" in key or "noise" in key]
        return any(isinstance(value, (int, float)) and value > 0 for value in found)

    def output_std(self, config: ModelConfig, how: Initialization) -> None:
        return None

    def prove(self, config: ModelConfig, precision: str, announce: Callable[[str], None] | None = None) -> str:
        if announce is not None:
            announce("comparing a tiny copy of the model with transformers")
        from pretrain.extensions.wrapped.prove import prove_wrapped

        proof = prove_wrapped(config, precision)
        return f"on a tiny copy of {counted(proof.num_layers, 'layer')}, the loss and {proof.num_gradients} " \
               "gradients are those of transformers"

    def layer_bytes(self, config: ModelConfig, layer: Layer, batch: MicroBatch, part: str) -> LayerBytes:
        from pretrain.extensions.wrapped.layer_memory import measured_bytes

        return measured_bytes(config, self.decoder, batch).layers[layer]

    def shared_bytes(self, config: ModelConfig, batch: MicroBatch) -> int:
        from pretrain.extensions.wrapped.layer_memory import measured_bytes

        return measured_bytes(config, self.decoder, batch).arguments

    def specs(self, config: ModelConfig, *, ends_in_loss: bool, plain_operators: bool, loss: "TrainingLoss | None",
              recompute: "Recompute", groups: "ParallelGroups") -> "list[LayerSpec]":
        from pretrain.extensions.wrapped.specs import wrapped_specs

        return wrapped_specs(config, self.decoder, ends_in_loss=ends_in_loss, loss=loss, recompute=recompute)

    def initialize(self, module: nn.Module, config: ModelConfig, *, seed: int, how: Initialization) -> None:
        """Fill the parameters layer by layer, because a model of transformers draws the values of a layer together."""
        import deepspeed

        own = dict(module.named_parameters())
        for index, layer in enumerate(self.decoder.layers):
            prefix = "tied_modules.embed" if layer.tied else str(index)
            parameters = {each.name: own[f"{prefix}.{each.name}"] for each in layer.parameters
                          if f"{prefix}.{each.name}" in own}
            if not parameters or (layer.tied and layer.kind == "head"):
                continue
            partitioned = [each for each in parameters.values() if hasattr(each, "ds_id")]
            first = not partitioned or \
                deepspeed.comm.get_rank(partitioned[0].ds_process_group) == 0  # type: ignore[attr-defined]
            values = self.decoder.initial_values(layer, index, seed) if first else {}
            for name, parameter in parameters.items():
                with deepspeed.zero.GatheredParameters([parameter] if partitioned else [], modifier_rank=0), \
                        torch.no_grad():
                    if first:
                        parameter.copy_(values[name])

    def initial_buffers(self, config: ModelConfig) -> Mapping[str, torch.Tensor]:
        return {theirs: self.decoder.model.get_buffer(theirs) for _, theirs, _ in config.named_buffers()}

    def attention_name(self, config: ModelConfig) -> str:
        return f"{self.decoder.model.config._attn_implementation} of transformers"
