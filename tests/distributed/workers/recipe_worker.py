"""One rank of tests/distributed/test_recipe.py: clipping, loss terms and noise scale of an engine, and of autograd.

The cases have the format of `worker.py`.
"""

import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretrain.checkpoint.format.fragments import flat_tensors
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.model_of_run import initialization_of
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.engine.recipe import recipe_values, router_values
from pretrain.engine.steps import data_parallel_rank, eval_batch, grad_norm, open_loader, train_batch
from pretrain.engine.update_guard import guard_updates
from pretrain.engine.update_statistics import GradientStats
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.moe import MoE
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, state_hash
from tests.support.cases_loop import each_case


def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return a copy of all fp32 weights by name, flattened, from the parts on all ranks."""
    pieces = [(fragment.name, math.prod(fragment.shape), fragment.start,
               flat.parameter.detach().view(-1).narrow(0, fragment.offset, fragment.length).float().cpu().clone())
              for flat in flat_tensors(engine) for fragment in flat.fragments]
    complete: dict[str, torch.Tensor] = {}
    for name, size, start, piece in (piece for rank in gather(pieces) for piece in rank):
        complete.setdefault(name, torch.zeros(size)).narrow(0, start, len(piece)).copy_(piece)
    return complete


def unequal(micro_batches: list[MicroBatch], seed: int) -> list[MicroBatch]:
    """Give the tokens unequal weights, and mask a quarter of them."""
    generator = torch.Generator().manual_seed(seed)
    for _, (_, weights_BT) in micro_batches:
        factor = torch.rand(weights_BT.shape, generator=generator)
        weights_BT.mul_(2 * factor * (factor > 0.25))
    return micro_batches


def reference(plan: Plan, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """Compute gradient and cross-entropy by torch's operators, with the terms that the flags ask for, in fp32."""
    module = as_module(plan.model)
    initialize_parameters(module, plan.model, seed=plan.args.seed, how=initialization_of(plan.args))
    routers: list[torch.Tensor] = []  # logits of each layer with experts
    for layer in module.modules():
        if isinstance(layer, MoE):
            layer.router.register_forward_hook(lambda module, inputs, logits: routers.append(logits))
    loss, squares, micro_norms, means = 0.0, 0.0, [], torch.zeros(2)
    total = {name: torch.zeros(p.numel()) for name, p in module.named_parameters()}
    for tokens, (labels, weights_BT) in micro_batches:
        logits = module(tokens).flatten(0, 1)
        balance, router_squares = losses_of_routers(plan, routers)
        routers.clear()
        router_losses = (plan.args.router_aux_loss or 0) * balance + plan.args.router_z_loss * router_squares
        means += torch.stack((balance, router_squares)).detach() / len(micro_batches)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none",
                                 label_smoothing=plan.args.label_smoothing)
        log_z = torch.logsumexp(logits, 1)
        module.zero_grad()
        (torch.dot(losses + plan.args.z_loss * log_z ** 2, weights_BT.flatten()) + router_losses).backward()
        with torch.no_grad():
            plain = F.cross_entropy(logits, labels.flatten(), reduction="none")
            loss += float(torch.dot(plain, weights_BT.flatten())) / len(micro_batches)
            squares += float(torch.dot(log_z ** 2, weights_BT.flatten())) / len(micro_batches)
        micro_norms.append(sum(float(p.grad.norm()) ** 2 for p in module.parameters()))
        for name, p in module.named_parameters():
            total[name] += p.grad.flatten() / len(micro_batches)
    return {"loss": loss, "z_loss": plan.args.z_loss * squares, "gradient": total, "micro_norms": micro_norms,
            "routers": means.tolist()}


def losses_of_routers(plan: Plan, logits: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both losses, means over the layers, by transformers' function and by the formula of ST-MoE."""
    if not logits:
        return torch.zeros(()), torch.zeros(())
    balance = [load_balancing_loss_func((layer,), plan.model.num_experts, plan.model.experts_per_token)
               for layer in logits]
    squares = [torch.log(layer.exp().sum(1)).square().mean() for layer in logits]
    return torch.stack(balance).mean(), torch.stack(squares).mean()


def norm_of(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in gradient.values()))


