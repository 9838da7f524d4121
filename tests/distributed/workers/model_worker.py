"""One of two gloo ranks of tests/model/test_layouts.py: compare every layout with the plain module, write the results.

Arguments: a folder for the results, with config.jsons: all/NAME/config.json is compared in one pipeline stage and with
shards of sequences, and shapes/NAME/config.json in all layouts. The caller sets RANK etc.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankGroup
from pretrain.engine.patches.apply import has_defect
from pretrain.engine.patches.pipeline import divide_gradients_at_the_loss
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module, as_pipeline
from pretrain.model.recompute import Recompute

LENGTH = 20  # tokens
SEED = 7


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels and weights of a global batch: 4 samples of 20 tokens, a third of them masked."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (4, LENGTH + 1), generator=generator)
    mask = (torch.rand(4, 20, generator=generator) > 0.33).float()
    return tokens[:, :-1], tokens[:, 1:], mask / mask.sum()


def reference(config: ModelConfig) -> tuple[nn.Module, float]:
    """Return the plain module with the gradients of the global batch, and its loss."""
    module = as_module(config)
    initialize_parameters(module, config, seed=SEED)
    loss = module(*batch(config))
    loss.backward()
    return module, loss.item()


def ds_config(stage: int) -> dict[str, object]:
    return {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def zero3(config: ModelConfig) -> dict[str, object]:
    """Compare initial weights, loss and gradients of a module under zero.Init with the plain module."""
    plain, plain_loss = reference(config)
    settings = ds_config(3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        module = as_module(config, recompute=Recompute(interval=2))
    initialize_parameters(module, config, seed=SEED)
    names = [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    equal = True
    for (_, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([mine]):
            equal = equal and torch.equal(mine, theirs)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    engine, *_ = deepspeed.initialize(model=module, config=settings, optimizer=optimizer)
    rank = deepspeed.comm.get_rank()
    tokens, labels, weights = (part[2 * rank : 2 * rank + 2] for part in batch(config))
    loss = engine(tokens, labels, 2 * weights)  # times 2, because the engine takes the mean over ranks
    engine.backward(loss)
    worst = max((safe_get_full_grad(mine) - theirs.grad).abs().max().item()
                for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True))
    losses = loss.detach().clone()
    deepspeed.comm.all_reduce(losses)
    engine.step()
    return {"names": names, "initial_equal": equal, "worst_gradient": worst, "loss": losses.item() / 2,
            "plain_loss": plain_loss}


def pipeline(config: ModelConfig) -> dict[str, object]:
    """Compare loss and weights after one SGD step on two pipeline stages with the plain module."""
    plain, plain_loss = reference(config)
    stage = as_pipeline(config, num_stages=2, seq_length=LENGTH, recompute=Recompute(interval=2))
    initialize_parameters(stage, config, seed=SEED)
    initial = {name: value.clone() for name, value in stage.state_dict().items()}
    optimizer = torch.optim.SGD(stage.parameters(), 1.0)  # SGD has no state, so weights differ only if gradients differ
    engine, *_ = deepspeed.initialize(model=stage, config=ds_config(0), optimizer=optimizer)
    if has_defect("AG"):
        divide_gradients_at_the_loss(engine)
    tokens, labels, weights = batch(config)
    micro_batches = [(tokens[at : at + 2], (labels[at : at + 2], 2 * weights[at : at + 2])) for at in (0, 2)]
    loss = engine.train_batch(iter(micro_batches))
    torch.optim.SGD(plain.parameters(), 1.0).step()
    expected = plain.state_dict()
    worst = max((value - expected[name]).abs().max().item() for name, value in stage.state_dict().items())
    return {"initial": initial, "loss": loss.item(), "plain_loss": plain_loss, "worst_weight": worst}


def one_stage(config: ModelConfig) -> dict[str, object]:
    """Return the weights and the loss of a pipeline of one stage, and the loss of the plain module."""
    _, plain_loss = reference(config)
    module = as_pipeline(config, num_stages=1, seq_length=LENGTH, recompute=Recompute(interval=1))
    initialize_parameters(module, config, seed=SEED)
    tokens, labels, weights = batch(config)
    loss = module.loss_fn(module(tokens), (labels, weights)).item()
    return {"state": module.state_dict(), "loss": loss, "plain_loss": plain_loss}


def shards_of_sequences(config: ModelConfig, groups: ParallelGroups) -> list[dict[str, float]]:
    """Compare loss and gradients of two ranks that share each sequence with one rank's; then the same with documents.

    The gradients belong to the sum of the loss over the ranks' shards.
    """
    found = []
    for positions in (None, (torch.arange(LENGTH) % 7).expand(4, LENGTH)):
        losses, gradients = [], []
        for own in (NO_GROUPS, groups):
            module = as_module(config, groups=own)
            initialize_parameters(module, config, seed=SEED)
            loss = module(*batch(config), positions)
            loss.backward()
            losses.append(loss.item())
            gradients.append([parameter.grad for parameter in module.parameters()])
        for gradient in gradients[1]:
            deepspeed.comm.all_reduce(gradient, group=groups.sequence.handle)
        worst = max((mine - theirs).norm().item() / theirs.norm().item()
                    for theirs, mine in zip(*gradients, strict=True) if theirs.norm() > 1e-6)
        found.append({"plain_loss": losses[0], "loss": losses[1], "worst_gradient": worst})
    return found


def read_configs(folder: Path) -> dict[str, ModelConfig]:
    return {path.name: load_model_config(str(path)) for path in sorted(folder.iterdir())}


def main() -> None:
    results = Path(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    seen: dict[str, object] = {}
    configs = read_configs(results / "shapes")
    for name, config in configs.items():
        seen[f"{name}/zero3"] = zero3(config)
    for name, config in configs.items():  # last, because no other engine can be built after a PipelineModule
        seen[f"{name}/pipeline"] = pipeline(config)
    groups = ParallelGroups(sequence=RankGroup(2, deepspeed.comm.get_rank(), deepspeed.comm.new_group([0, 1])))
    for name, config in read_configs(results / "all").items():
        seen[f"{name}/one_stage"] = one_stage(config)
        if config.num_heads % 2 == 0:
            seen[f"{name}/sequence"] = shards_of_sequences(config, groups)
    torch.save(seen, results / f"rank{deepspeed.comm.get_rank()}.pt")
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
