"""Compare the predicted memory of training with torch's allocator on a dry GPU; print a Markdown table.

    DRY_GPU_CACHING=1 DRY_GPU_COUNT=2 dry-gpu python tools/dry_gpu/memory_table.py --random 40

A row is the command line of a run, without data. Real engines train two steps in copies of this process, as many as the
row has ranks. Only the values of the initial weights are left out, which take time and memory of the host.
"""

import argparse
import gc
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_settings
from pretrain.distributed.collectives import gather
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import free_port
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World, running_environment
from pretrain.engine import build
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.engine.steps import random_batches, train_batch
from pretrain.errors import ConfigError
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.model.parameters import DTYPES

TOLERANCE = 0.05
GIB = 2**30
# preset of a family, and the layers that are left of it: the shapes are a large model's
MODELS = {"gpt2": "n_layer=6", "gpt2-medium": "n_layer=8", "pythia-410m": "num_hidden_layers=8",
          "qwen3-0.6b": "num_hidden_layers=6", "llama3-1b": "num_hidden_layers=4", "olmo2-1b": "num_hidden_layers=4",
          "gemma2-2b": "num_hidden_layers=2", "mistral-7b": "num_hidden_layers=2",
          "olmoe-1b-7b": "num_hidden_layers=2,num_experts=16"}
LONGEST = {"gpt2": 1024, "gpt2-medium": 1024, "pythia-410m": 2048, "qwen3-0.6b": 8192, "llama3-1b": 8192}
LAYOUTS = {1: ("zero0_bf16", "zero0_fp32", "zero1_bf16", "zero1_bf16_fp32_accumulation", "zero1_fp16", "zero2_bf16",
               "zero2_fp16", "zero2_offload_optimizer_cpu", "zero3_bf16", "zero3_fp16", "zero3_offload_optimizer_cpu",
               "zero3_offload_all_cpu", "zero3_activation_checkpointing", "zero3_activation_offload"),
           2: ("zero1_bf16", "zero2_bf16", "zero3_bf16", "pipeline2_zero0_bf16", "pipeline2_zero1_bf16",
               "pipeline2_zero0_fp16", "pipeline2_activation_checkpointing", "tensor2_zero1_bf16", "tensor2_zero3_bf16",
               "sequence2_zero3_bf16")}
EXTRA = ("", "", "", "", "--recompute blocks", "--recompute mlp", "--recompute attention", "--compile_blocks true",
         "--plain_operators true", "--document_attention true")


