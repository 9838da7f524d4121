"""One rank of tests/extensions/sanity/test_sanity.py: check a healthy run, or one with a planted bug.

The cases have the format of `worker.py`. A case also has "plant", a function of this file that patches the code, and
"steps", the most steps in which one batch must be learned.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from pretrain.data.loader import Loader
from pretrain.engine import build, examine
from pretrain.engine.steps import loss_scale
from pretrain.extensions.sanity.extension import table_lines
from pretrain.extensions.sanity.run_checks import run_checks
from pretrain.model.kernels.torch_attention import ATTENTION
from pretrain.model.layers.block import Block
from pretrain.model.layers.vocabulary import PositionEmbedding, TokenEmbedding, TrainingLoss
from tests.distributed.workers.worker import Case, plan_of
from tests.support.cases_loop import each_case
from tests.support.operators import by_torch


def shifted_labels() -> Any:
    """The labels are the tokens themselves."""
    def step(self: Loader, consumed_samples: int) -> Any:
        return [(tokens, (tokens, weights)) for tokens, (_, weights) in right(self, consumed_samples)]

    right = Loader.step
    return mock.patch.object(Loader, "step", step)


def _changed_module(change: Callable[[torch.nn.Module], None]) -> Any:
    """Change each module after its parameters got their values."""
    def initialize(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        right(module, *args, **kwargs)
        with torch.no_grad():
            change(module)

    right = build.initialize_parameters
    return mock.patch.object(build, "initialize_parameters", initialize)


def _changed_labels(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Change labels and weights inside the model's loss."""
    def loss(self: TrainingLoss, x: torch.Tensor, weight: torch.Tensor, labels: Any, **others: Any) -> torch.Tensor:
        return right(self, x, weight, change(*labels), **others)

    right = TrainingLoss.__call__
    return mock.patch.object(TrainingLoss, "__call__", loss)


def _changed_outputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the output of each block."""
    right = Block.forward
    return mock.patch.object(Block, "forward", lambda *args, **kwargs: change(right(*args, **kwargs)))


def frozen_layer() -> Any:
    """The parameters of one block need no gradient."""
    def change(module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("3."))

    return _changed_module(change)


def labels_shifted_twice() -> Any:
    """The model's loss shifts the labels, as the models of transformers do."""
    return _changed_labels(lambda labels_BT, weights_BT: (labels_BT.roll(-1, 1), weights_BT))


def mean_of_micro_batch() -> Any:
    """The model's loss is the mean over the tokens of the micro-batch."""
    return _changed_labels(lambda labels_BT, weights_BT: (labels_BT, weights_BT / weights_BT.sum()))


def batch_norm() -> Any:
    """The blocks normalize over the samples of the micro-batch."""
    return _changed_outputs(lambda x_BTD: (x_BTD - x_BTD.mean(0)) / (x_BTD.var(0, correction=0) + 1e-5).sqrt())


