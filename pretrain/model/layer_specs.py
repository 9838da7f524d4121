"""The model as one list of layer specs, built as DeepSpeed's PipelineModule or as a plain module.

Parameter names are the same in both. They begin with the index of the layer in the list ("3.mlp.up.weight"). The matrix
that the first and the last layer share is "tied_modules.embed.embedding". Checkpoints rely on these names. DeepSpeed's
Muon also does: it uses Adam for parameters with "embed" or "lm_head" in their names.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import logger, set_z3_leaf_modules
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import Layer as LayerDescription
from pretrain.model.description import ModelConfig
from pretrain.model.kernels.documents import Documents
from pretrain.model.layers.block import Block
from pretrain.model.layers.norm import EmbeddingNorm, FinalNorm
from pretrain.model.layers.rope import Rope
from pretrain.model.layers.vocabulary import (
    CROSS_ENTROPY,
    Head,
    Labels,
    LossHead,
    LossTerms,
    PositionEmbedding,
    TokenEmbedding,
    TrainingLoss,
    tied_head,
    tied_loss_head,
)
from pretrain.model.parallel.sequence_shards import sum_of_shards
from pretrain.model.parallel.shared_tensors import own_shard
from pretrain.model.partition import layer_costs, stage_bounds
from pretrain.model.recompute import Recompute
from pretrain.model.run_layers import Layer, run_layers

_KEEP_ALL = Recompute()


def _ropes(config: ModelConfig) -> list[Rope | None]:
    """Return the rotary positions of each block: one object for all blocks, or one more for those with a window."""
    if config.position != "rope":
        return [None] * config.num_layers
    everywhere = Rope(config)
    if not config.local_rope_theta:
        return [everywhere] * config.num_layers
    local = Rope(config, local=True)
    return [local if config.window(index) else everywhere for index in range(config.num_layers)]


def build_specs(config: ModelConfig, *, ends_in_loss: bool = False, plain_operators: bool = False,
                loss: TrainingLoss | None = None, recompute: Recompute = _KEEP_ALL,
                groups: ParallelGroups = NO_GROUPS) -> list[LayerSpec]:
    """List the specs of the layers (ModelConfig.layers).

    Each layer takes one tensor; PositionEmbedding and Block also take the documents by name, if there are any.

    Args:
        ends_in_loss: the head returns the hidden states. Called again with labels, it returns the loss. DeepSpeed's
            pipeline passes labels only to the loss function, which makes this second call.
        plain_operators: use torch's operators instead of the custom kernels for attention and MLP.
        loss: the loss that the head computes; None: the cross-entropy.
        groups: the ranks that share matrices, sequences and experts.
    """
    return config.implementation.specs(config, ends_in_loss=ends_in_loss, plain_operators=plain_operators, loss=loss,
                                       recompute=recompute, groups=groups)


def family_specs(config: ModelConfig, *, ends_in_loss: bool, plain_operators: bool, loss: TrainingLoss | None,
                 recompute: Recompute, groups: ParallelGroups) -> list[LayerSpec]:
    """List the specs of a model of families/."""
    settings: dict[str, Any] = {"plain_operators": plain_operators, "groups": groups}
    specs: list[LayerSpec] = []
    blocks = iter(enumerate(_ropes(config)))
    for layer in config.layers():
        if layer.kind in ("embedding", "head"):
            specs.append(_vocabulary_spec(config, layer, loss, groups, ends_in_loss=ends_in_loss))
        elif layer.kind == "positions":
            specs.append(LayerSpec(PositionEmbedding, config, layer, groups))
        elif layer.kind == "norm":
            specs.append(LayerSpec({"EmbeddingNorm": EmbeddingNorm, "FinalNorm": FinalNorm}[layer.class_name],
                                   config, layer, **settings))
        else:
            index, rope = next(blocks)
            specs.append(LayerSpec(Block, config, layer, rope, index=index, recompute=recompute.part_of(index),
                                   mlp_tiles=recompute.mlp_tiles, **settings))
    return specs


def _vocabulary_spec(config: ModelConfig, layer: LayerDescription, loss: TrainingLoss | None, groups: ParallelGroups, *,
                     ends_in_loss: bool) -> LayerSpec:
    """Return the spec of the token embedding, or of the head."""
    if not layer.tied:
        classes = {"embedding": TokenEmbedding, "head": LossHead if ends_in_loss else Head}
        return LayerSpec(classes[layer.kind], config, layer, loss, groups)
    # a forward_fn, because a layer that is a module would be written to the checkpoint a second time
    of_head = tied_loss_head if ends_in_loss else tied_head
    return TiedLayerSpec("embed", TokenEmbedding, config, layer, loss, groups, tied_weight_attr="embedding",
                         forward_fn=of_head if layer.kind == "head" else None)


class PipelineLM(PipelineModule):
    """PipelineModule of a list of specs.

    Its output is the last hidden states. The loss function calls the head on them, so that the logits are never
    materialized. Rename this class with care: DeepSpeed 0.19.8 treats some class names specially
    (runtime/pipe/module.py, _is_checkpointable).

    Args:
        specs: layers that end in the loss.
        bounds: pipeline stage i holds the layers bounds[i] to bounds[i + 1] - 1.
    """

    sequence = NO_GROUPS.sequence  # sequence-parallel ranks have the plain module

    def __init__(self, specs: list[LayerSpec], bounds: list[int], recompute: Recompute, **settings: Any) -> None:
        self._bounds, self._recompute = bounds, recompute
        super().__init__(specs, **settings)

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Compute this pipeline stage. With documents, inputs and outputs are (x, positions_BT).

        The last stage returns only the hidden states.
        """
        if torch.is_tensor(inputs):
            return run_layers(self.forward_funcs, inputs, None, self._recompute)
        x, positions_BT = inputs
        x = run_layers(self.forward_funcs, x, Documents(positions_BT), self._recompute)
        return x if self.stage_id == self.num_stages - 1 else (x, positions_BT)

    def loss_of_hidden(self, x_BTD: torch.Tensor, labels: Labels) -> torch.Tensor:
        """Compute the loss on the last pipeline stage, whose last layer is the head."""
        loss: torch.Tensor = self.forward_funcs[-1](x_BTD, labels)
        return loss

    def _partition_layers(self, method: str = "") -> None:
        self.parts, stage = self._bounds, self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    @torch.no_grad()  # without it autograd warns about a broadcast in the history of the tied weights
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


