"""The first training batch of a run, for comparisons with transformers."""

import torch

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.loader import Loader
from pretrain.data.open_datasets import open_datasets


def first_batch(prefix: str, *, split: str, seq_length: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [samples, seq_length] of the first global batch of a run with the default seed."""
    dataset = open_datasets(parse_data_spec(prefix, split=split), seq_length=seq_length, seed=1234)["train"]
    loader = Loader(dataset, micro_batch_size=samples, gradient_accumulation_steps=1, data_parallel_rank=0,
                    data_parallel_size=1, eod_token=None)
    [(tokens, (labels, _))] = loader.step(0)
    loader.close()
    return tokens, labels
