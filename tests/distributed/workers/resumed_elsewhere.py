"""Other programs that resume from an export: a plain DeepSpeed loop and transformers.Trainer. One rank.

Program `resumed_elsewhere.py CASES.json RESULTS.json`, which uses nothing of the package to train. A case: {"name",
"program" ("plain" or "trainer"), "export" (a folder), "config" (DeepSpeed JSON), "samples" (an .npy file [samples,
tokens]), "from" and "to" (steps), "arguments" (of TrainingArguments), "save_at", "client_state" (of a checkpoint of
that step in the folder NAME; live.pt has what DeepSpeed reports then)}. The result is the loss of each step, as a mean
over the ranks.
"""

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

from tests.distributed.workers import other_programs
from tests.distributed.workers.other_programs import InOrder, Samples, train_step, write_live_states

Case = dict[str, Any]


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of the export's config.json with random weights, which the checkpoint must replace."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(case["export"])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


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
    rows, losses = Samples(case["samples"]).rows[client_state["consumed_samples"]:], []
    for step in range(case["from"] + 1, case["to"] + 1):
        losses.append(train_step(engine, rows[len(losses) * engine.train_batch_size():]))
        if step == case["save_at"]:
            engine.save_checkpoint(case["name"], client_state=case["client_state"])
            write_live_states(engine, Path(case["name"]) / "live.pt")
    engine.destroy()
    return losses


def trainer(case: Case) -> list[float]:
    """Resume with transformers.Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=case["name"], deepspeed=case["config"], use_cpu=True, max_steps=case["to"], logging_steps=1,
        save_strategy="no", report_to=[], dataloader_pin_memory=False, **case["arguments"])
    run = InOrder(model=model_of(case), args=arguments, train_dataset=Samples(case["samples"]))
    run.micro_losses = []
    run.train(resume_from_checkpoint=case["export"])
    assert run.state.global_step == case["to"]
    losses = torch.stack(run.micro_losses).view(case["to"] - case["from"], -1).sum(1)  # each is divided already
    dist.all_reduce(losses)
    return [float(loss) / dist.get_world_size() for loss in losses]


PROGRAMS = {"plain": plain, "trainer": trainer}


if __name__ == "__main__":
    other_programs.main(PROGRAMS)