@contextlib.contextmanager
def _prints_to_log() -> Iterator[None]:
    """Send what PipelineModule prints to DeepSpeed's logger, so that the log level applies."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    for line in printed.getvalue().splitlines():
        logger.info(line)


def as_pipeline(config: ModelConfig, *, num_stages: int, seq_length: int, partition_method: str = "flops",
                layer_times: tuple[int, ...] = (), recompute: Recompute = _KEEP_ALL, plain_operators: bool = False,
                loss_terms: LossTerms = CROSS_ENTROPY, groups: ParallelGroups = NO_GROUPS) -> PipelineModule:
    """Build the layers of this rank's pipeline stage, uninitialized. Needs the process group and LOCAL_RANK.

    Args:
        seq_length: tokens; the FLOPs of attention depend on it.
        partition_method: how the layers are divided (model/partition.py).
        layer_times: ns of each layer, for the method "time".
        recompute: what is recomputed in the backward pass. `forward` does so itself, whatever DeepSpeed sets in its
            attribute activation_checkpoint_interval.
        plain_operators: use torch's operators instead of the custom kernels for attention and MLP.
        loss_terms: terms of the training loss in addition to the cross-entropy.
        groups: the ranks that share matrices, sequences and experts.
    """
    loss = TrainingLoss(loss_terms, plain_operators=plain_operators)
    tensor_size = groups.tensor.size
    topology = PipeModelDataParallelTopology(
        num_pp=num_stages, num_mp=tensor_size,
        num_dp=torch.distributed.get_world_size() // (num_stages * tensor_size)) if tensor_size > 1 else None
    with _prints_to_log():
        specs = build_specs(config, ends_in_loss=True, plain_operators=plain_operators, loss=loss, recompute=recompute,
                            groups=groups)
        bounds = stage_bounds(layer_costs(config, seq_length), num_stages=num_stages, method=partition_method,
                              times=layer_times)
        module = PipelineLM(specs, bounds, recompute, num_stages=num_stages, topology=topology)
    module.loss_fn, module.training_loss = module.loss_of_hidden, loss
    return module


class CausalLM(nn.Module):
    """Plain module of all layers, with the parameter names of a PipelineModule: for ZeRO-2/3, evaluation and export."""

    training_loss: TrainingLoss

    def __init__(self, specs: list[LayerSpec], recompute: Recompute = _KEEP_ALL,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.recompute, self.sequence = recompute, groups.sequence
        self.tied_modules = nn.ModuleDict()
        self.layers: list[Layer] = []  # in execution order; not a ModuleList, which would rename parameters
        for index, spec in enumerate(specs):
            self.layers.append(self._build(index, spec))

    def _build(self, index: int, spec: LayerSpec) -> Layer:
        if not isinstance(spec, TiedLayerSpec):
            self.add_module(str(index), spec.build())
            return self.get_submodule(str(index))
        if spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = spec.build()
        module = self.tied_modules[spec.key]
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    def _hidden(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states [B, T, D] after the final norm."""
        documents = None if positions_BT is None else Documents(positions_BT)
        return run_layers(self.layers[:-1], own_shard(tokens_BT, self.sequence), documents, self.recompute)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor | None = None,
                weights_BT: torch.Tensor | None = None, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [B, T, V], or with labels and their weights (see loss.py) the scalar loss.

        Under sequence parallelism, all ranks of a group get the same complete sequences, and return the same loss, or
        the logits of their shards.

        Args:
            positions_BT: int64 positions of the tokens inside their documents (kernels/documents.py). Then a token sees
                only the tokens of its document.
        """
        hidden_BTD = self._hidden(tokens_BT, positions_BT)
        if labels_BT is None:
            return self.layers[-1](hidden_BTD)
        if weights_BT is None:
            raise ValueError("forward() got labels_BT without weights_BT; the loss needs both")
        labels = own_shard(labels_BT, self.sequence), own_shard(weights_BT, self.sequence)
        return sum_of_shards(self.layers[-1](hidden_BTD, labels), self.sequence)

    def row_losses(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor,
                   positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of each row of the batch, [B] fp32: the sum of weight * cross-entropy over its tokens."""
        rows = zip(self._hidden(tokens_BT, positions_BT).split(1), labels_BT.split(1), weights_BT.split(1), strict=True)
        return torch.stack([self.layers[-1](x_1TD, (labels_1T, weights_1T)) for x_1TD, labels_1T, weights_1T in rows])


