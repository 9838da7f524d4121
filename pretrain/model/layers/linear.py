"""Linear layers of the model."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.model.kernels.linear import linear


class Linear(nn.Linear):
    """Linear layer without torch's initialization: initialize_parameters or a checkpoint fills it.

    Args:
        plain_operators: use torch's operators instead of the custom kernels.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, plain_operators: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.plain_operators = plain_operators

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) if self.plain_operators else linear(x, self.weight, self.bias)
