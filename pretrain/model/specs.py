"""The model as one list of layer specs, built as DeepSpeed's PipelineModule or as a plain module.

Both give every parameter the same name: the index of its layer in the list ("3.mlp.up.weight"), or
"tied_modules.embed.embedding" for the matrix that the first and the last layer share. Checkpoints rely on it, and
DeepSpeed's Muon, which leaves to Adam whatever has "embed" or "lm_head" in its name.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.utils import logger
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.model.config import ModelConfig
from pretrain.model.flops import block_flops_per_token, head_flops_per_token, head_to_cut_by
from pretrain.model.kernels.fused_loss import carry
from pretrain.model.layers import Block, FinalNorm, Head, LossHead, PositionEmbedding, TokenEmbedding
from pretrain.model.loss import Labels
from pretrain.model.rope import Rope

Layer = Callable[..., torch.Tensor]  # the last one also takes Labels


def _tied_head(embedding: nn.Module, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
    return embedding(x_BTD, labels)


def _tied_loss_head(embedding: TokenEmbedding, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
    return carry(x_BTD, embedding.embedding) if labels is None else embedding(x_BTD, labels)


def _tied_spec(config: ModelConfig, forward_fn: Callable[..., torch.Tensor] | None = None) -> TiedLayerSpec:
    return TiedLayerSpec("embed", TokenEmbedding, config, tied_weight_attr="embedding", forward_fn=forward_fn)


def build_specs(config: ModelConfig, *, ends_in_loss: bool = False) -> list[LayerSpec]:
    """Token embedding, learned positions if any, blocks, final norm, head. One tensor passes between layers.

    Args:
        ends_in_loss: the head passes hidden states on, and gives the loss when it is called once more with labels:
            DeepSpeed's pipeline hands these to a loss function alone.
    """
    rope = Rope(config) if config.position == "rope" else None
    tied = config.tie_word_embeddings
    specs = [_tied_spec(config) if tied else LayerSpec(TokenEmbedding, config)]
    if config.position == "learned":
        specs.append(LayerSpec(PositionEmbedding, config))
    specs += [LayerSpec(Block, config, rope) for _ in range(config.num_layers)]
    specs.append(LayerSpec(FinalNorm, config))
    # a forward_fn, though it only calls: a layer that is a module would be written to the checkpoint a second time
    if tied:
        specs.append(_tied_spec(config, forward_fn=_tied_loss_head if ends_in_loss else _tied_head))
    else:
        specs.append(LayerSpec(LossHead if ends_in_loss else Head, config))
    return specs


def _worth_recomputing(layers: list[Layer]) -> bool:
    """Only a group with a block: embeddings, norm and head keep little but their outputs."""
    return any(isinstance(layer, Block) for layer in layers)


class PipelineLM(PipelineModule):
    """The PipelineModule of a list of specs. (A class name that DeepSpeed 0.19 treats specially must not be used.)

    Its output is the last hidden states; the head turns them to the loss within the loss function, so that the logits
    need never exist as a whole.

    Args:
        config: of the model.
        work: of each layer, to be cut by instead of the layers' parameters.
    """

    def __init__(self, config: ModelConfig, work: list[int] | None, **settings: Any) -> None:
        self._work = work
        super().__init__(build_specs(config, ends_in_loss=True), activation_checkpoint_func=non_reentrant_checkpoint,
                         **settings)

    def loss_of_hidden(self, x_BTD: torch.Tensor, labels: Labels) -> torch.Tensor:
        """On the last stage, whose last layer is the head."""
        loss: torch.Tensor = self.forward_funcs[-1](x_BTD, labels)
        return loss

    def _is_checkpointable(self, funcs: list[Layer]) -> bool:
        return _worth_recomputing(funcs)

    def _count_layer_params(self) -> list[int]:
        if self._work is not None:
            return self._work
        with torch.device("meta"):  # DeepSpeed builds the whole model, layer by layer, on every rank to count it
            return super()._count_layer_params()

    @torch.no_grad()  # else autograd warns of a broadcast in the history of the tied weights
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


@contextlib.contextmanager
def _prints_to_log() -> Iterator[None]:
    """PipelineModule prints its partition; let DeepSpeed's log level decide on that too."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    for line in printed.getvalue().splitlines():
        logger.info(line)


