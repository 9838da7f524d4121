"""One rank of tests/distributed/test_sanity.py: check a healthy run, or one with a planted bug.

The cases have the format of `worker.py`. A case also has "plant", a function of this file that patches the code, and
"steps", the most steps in which one batch must be learned.
"""

import contextlib
import functools
import time
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from deepspeed import DeepSpeedEngine
from deepspeed.utils import groups

from pretrain.analysis.sanity.result import table_lines
from pretrain.analysis.sanity.run_checks import run_checks
from pretrain.data.loader import Loader
from pretrain.engine import build
from tests.distributed.workers.worker import Case, plan_of
from tests.support.cases_loop import each_case


def shifted_labels() -> Any:
    """The labels are the tokens themselves."""
    def step(self: Loader, consumed_samples: int) -> Any:
        return [(tokens, (tokens, weights)) for tokens, (_, weights) in right(self, consumed_samples)]

    right = Loader.step
    return mock.patch.object(Loader, "step", step)


def frozen_layer() -> Any:
    """The parameters of one block need no gradient."""
    def initialize(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        right(module, *args, **kwargs)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("3."))

    right = build.initialize_parameters
    return mock.patch.object(build, "initialize_parameters", initialize)


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

    return mock.patch.multiple("pretrain.model.layers.attention", causal_attention=attend,
                               can_attend_in_c=lambda *_: False)


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
