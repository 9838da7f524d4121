"""Defects that only CUDA shows, planted in a copy of the program: the dry GPU finds each, and nothing without them.

A kernel with too much shared memory is in test_triton_kernels.py.
"""

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.dry_gpu.conftest import DryGpu
from tests.support.cases import config, flags
from tests.support.launch import ROOT

# kind of run -> ranks, DeepSpeed JSON, flags
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "usual": (1, config(1, precision="bf16", micro=2), {"log_interval": 100, "eval_interval": 3}),
    "ranks": (2, config(3, precision="bf16", micro=2), {"log_interval": 2, "eval_interval": 0}),
    "pipeline": (2, config(1, precision="bf16", micro=2, stages=2), {"log_interval": 2, "eval_interval": 0}),
    "tensor": (2, config(1, precision="bf16", micro=2) | {"tensor_parallel": {"autotp_size": 2}}, {"eval_interval": 0}),
}
SIGNS = "finished 6 steps", "attention: flash"
WAITS, PAGEABLE = "more waits", "more copies of memory that is not pinned"
STEP, STEPS = "pretrain/step_loop.py", "pretrain/engine/steps.py"
# defect -> kind of run, file, text there, text in its place, what finds it
PLANTED: dict[str, tuple[str, str, str, str, str]] = {
    "a tensor remains on the CPU": (
        "ranks", STEPS, "total = torch.zeros((), device=engine.device)", "total = torch.zeros(())",
        "on the same device"),
    "a read in each step": (
        "usual", STEP, "loss = train_batch(run.engine, micro_batches)",
        "loss = train_batch(run.engine, micro_batches); loss.item()", WAITS),
    "a read in each evaluation": (
        "usual", STEP, "losses.append(eval_batch(engine, batch))",
        "losses.append(torch.full((), eval_batch(engine, batch).item(), device=engine.device))", WAITS),
    "batches are not pinned": (
        "usual", STEPS, 'pin_memory=engine.device.type == "cuda"', "pin_memory=False", PAGEABLE),
    "a missing argument": (
        "usual", "pretrain/data/loader.py", "torch.cuda.set_device(device)", "torch.cuda.set_device()",
        "missing 1 required positional argument"),
    "a misspelt function of torch.cuda": (
        "usual", "pretrain/engine/chosen_operators.py", "torch.cuda.empty_cache()", "torch.cuda.empty_caches()",
        "has no attribute 'empty_caches'"),
    "all ranks on the first GPU": (
        "ranks", "pretrain/distributed/own_gpu.py", "torch.cuda.set_device(world.local_rank)",
        'torch.cuda.set_device(0); os.environ["LOCAL_RANK"] = "0"', "Duplicate GPU detected"),
    "a tensor that is not contiguous": (
        "ranks", "pretrain/monitor/training_row.py", "dist.all_gather(list(everyone.unbind(0)), own)",
        "dist.all_gather(list(everyone.unbind(0)), torch.stack([own, own], 1)[:, 0])", "must be contiguous"),
    "ranks differ in the size": (
        "ranks", STEPS, "mean = own_mean.clone()", "mean = own_mean.repeat(1 + torch.distributed.get_rank())",
        "the ranks differ in the size of a message"),
    "a collective of one rank": (
        "ranks", STEPS, "mean = own_mean.clone()",
        "mean = own_mean.clone(); torch.distributed.get_rank() or torch.distributed.all_reduce(mean)",
        "was never sent"),
    "different collectives": (
        "ranks", STEPS, "mean = own_mean.clone()",
        "mean = own_mean.clone(); [torch.distributed.all_reduce, lambda mean: torch.distributed.broadcast(mean, 0)]"
        "[torch.distributed.get_rank()](mean)", "was never sent"),
    "a wrong process group": (
        "tensor", "pretrain/model/parallel/shared_tensors.py",
        "_all_gather(shards.view(-1), own.view(-1), group=group.handle",
        "_all_gather(shards.view(-1), own.view(-1), group=dist.new_subgroups(1)[0]", "output tensor size must be"),
    "a send without a receive": (
        "pipeline", STEP, 'run.watchdog.enter("end", run.step)',
        'run.watchdog.enter("end", run.step); '
        "torch.distributed.get_rank() or torch.distributed.send(torch.ones(1, device=run.engine.device), 1)",
        "was never received"),
}


@pytest.fixture(scope="module")
def run_of(dry_gpu: DryGpu, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains with a copy of the program, and returns its output and counts, by kind of run."""
    clean: dict[str, tuple[str, dict[str, int]]] = {}

    def run(kind: str, file: str = "", old: str = "", new: str = "") -> tuple[str, dict[str, int]]:
        if not file and kind in clean:
            return clean[kind]
        folder = tmp_path_factory.mktemp("planted")
        shutil.copytree(ROOT / "pretrain", folder / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
        if file:
            text = (folder / file).read_text()
            assert text.count(old) == 1, f"{file} has no single {old!r}"
            (folder / file).write_text(text.replace(old, new))
        ranks, values, own = RUNS[kind]
        (folder / "ds.json").write_text(json.dumps(values))
        words = {**flags(corpus, steps=6), "deepspeed_config": folder / "ds.json", "save": folder / "run", **own}
        done = dry_gpu(["python", "-m", "pretrain", "--num_accelerators", str(ranks),
                        *(f"--{key}={value}" for key, value in words.items())], devices=ranks, cwd=folder,
                       PYTHONPATH=str(folder), DRY_GPU_COUNTERS=str(folder / "counters"), DRY_GPU_TIMEOUT="20")
        counts = np.fromfile(folder / "counters", np.int64)
        result = done.stdout, {WAITS: int(counts[1] + counts[2]), PAGEABLE: int(counts[7])}
        if not file:
            clean[kind] = result
        return result

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_and_nothing_without_it(name: str, run_of: Any) -> None:
    kind, file, old, new, sign = PLANTED[name]
    (clean, before), (output, after) = run_of(kind), run_of(kind, file, old, new)
    assert all(each in clean for each in SIGNS), clean[-3000:]
    assert not any(each in clean for each in ("Traceback", "dry NCCL")), clean[-3000:]
    if sign in before:
        assert after[sign] >= before[sign] + 2, (before, after)  # evaluations, or steps
    else:
        assert sign in output, output[-3000:]