def unit_matrices() -> Any:
    """The matrices of the blocks have torch.nn.init.normal_'s standard deviation, 1."""
    def change(module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2 and ".weight" in name and (".attention." in name or ".mlp." in name):
                torch.nn.init.normal_(parameter)

    return _changed_module(change)


def norms_from_zero() -> Any:
    """The weights of the norms are offsets from 1, as Gemma's, but the norms add no 1."""
    def change(module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.zero_()

    return _changed_module(change)


class _LayerScale(torch.nn.Module):
    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return 1e-6 * x_BTD


def layer_scale() -> Any:
    """The outputs of attention and MLP are scaled by 1e-6, the initial value of LayerScale."""
    def change(module: torch.nn.Module) -> None:
        for block in [part for part in module.modules() if isinstance(part, Block)]:
            block.dropout = _LayerScale()  # type: ignore[assignment]

    return _changed_module(change)


def local_norm() -> Any:
    """Each rank clips by the norm of its own gradients."""
    def local(self: Any, gradients: list[torch.Tensor], *_: Any) -> torch.Tensor:
        return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()

    return mock.patch.object(DeepSpeedZeroOptimizer, "get_grad_norm_direct", local)


def norm_with_loss_scale() -> Any:
    """The gradients are clipped by the norm of the scaled ones."""
    right = DeepSpeedEngine.get_global_grad_norm
    return mock.patch.object(DeepSpeedEngine, "get_global_grad_norm", lambda self: right(self) * loss_scale(self))


def wrong_sign() -> Any:
    """The optimizer adds its updates instead of subtracting them."""
    right = examine.set_learning_rate
    return mock.patch.object(examine, "set_learning_rate", lambda engine, lr: right(engine, -lr))


def dropout_without_mode() -> Any:
    """`F.dropout` without `training=self.training` also drops in evaluation mode."""
    return _changed_outputs(lambda x_BTD: F.dropout(x_BTD, 0.5))


def positions_instead_of_tokens() -> Any:
    """The embedding gets another variable: the model ignores its input."""
    def embed(self: TokenEmbedding, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tokens.is_floating_point():
            tokens = torch.arange(tokens.shape[1]).expand_as(tokens)
        return right(self, tokens, *args, **kwargs)

    right = TokenEmbedding.forward
    return mock.patch.object(TokenEmbedding, "forward", embed)


def label_in_head() -> Any:
    """The output layer adds the embedding of the label, which a model may do for scheduled sampling."""
    def loss(self: TrainingLoss, x: torch.Tensor, weight: torch.Tensor, labels: Any, **others: Any) -> torch.Tensor:
        label_BTD = F.rms_norm(F.embedding(labels[0], weight), x.shape[-1:])
        return right(self, x + label_BTD, weight, labels, **others)

    right = TrainingLoss.__call__
    return mock.patch.object(TrainingLoss, "__call__", loss)


def positions_of_batch() -> Any:
    """Positions are counted through the rows of the micro-batch: the rows have learned vectors of their own."""
    def add(self: PositionEmbedding, x_BTD: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x_BTD.shape[0] * x_BTD.shape[1]) % len(self.embedding)
        return x_BTD + F.embedding(positions.view(x_BTD.shape[:2]), self.embedding)

    return mock.patch.object(PositionEmbedding, "forward", add)


def unseeded_weights() -> Any:
    """The initial weights come from a generator that is seeded once, not for each model."""
    def initialize(*args: Any, seed: int, **kwargs: Any) -> None:
        right(*args, seed=seed + next(models), **kwargs)

    right, models = build.initialize_parameters, itertools.count()
    return mock.patch.object(build, "initialize_parameters", initialize)


def unseeded_order() -> Any:
    """Each loader shuffles the samples in another way."""
    def init(self: Loader, *args: Any, **kwargs: Any) -> None:
        right_init(self, *args, **kwargs)
        self.planted = next(loaders)  # type: ignore[attr-defined]

    def step(self: Loader, consumed_samples: int) -> Any:
        return right_step(self, consumed_samples + 16 * self.planted)  # type: ignore[attr-defined]

    right_init, right_step, loaders = Loader.__init__, Loader.step, itertools.count()
    return mock.patch.multiple(Loader, __init__=init, step=step)


def wrong_loss_scale() -> Any:
    """DeepSpeed's defect A: the gradients are divided by a loss scale that the loss was not multiplied by."""
    return mock.patch("pretrain.engine.patches.apply.scale_loss_at_stage_0")


def unnormalized_accumulation() -> Any:
    """The gradients of the micro-batches are summed instead of averaged."""
    right = DeepSpeedEngine.backward
    return mock.patch.object(DeepSpeedEngine, "backward", functools.partialmethod(right, scale_wrt_gas=False))


def eval_mode() -> Any:
    """Nothing returns to training mode after an evaluation."""
    return mock.patch.object(DeepSpeedEngine, "train", lambda self, mode=True: self)


def decay_on_norms() -> Any:
    """All parameters are in one group."""
    return mock.patch.object(build, "_parameter_groups", lambda module, plan: [{"params": list(module.parameters())}])


def no_causal_mask() -> Any:
    """Each token sees all tokens."""
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    stack = contextlib.ExitStack()
    stack.enter_context(by_torch(ATTENTION))
    stack.enter_context(mock.patch("pretrain.model.kernels.torch_attention.torch_causal_attention", attend))
    return stack


def wrong_vocabulary() -> Any:
    """The validation of the run does not compare the data with the vocabulary."""
    return mock.patch("pretrain.data.run_data.check_prepared_data", return_value=None)


def wrong_end() -> Any:
    """The data's .meta.json names another end-of-document token than the documents have."""
    return mock.patch("pretrain.data.run_data.check_prepared_data", return_value=255)


def nothing() -> Any:
    """A healthy run, or one with wrong settings."""
    return contextlib.nullcontext()


rate_too_high = rate_too_low = nothing


def check(case: Case) -> dict[str, Any]:
    """Return the results by name, and the time of all checks in seconds."""
    began = time.perf_counter()
    with globals()[case["plant"]]():
        results = run_checks(plan_of(case), build.build_engine, steps=case["steps"])
    groups.mpu = None
    return {"results": {result.check: asdict(result) for result in results},
            "seconds": time.perf_counter() - began, "table": table_lines(results)}


if __name__ == "__main__":
    each_case(check)
