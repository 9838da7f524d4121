"""Two ranks that share a vocabulary compare embeddings, head and loss with the layers that have all words."""

from dataclasses import replace

import torch
import torch.distributed as dist

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankOrder, create_group
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layers.vocabulary import LossHead, PositionEmbedding, TokenEmbedding, TrainingLoss
from pretrain.model.parallel.shared_tensors import own_shard
from pretrain.model.parameters import part_of

GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64,
        "embd_pdrop": 0.0, "tie_word_embeddings": False}
ROWS, TOKENS = 2, 24
CASES = {"plain": (0.0, LossTerms()), "soft-cap": (3.0, LossTerms()),
         "all terms": (2.0, LossTerms(label_smoothing=0.1, z_loss=0.01))}


class _Model(torch.nn.Module):
    """Embeddings and a head, and the embedding matrix as a second, tied head."""

    def __init__(self, config: ModelConfig, terms: LossTerms, groups: ParallelGroups) -> None:
        super().__init__()
        self.loss = TrainingLoss(terms)
        layers = {layer.kind: layer for layer in config.layers()}
        self.embed = TokenEmbedding(config, layers["embedding"], self.loss, groups)
        self.positions = PositionEmbedding(config, layers["positions"], groups)
        self.head = LossHead(config, layers["head"], self.loss, groups)
        self.double()
        initialize_parameters(self, config, seed=3)

    def forward(self, tokens_BT: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor],
                documents: Documents | None) -> tuple[torch.Tensor, ...]:
        x_BTD = self.positions(self.embed(tokens_BT), documents)
        hidden = self.head(x_BTD * 4)  # of a pipeline: its backward function delivers the head's gradients
        return x_BTD, self.embed(x_BTD, labels), self.head(hidden, labels)


def _batch(config: ModelConfig) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Documents]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, config.vocab_size, (2, ROWS, TOKENS), generator=generator)
    weights = torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    weights[0, 5:] = 0.0
    positions = torch.cat([torch.arange(10), torch.arange(TOKENS - 10)]).expand(ROWS, TOKENS)
    return tokens, (labels, weights), Documents(positions.contiguous())


def _compare(config: ModelConfig, terms: LossTerms, groups: ParallelGroups, *, with_documents: bool) -> None:
    whole, shared = _Model(config, terms, NO_GROUPS), _Model(config, terms, groups)
    tokens, labels, documents = _batch(config)
    outputs = []
    for model in (whole, shared):
        outputs.append(model(tokens, labels, documents if with_documents else None))
        (outputs[-1][1] + 2 * outputs[-1][2]).backward()
    torch.testing.assert_close(outputs[1][0], own_shard(outputs[0][0], groups.tensor), rtol=0, atol=0)
    torch.testing.assert_close(outputs[1][1:], outputs[0][1:], rtol=1e-12, atol=0)
    squares = [model.loss.take_squares() for model in (whole, shared)]
    torch.testing.assert_close(squares[1], squares[0], rtol=1e-12, atol=0)
    for (name, complete), parameter in zip(whole.named_parameters(), shared.parameters(), strict=True):
        part = part_of(parameter)
        assert (part is None) == (name == "positions.embedding"), name
        own = (lambda x: x) if part is None else part.of
        torch.testing.assert_close(parameter, own(complete), rtol=0, atol=0)
        assert complete.grad is not None
        torch.testing.assert_close(parameter.grad, own(complete.grad), rtol=1e-9, atol=1e-12)


def main() -> None:
    dist.init_process_group("gloo")
    groups = ParallelGroups(tensor=create_group(RankOrder(tensor=2).groups_along("tensor")))
    for softcap, terms in CASES.values():
        config = replace(model_config_from(GPT2, "the test"), logit_softcap=softcap, head_bias=True)
        for with_documents in (False, True):
            _compare(config, terms, groups, with_documents=with_documents)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
