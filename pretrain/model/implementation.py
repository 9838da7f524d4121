"""Build a model: the protocol of a family of this package, and of a decoder of transformers that is wrapped.

`ModelConfig` says what a model is, in sizes and choices. Its `implementation` says what only the code of the model can:
its layers and their parameters, their names in files, initial weights, memory, and what a run with it may not use.
There are two implementations. A model of families/ is computed by this project's layers (family_model.py). For another
config.json an extension may have one, as extensions do that compute with modules of transformers.

No method imports torch unless it says so: a run is validated without.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan
    from pretrain.distributed.parallel_groups import ParallelGroups
    from pretrain.model.description import Layer, ModelConfig
    from pretrain.model.hf_names import TensorRule
    from pretrain.model.init_methods import Initialization
    from pretrain.model.layers.vocabulary import TrainingLoss
    from pretrain.model.operator_memory import MicroBatch
    from pretrain.model.recompute import Recompute

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FromFiles:
    """Tensors of weights files that belong together, and the tensors of transformers' model that they become."""

    sources: tuple[str, ...]  # names in the files
    targets: Mapping[str, Shape]  # by name in transformers' model
    # computes the targets from the tensors of the files; None: the only source is the only target
    convert: "Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]] | None" = None


@dataclass(frozen=True)
class ToFiles:
    """Tensors of weights files that are written together: those of one rule, or converted ones."""

    targets: Mapping[str, tuple[str, Shape]]  # by name in the files: "fp32", "bf16" or "fp16", and the shape
    rule: "TensorRule | None"  # of the parameter that becomes the targets; None: see `convert`
    sources: tuple[str, ...] = ()  # names in transformers' model
    # computes the targets from the complete tensors `sources`, by name
    convert: "Callable[[dict[str, torch.Tensor]], Iterable[torch.Tensor]] | None" = None


@dataclass(frozen=True)
class LayerBytes:
    """Memory of a layer for one micro-batch in bytes, without its output and its parameters."""

    saved: int  # what the forward pass keeps for the backward pass
    saved_input: int = 0  # of it, the layer's input
    forward_peak: int = 0  # of the head's forward pass, with `saved`
    backward: int = 0  # what the backward pass of a block or head allocates at its peak beyond `saved`


class Implementation(Protocol):
    """The code of a model. Methods get the config, because flags change it (dropouts)."""

    # whether the row of the padding token in the embedding has a gradient; transformers' own modules give it none
    trains_padding_row: bool

    def layers(self, config: "ModelConfig") -> "tuple[Layer, ...]":
        """List the layers in the order in which they compute; always the same objects."""

    def settings(self, config: "ModelConfig") -> Mapping[str, Any]:
        """Return the keys of the config.json that the model depends on, if the fields of ModelConfig are not all."""

    # names and tensors in weights files

    def tensor_rules(self, config: "ModelConfig") -> "list[TensorRule]":
        """List the rules of all parameters, in the order of the layers, without a tied head."""

    def head_name(self, config: "ModelConfig") -> str:
        """Return the name of the head's matrix in transformers' model."""

    def name_in_module(self, config: "ModelConfig", name: str) -> str:
        """Return the parameter of the installed transformers' model that a tensor of a rule is, experts excepted."""

    def from_files(self, config: "ModelConfig", shapes: Mapping[str, Shape]) -> Iterable[FromFiles]:
        """Yield the conversions of the tensors in weights files, by name. Those that the model ignores are left out.

        May import torch. Raises ValueError with the name of a tensor that cannot be converted.
        """

    def to_files(self, config: "ModelConfig", dtype: str) -> Iterable[ToFiles]:
        """Yield all tensors that weights files in a dtype ("fp32" ...) have, in their order. May import torch."""

    # rules and messages of a run

    def rules(self, plan: "Plan") -> "Iterable[Rule]":
        """Yield the combinations of settings that this model excludes."""

    def notes(self, plan: "Plan") -> list[str]:
        """Return what is to be known about a run with this model, in `check` and at the start."""

    def has_dropout(self, config: "ModelConfig") -> bool:
        """Return whether the model draws random numbers in training."""

    def output_std(self, config: "ModelConfig", how: "Initialization") -> float | None:
        """Return the initial standard deviation of the head's matrix; None if it is unknown."""

    def prove(self, config: "ModelConfig", precision: str, announce: Callable[[str], None] | None = None) -> str:
        """Prove on one rank, before a run, that the model computes what it should. Returns in words what was proved.

        "": there was nothing to prove. May import torch. Raises ConfigError.

        Args:
            precision: of the run: fp32, bf16 or fp16.
            announce: is called with what is being done.
        """

    # memory

    def layer_bytes(self, config: "ModelConfig", layer: "Layer", batch: "MicroBatch", part: str) -> LayerBytes:
        """Return the memory of a layer. May import torch. Raises ConfigError if it is unknown.

        Args:
            part: the part of a block that is recomputed: "attention", "mlp" or "none".
        """

    def shared_bytes(self, config: "ModelConfig", batch: "MicroBatch") -> int:
        """Return the bytes of masks and tables that all blocks of a rank share. May import torch."""

    # the modules; all of these import torch

    def specs(self, config: "ModelConfig", *, ends_in_loss: bool, plain_operators: bool, loss: "TrainingLoss | None",
              recompute: "Recompute", groups: "ParallelGroups") -> "list[LayerSpec]":
        """List the specs of the layers. The arguments are those of layer_specs.build_specs."""

    def initialize(self, module: "nn.Module", config: "ModelConfig", *, seed: int, how: "Initialization") -> None:
        """Fill the parameters of a module with initial values: see model/init.py, initialize_parameters."""

    def initial_buffers(self, config: "ModelConfig") -> "Mapping[str, torch.Tensor]":
        """Return the first values of the buffers in checkpoints, by name in transformers' model."""

    def attention_name(self, config: "ModelConfig") -> str:
        """Return the operator that computes attention on a GPU; "": the run chooses it."""
