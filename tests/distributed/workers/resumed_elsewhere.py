"""Other programs that resume from an export: a plain DeepSpeed loop and transformers.Trainer. One rank.

Program `resumed_elsewhere.py CASES.json RESULTS.json`, which imports nothing of this project. A case: {"name",
"program" ("plain" or "trainer"), "export" (a folder), "config" (DeepSpeed JSON), "samples" (an .npy file [samples,
tokens]), "from" and "to" (steps), "arguments" (of TrainingArguments), "save_at", "client_state"
(of a checkpoint of that step in the folder NAME; live.pt has what DeepSpeed reports then)}. The result is the loss of
each step, as a mean over the ranks.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

Case = dict[str, Any]


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of an .npy file, which are their own labels: transformers shifts them."""

    def __init__(self, path: str) -> None:
        self.rows = torch.from_numpy(np.load(path).astype(np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[0] = -100  # which nothing predicts; the Trainer would count it, and divide the loss of GPT-2 by more
        return {"input_ids": self.rows[index], "labels": labels}


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of the export's config.json with random weights, which the checkpoint must replace."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(case["export"])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def write_live_states(engine: deepspeed.DeepSpeedEngine, path: Path) -> None:
    """Write the complete fp32 weights and optimizer states that DeepSpeed reports; collective."""
    live = {(name, state): safe_get_full_optimizer_state(parameter, state) if state != "fp32" else
            safe_get_full_fp32_param(parameter)
            for name, parameter in engine.module.named_parameters() for state in ("fp32", "exp_avg", "exp_avg_sq")}
    if dist.get_rank() == 0:
        torch.save({key: value.float().clone() for key, value in live.items()}, path)


def plain(case: Case) -> list[float]:
    """Resume with a DeepSpeed engine and a loop."""
    model, folder = model_of(case), Path(case["export"])
    decay = case["config"]["optimizer"]["params"]["weight_decay"]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, config=case["config"], model_parameters=groups)
    path, client_state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    assert path is not None
    assert engine.global_steps == case["from"]
    rows, micro = Samples(case["samples"]).rows, engine.train_micro_batch_size_per_gpu()
    rank, ranks, position, losses = dist.get_rank(), dist.get_world_size(), client_state["consumed_samples"], []
    for step in range(case["from"] + 1, case["to"] + 1):
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(engine.gradient_accumulation_steps()):
            own = rows[position + rank * micro:position + (rank + 1) * micro]
            loss = engine(input_ids=own, labels=own).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / engine.gradient_accumulation_steps()
            position += ranks * micro
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        if step == case["save_at"]:
            engine.save_checkpoint(case["name"], client_state=case["client_state"])
            write_live_states(engine, Path(case["name"]) / "live.pt")
    engine.destroy()
    return losses


class Recorder(transformers.Trainer):
    """The Trainer, with the samples in the order of the dataset. It keeps the loss of each micro-batch."""

    micro_losses: list[torch.Tensor]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *arguments: Any, **settings: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **settings)
        self.micro_losses.append(loss.detach().double())
        return loss


def trainer(case: Case) -> list[float]:
    """Resume with transformers.Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=case["name"], deepspeed=case["config"], use_cpu=True, max_steps=case["to"], logging_steps=1,
        save_strategy="no", report_to=[], dataloader_pin_memory=False, **case["arguments"])
    run = Recorder(model=model_of(case), args=arguments, train_dataset=Samples(case["samples"]))
    run.micro_losses = []
    run.train(resume_from_checkpoint=case["export"])
    assert run.state.global_step == case["to"]
    losses = torch.stack(run.micro_losses).view(case["to"] - case["from"], -1).sum(1)  # each is divided already
    dist.all_reduce(losses)
    unset_hf_deepspeed_config()
    return [float(loss) / dist.get_world_size() for loss in losses]


def main() -> None:
    deepspeed.init_distributed("gloo")
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        results[case["name"]] = {"plain": plain, "trainer": trainer}[case["program"]](case)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))
        dist.barrier()
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