def clipped(gradient: dict[str, torch.Tensor], plan: Plan) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradient after both kinds of clipping, and its norm between them."""
    limit = plan.args.gradient_value_clipping or math.inf
    gradient = {name: tensor.clamp(-limit, limit) for name, tensor in gradient.items()}
    norm, largest = norm_of(gradient), plan.ds_config["gradient_clipping"]
    factor = min(1.0, largest / (norm + 1e-6)) if largest else 1.0
    return {name: tensor * factor for name, tensor in gradient.items()}, norm


def one_step(case: Case) -> dict[str, Any]:
    """Train one step and compare it with autograd; then a step with an infinite gradient, which must be skipped.

    The optimizer is Adam with betas 0, epsilon 1 and learning rate 1. It subtracts u = g / (|g| + 1) from the weights,
    and so g = u / (1 - |u|) is the gradient that it got.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    guard_updates(engine)
    stats, loader = GradientStats(engine), open_loader(engine, plan, "train")
    own = unequal(loader.step(0), seed=data_parallel_rank(engine))
    batches = dict(gather((data_parallel_rank(engine), own)))
    before = weights(engine)
    loss = float(train_batch(engine, own))
    stats.observe()
    update = {name: before[name] - tensor for name, tensor in weights(engine).items()}
    wanted = reference(plan, [batch for rank in sorted(batches) for batch in batches[rank]])
    gradient, norm = clipped(wanted["gradient"], plan)
    error = norm_of({name: u / (1 - u.abs()) - gradient[name] for name, u in update.items()}) / norm_of(gradient)
    result = {"error": error, "routers": [router_values(engine, plan.model.num_layers), wanted["routers"]],
              "loss": [loss, wanted["loss"]], "norm": [grad_norm(engine), norm], "stats": stats.take(),
              "values": recipe_values(engine), "z_loss": wanted["z_loss"], "micro_norms": wanted["micro_norms"],
              "raw_norm": norm_of(wanted["gradient"]), "optimizer": type(engine.optimizer).__name__,
              "evaluation": gather(float(eval_batch(engine, loader.step(0))))}
    result["skipped"] = infinite_step(engine, loader.step(plan.layout.global_batch_size))
    loader.close()
    end(engine)
    return result


def infinite_step(engine: deepspeed.DeepSpeedEngine, micro_batches: list[MicroBatch]) -> list[int]:
    """Train a step in which one rank has an infinite gradient. Return the skipped steps of each rank."""
    parameter = next(p for name, p in engine.module.named_parameters() if "mlp" in name)
    hook = parameter.register_hook(lambda grad: torch.full_like(grad, math.inf))
    train_batch(engine, micro_batches)
    hook.remove()
    return gather(engine.skipped_steps)


def observed_steps(engine: deepspeed.DeepSpeedEngine, plan: Plan, first: int, last: int) -> dict[str, list[Any]]:
    """Train steps; return losses, norms and the clipping limits that each rank had."""
    loader, stats = open_loader(engine, plan, "train"), GradientStats(engine)
    rows: dict[str, list[Any]] = {"loss": [], "norm": [], "limits": [], "clipped": [], "noise_scale": []}
    for step in range(first, last):
        rows["loss"].append(float(train_batch(engine, loader.step(step * plan.layout.global_batch_size))))
        stats.observe()
        rows["norm"].append(grad_norm(engine))
        taken = stats.take()
        rows["limits"].append(gather(taken["clip_norm"]))
        rows["clipped"].append(taken["clip_rate"])
        rows["noise_scale"].append(recipe_values(engine).get("noise_scale"))
    loader.close()
    return rows


def resumed(case: Case) -> dict[str, Any]:
    """Train, save in the middle, and resume; with "from", resume from the checkpoint of another case instead."""
    plan = plan_of(case)
    half = plan.train_steps // 2
    engine = engine_of(plan)
    guard_updates(engine)
    result: dict[str, Any] = {}
    if "from" not in case:
        result["head"] = observed_steps(engine, plan, 0, half)
        folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=half,
                                 consumed_samples=half * plan.layout.global_batch_size, versions={}).folder
        result["tail"] = observed_steps(engine, plan, half, plan.train_steps)
        result["folder"], result["states"] = str(folder), [state_hash(engine)]
        end(engine)
        engine = engine_of(plan)
        guard_updates(engine)
        observed_steps(engine, plan, 0, 1)  # so that the load must replace the state
    folder = Path(f"run-{case['from']}/checkpoints/global_step{half}") if "from" in case else folder
    load_checkpoint(engine, plan, folder, read_manifest(folder))
    result["again"] = observed_steps(engine, plan, half, plan.train_steps)
    result.setdefault("states", []).append(state_hash(engine))
    end(engine)
    return result


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
