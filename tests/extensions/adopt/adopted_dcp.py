"""Runs whose checkpoints torch.distributed.checkpoint has written: rows for adopted.py.

`python -m tests.extensions.adopt.adopted_dcp torchtitan=PYTHON megatron_core=PYTHON` measures torchtitan and Megatron
Core themselves, which the two interpreters have installed, and prints the table of the page megatron.md. The default
tests have files that torch's own saving code has written with their names.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.extensions.adopt import WORKERS
from tests.extensions.adopt.adopted import (
    BATCH,
    MODELS,
    PIPELINE,
    RANKS,
    SAVED,
    SEQ_LENGTH,
    STEPS,
    Layout,
    Original,
    continue_here,
    write_samples,
    zero,
)
from tests.support.launch import free_port, rank_environment

_LIMIT_S = 180  # time limit of one run of an original
_NAMES = {"torchtitan": "torchtitan 0.2", "megatron_core": "Megatron Core"}
_SIZES = {**MODELS["llama"], "head_dim": 16, "rope_theta": 10000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
# torchtitan's Llama 3 always has the scaling of Llama 3.1; its inner size follows from the size of the model
MODELS |= {
    "llama 3.1": {**_SIZES, "intermediate_size": 192, "rope_theta": 500000, "max_position_embeddings": 16384,
                  "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "llama, untied": _SIZES, "llama, tied": {**_SIZES, "tie_word_embeddings": True},
    "qwen3, untied": {**_SIZES, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000}}


def with_blocks(layouts: Sequence[Layout], precision: str, **blocks: Any) -> tuple[Layout, ...]:
    """Return the layouts with what torchtitan does not record: the global batch and the precision."""
    own = {"train_batch_size": BATCH, "bf16": {"enabled": precision == "bf16"}, **blocks}
    return tuple(Layout(each.name, each.ranks, {**each.blocks, **own}) for each in layouts)


def saved_by_torch(program: str, precision: str) -> Original:
    """Return a Llama that FSDP2 divides among 2 ranks, saved by torch with the names of a program."""
    values = {"program": program, "batch": BATCH, "seq_length": SEQ_LENGTH, "precision": precision}
    return Original(f"names of {_NAMES[program]}, FSDP2, saved by torch", "llama", precision,
                    with_blocks((zero(3), PIPELINE, zero(1, 1)), precision), values,
                    flags={"lr_schedule": "constant", "lr_warmup_steps": 0}, worker=str(WORKERS / "dcp_worker.py"))


QUICK = tuple(saved_by_torch(program, "fp32") for program in _NAMES)
ALL = (*QUICK, *(saved_by_torch(program, "bf16") for program in _NAMES))

_COMMON = {"batch": BATCH, "seq_length": SEQ_LENGTH, "rate": 1e-2, "warmup": 3, "clipping": 1.0}
_LAYOUTS = {"FSDP2": (zero(3), PIPELINE, zero(1, 1)), "tensor parallelism": (
    Layout("ZeRO-1, tensor parallelism 2", 2, {**zero(1).blocks, "tensor_parallel": {"autotp_size": 2}}), PIPELINE,
    zero(3)), "2 pipeline stages": (PIPELINE, zero(2), zero(0, 1)), "distributed optimizer": (
    zero(1), PIPELINE, zero(3, 1)), "optimizer not distributed": (zero(0), PIPELINE, zero(3, 1))}


def torchtitan(model: str, precision: str, division: str, **parallelism: int) -> Original:
    """Return a run of torchtitan.

    It does not record its schedule: a warm-up, and a decay to 0 in the step after the last one.
    """
    values = {**_COMMON, "precision": precision, "parallelism": parallelism, "micro": BATCH if parallelism else 2}
    return Original(f"torchtitan 0.2.2, {division}", model, precision,
                    with_blocks(_LAYOUTS[division], precision, gradient_clipping=1.0), values, worker="torchtitan",
                    flags={"lr_schedule": "wsd", "lr_warmup_steps": 3, "lr_decay_steps": STEPS + 1,
                           "lr_wsd_steps": STEPS - 3, "min_lr": 0.0})


def megatron_core(model: str, precision: str, division: str, *, tensor_parallel: int = 1,
                  distributed: bool = True) -> Original:
    """Return a run of Megatron Core, which records its schedule."""
    values = {**_COMMON, "precision": precision, "tensor_parallel": tensor_parallel, "distributed": distributed,
              "format": "fully_reshardable"}
    return Original(f"Megatron Core 0.16.1, {division}", model, precision,
                    with_blocks(_LAYOUTS[division], precision, gradient_clipping=1.0), values, worker="megatron_core")


REAL = (
    torchtitan("llama 3.1", "fp32", "FSDP2"), torchtitan("qwen3, untied", "fp32", "FSDP2"),
    torchtitan("llama 3.1", "bf16", "FSDP2"),
    torchtitan("llama 3.1", "fp32", "tensor parallelism", tensor_parallel_degree=2),
    torchtitan("llama 3.1", "fp32", "2 pipeline stages", pipeline_parallel_degree=2),
    megatron_core("llama, untied", "fp32", "distributed optimizer"),
    megatron_core("qwen3, untied", "fp32", "distributed optimizer"),
    megatron_core("llama, untied", "bf16", "distributed optimizer"),
    megatron_core("llama, tied", "fp32", "tensor parallelism", tensor_parallel=2),
    megatron_core("llama, untied", "fp32", "optimizer not distributed", distributed=False),
)


def run_program(original: Original, python: str, folder: Path) -> list[float]:
    """Train with the program itself on all ranks, in `folder`, and return the losses."""
    folder.mkdir(parents=True, exist_ok=True)
    case = {"name": original.name, "model": MODELS[original.model], "samples": "../samples.npy", "save_at": SAVED,
            "steps": STEPS, **original.case}
    (folder / "case.json").write_text(json.dumps(case))
    program, port = Path(__file__).parent / "peers" / f"{original.worker}_run.py", free_port()
    ranks = []
    for rank in range(RANKS):
        with open(folder / f"{original.name}.rank{rank}.log", "wb") as log:
            ranks.append(subprocess.Popen([python, str(program), "case.json", "losses.json"], cwd=folder, stdout=log,
                                          stderr=log, env=rank_environment(rank, RANKS, port)))
    try:
        codes = [process.wait(_LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(codes), (folder / f"{original.name}.rank0.log").read_text()[-4000:]
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def rows(originals: Sequence[Original], found: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Yield a row for each source and precision, with the largest difference in each layout."""
    for source, precision in dict.fromkeys((each.source, each.precision) for each in originals):
        own = [each for each in originals if (each.source, each.precision) == (source, precision)]
        layouts = "; ".join(f"{layout.name}: {max(found[each.name, layout.name] for each in own):.1e}"
                            for layout in own[0].layouts)
        yield f"| {source} | {precision} | {'; '.join(each.model for each in own)} | {layouts} |"


def main() -> None:
    from tests.conftest import write_corpus

    pythons = dict(word.split("=", 1) for word in sys.argv[1:])  # name of a program -> interpreter
    originals = [each for each in REAL if each.worker in pythons]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "small")
        write_samples(corpus, folder / "samples.npy")
        expected = {each.name: run_program(each, pythons[each.worker], folder / "originals") for each in originals}
        for path in (folder / "originals").glob(f"*/checkpoint/step-{SAVED}"):  # torchtitan saves the last step, too
            path.rename(path.parent.parent / path.name)
        print("| source | precision | models | continues here in: largest difference |", "| --- | --- | --- | --- |",
              *rows(originals, continue_here(originals, expected, corpus, folder)), sep="\n")


if __name__ == "__main__":
    main()