def as_module(config: ModelConfig, *, recompute: Recompute = _KEEP_ALL, plain_operators: bool = False,
              loss_terms: LossTerms = CROSS_ENTROPY, groups: ParallelGroups = NO_GROUPS) -> CausalLM:
    """Build the complete model, uninitialized; under `deepspeed.zero.Init` its parameters are partitioned."""
    loss = TrainingLoss(loss_terms, plain_operators=plain_operators)
    specs = build_specs(config, plain_operators=plain_operators, loss=loss, recompute=recompute, groups=groups)
    module = CausalLM(specs, recompute, groups)
    module.training_loss = loss
    return module


def gather_complete_blocks(module: nn.Module) -> None:
    """Let ZeRO-3 gather the parameters of a layer together, before the layer is called. Call it before `initialize`.

    Otherwise DeepSpeed's hooks gather the parameters of each linear layer and norm inside of it. No compiler can trace
    them there; linear.column_products computes several layers at once, and shared_tensors.summed_gradients needs all.
    """
    set_z3_leaf_modules(module, [layer for layer in (Block, EmbeddingNorm, FinalNorm)
                                 if any(isinstance(each, layer) for each in module.modules())])


def compile_blocks(module: nn.Module, *, seq_length: int, device: torch.device,
                   backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward function of every block, at its first call. Parameter names do not change.

    All blocks share one graph, so that the compile time does not grow with depth. Module.compile would also trace the
    hooks of the block, which gather and release its parameters under ZeRO-3. A block that cannot be traced as a single
    graph raises an error (fullgraph).
    """
    for block in module.modules():
        if isinstance(block, Block):
            if block.attention.rope is not None:  # compute the tables first: all blocks then have the same graph
                like = torch.empty(0, dtype=next(block.parameters()).dtype, device=device)
                block.attention.rope.tables(seq_length, like)
            setattr(block, "compute", torch.compile(  # noqa: B010 (mypy forbids to assign a method)
                block.compute, backend=backend, dynamic=False, fullgraph=True))
            block.is_compiled = True