def _work_of_layers(config: ModelConfig, seq_length: int, num_stages: int) -> list[int]:
    """FLOPs a token of each layer in `build_specs`, for cutting them into stages; look-ups and norms are nothing."""
    block, head = int(block_flops_per_token(config, seq_length)), int(head_flops_per_token(config))
    if num_stages > 1:
        head = head_to_cut_by(head, block * config.num_layers, config.num_layers, num_stages)
    return [block if spec.typename is Block else 0 for spec in build_specs(config)[:-1]] + [head]


def as_pipeline(config: ModelConfig, *, num_stages: int, seq_length: int, partition_method: str = "flops",
                activation_checkpoint_interval: int = 0) -> PipelineModule:
    """The layers of this rank's stage, uninitialised; the process group must exist and LOCAL_RANK be set.

    Args:
        seq_length: tokens; attention's share of a block's work depends on it.
        partition_method: "flops", stages of about equal work, or one of DeepSpeed's own.
        activation_checkpoint_interval: recompute every group of so many layers in the backward pass; 0: none.
            Always the non-reentrant way, whatever the JSON's `use_reentrant` says.
    """
    with _prints_to_log():
        by_flops = partition_method == "flops"  # DeepSpeed calls cutting by any weights "parameters"
        module = PipelineLM(config, _work_of_layers(config, seq_length, num_stages) if by_flops else None,
                            num_stages=num_stages, partition_method="parameters" if by_flops else partition_method)
    module.set_checkpoint_interval(activation_checkpoint_interval)
    module.loss_fn = module.loss_of_hidden
    return module


class CausalLM(nn.Module):
    """All layers in one process, with the parameter names of a PipelineModule: for ZeRO-2/3, evaluation and export."""

    def __init__(self, specs: list[LayerSpec], activation_checkpoint_interval: int = 0) -> None:
        super().__init__()
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.tied_modules = nn.ModuleDict()
        self.layers: list[Layer] = []  # in the order of execution; a plain list, so that it names no parameters
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

    def _hidden(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, D], after the final norm."""
        layers = self.layers[:-1]
        x, interval = tokens_BT, self.activation_checkpoint_interval or len(layers)
        for start in range(0, len(layers), interval):
            group = layers[start : start + interval]
            if self.activation_checkpoint_interval and torch.is_grad_enabled() and _worth_recomputing(group):
                x = checkpoint(_run, group, x, use_reentrant=False)
            else:
                x = _run(group, x)
        return x

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor | None = None,
                weights_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, T, V] of tokens alone; with labels and their weights (see loss.py) the scalar loss."""
        if labels_BT is None:
            return self.layers[-1](self._hidden(tokens_BT))
        if weights_BT is None:
            raise ValueError("forward: labels_BT without weights_BT; the loss needs both")
        return self.layers[-1](self._hidden(tokens_BT), (labels_BT, weights_BT))


def _run(layers: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def as_module(config: ModelConfig, *, activation_checkpoint_interval: int = 0) -> CausalLM:
    """The whole model as a plain module, uninitialised; under `deepspeed.zero.Init` its parameters are partitioned."""
    return CausalLM(build_specs(config), activation_checkpoint_interval)


def compile_blocks(module: nn.Module, *, seq_length: int, device: torch.device, backend: str = "inductor") -> None:
    """torch.compile every block, in place, when it is first called. Parameter names stay, and the blocks share one
    graph, so that the time to compile it does not grow with depth. (ZeRO-3's hooks split it.)
    """
    for block in module.modules():
        if isinstance(block, Block):
            if block.attention.rope is not None:  # else the first block's graph computes the tables, the others' do not
                like = torch.empty(0, dtype=next(block.parameters()).dtype, device=device)
                block.attention.rope.tables(seq_length, like)
            block.compile(backend=backend, dynamic=False)