def random_rows(number: int, seed: int) -> list[str]:
    """Return random runs, each the number of ranks and the flags; a seed always gives the same ones."""
    chosen, rows = random.Random(seed), list[str]()
    while len(rows) < number:
        model, length = chosen.choice([*MODELS]), chosen.choice([512, 1024, 2048, 4096, 8192])
        length = min(length, LONGEST.get(model, 4096))
        ranks = chosen.choice([*LAYOUTS])
        layout, extra = chosen.choice(LAYOUTS[ranks]), chosen.choice(EXTRA)
        if ("activation" in layout and "recompute" in extra) or (model.startswith("olmoe") and \
                ("sequence" in layout or "compile" in extra or ranks == 2)):
            continue  # rejected by the program
        overrides = MODELS[model] + chosen.choice(["", ",vocab_size=8192"])  # the logits peak, or the blocks
        samples = max(1, chosen.choice([2048, 4096, 8192]) // length)
        rows.append(f"{ranks} --deepspeed_config {layout} --model {model} --model_overrides "
                    f"{overrides} --seq_length {length} --micro_batch_size {samples} --gradient_accumulation_steps "
                    f"{chosen.choice([1, 2, 4])} {extra}".strip())
    return rows


def measure(row: str, world: World) -> dict[str, Any]:
    """Train two steps on this rank, and return predicted and measured bytes. Raises ConfigError for a rejected run."""
    prepare_deepspeed(detect_device())
    words = ["--save", "unused", "--train_data", "unused", "--train_steps", "10", *shlex.split(row)]
    plan = check_settings(parse_arguments(words), world_size=world.size, device=detect_device())
    init_process_group(world)
    build.initialize_parameters = partial(leave_empty, dtype=DTYPES[plan.layout.precision])
    engine, batches = build.build_engine(plan), random_batches(plan)
    train_batch(engine, batches)  # allocates the optimizer states
    if engine.skipped_steps:
        raise ConfigError("the first step", problem="it did not update")
    gc.collect()  # reference cycles of torch's compiler hold the inputs of the first calls
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train_batch(engine, batches)
    torch.cuda.synchronize()
    allocated = gather((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    engine.destroy()
    estimate = estimate_memory(plan.model, plan.layout)
    margin = estimate.peak.total("margin", "device")
    return {"row": row, "predicted": estimate.device_bytes - margin, "predicted_reserved": estimate.reserved_bytes,
            "phase": estimate.phase, "roles": estimate.peak.to_json(),
            "allocated": max(each for each, _ in allocated), "reserved": max(each for _, each in allocated)}


def leave_empty(module: torch.nn.Module, *_args: Any, dtype: torch.dtype, **_keywords: Any) -> None:
    """Move weights to the device without values, which would take time and memory of the host."""
    for weight in module.parameters():
        if not hasattr(weight, "ds_id"):
            weight.data = torch.empty(weight.shape, dtype=dtype, device="cuda")


def run_rank(row: str, rank: int, ranks: int, result: Path) -> None:
    """Measure a row in this process, which is one rank, and exit; rank 0 writes the result."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    code = 1
    try:
        with build.deepspeed_output("error"):
            found = measure(row, running_environment())
        code = 0
    except Exception as error:
        found = {"row": row, "rejected": f"{type(error).__name__}: {error}".splitlines()[0]}
        if not isinstance(error, ConfigError):
            traceback.print_exc()
    if rank == 0 or code:
        result.write_text(json.dumps(found))
    os._exit(code)


def result_of(row: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Start the ranks of a row, as copies of this process, which has imported everything, and return their result."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks),
                      LOCAL_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    result = folder / "result.json"
    processes = {}
    for rank in range(ranks):
        if not (process := os.fork()):
            run_rank(row, rank, ranks, result)
        processes[process] = rank
    while processes:
        process, status = os.wait()
        del processes[process]
        if status:  # the others would wait for it
            for other in processes:
                os.kill(other, signal.SIGKILL)
    found = result.read_text() if result.exists() else json.dumps({"row": row, "rejected": "it was killed"})
    result.unlink(missing_ok=True)
    return json.loads(found)


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, in GiB, and a line that counts the rows."""
    lines = ["| run | predicted | allocated | ratio | predicted reserved | reserved | ratio |", "| --- " * 7 + "|"]
    measured = [each for each in results if "rejected" not in each]
    for each in measured:
        pairs = [(each["predicted"], each["allocated"]), (each["predicted_reserved"], each["reserved"])]
        numbers = [f"{a / GIB:.2f} | {b / GIB:.2f} | {a / b:.2f}" for a, b in pairs]
        lines.append(f"| `{each['row']}` | {' | '.join(numbers)} |")
    apart = [each for each in measured if abs(each["predicted"] / each["allocated"] - 1) > TOLERANCE]
    lines += ["", f"{len(apart)} of {len(measured)} rows are more than {TOLERANCE:.0%} apart"]
    return lines + [f"not measured: `{each['row']}`: {each['rejected']}" for each in results if "rejected" in each]


def main() -> None:
    """Parse the flags, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help="flags of a run, as one word, perhaps after the number of ranks")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random rows")
    parser.add_argument("--json", type=Path, help="append a line for each row to this file")
    flags = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for row in flags.rows + random_rows(flags.random, flags.seed):
            ranks, words = row.split(" ", 1) if row[0].isdigit() else ("1", row)
            results.append({**result_of(words, int(ranks), Path(folder)), "ranks": int(ranks)})
            if flags.json:
                with flags.json.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
