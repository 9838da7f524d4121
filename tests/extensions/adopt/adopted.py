"""Runs of other programs that continue here: the original trains 12 steps, and its step 6 is adopted in some layouts.

`python -m tests.extensions.adopt.adopted` measures all rows, and prints them as the table of the page. With words, it
measures the rows whose source has one of them: `python -m tests.extensions.adopt.adopted Trainer`.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pretrain.config.flags.arguments import RunArguments
from pretrain.data.run_data import open_run_data
from pretrain.extensions.adopt.adopt import adopt, plan_adoption
from pretrain.extensions.adopt.foreign_run import with_sample_length
from pretrain.extensions.adopt.run_files import DS_JSON, RUN_YAML
from pretrain.extensions.adopt.sources import find_source
from tests.support.cases import CPU, case, config
from tests.support.launch import run_worker
from tests.support.layouts import relative_difference
from tests.support.wrapped_models import ARE_WRAPPED, WRAPPED_MODELS

SAVED, STEPS, BATCH, SEQ_LENGTH = 6, 12, 8, 64  # steps before the checkpoint, in total; samples; tokens
RANKS = 2  # ranks of the original program
TOLERANCES = {"fp32": 1e-5, "bf16": 5e-4}

_SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {**_SIZES, "model_type": "llama"},
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 16},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}}
_EXPERTS = {**_SIZES, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "router_logits": {**_EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 48,
                      "head_dim": 16, "norm_topk_prob": True, "output_router_logits": True}}
# wrapped decoders
WRAPPED: dict[str, dict[str, Any]] = {
    "granite": {**_SIZES, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "granitemoe": {**_SIZES, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**WRAPPED_MODELS["deepseek_v3"], "max_position_embeddings": 128}}
ALL_MODELS = MODELS | EXPERTS | WRAPPED

Json = dict[str, Any]
_ZERO = "zero_optimization"


@dataclass(frozen=True)
class Layout:
    """A layout in which a run continues: number of ranks, and blocks of the DeepSpeed JSON."""

    name: str
    ranks: int
    blocks: Json


def zero(stage: int, ranks: int = 2, **others: Any) -> Layout:
    """Return the layout of a ZeRO stage on data-parallel ranks."""
    name = f"ZeRO-{stage}, {ranks} rank{'s' * (ranks > 1)}" + (", optimizer on the CPU" if others else "")
    return Layout(name, ranks, {_ZERO: config(stage, **others)[_ZERO]})


PIPELINE = Layout("2 pipeline stages", 2, {**zero(1).blocks, "pipeline": {"stages": 2}})


@dataclass(frozen=True)
class Original:
    """A run of another program, as a case of other_programs.py, and the layouts in which it continues here."""

    source: str  # shown in the table
    model: str
    precision: str
    layouts: tuple[Layout, ...]  # the first one is that of the original
    case: Json  # without name, model and samples
    accepted: tuple[str, ...] = ()  # losses
    flags: Json = field(default_factory=dict)  # flags of the resumed run, besides those of run.yaml
    worker: str = "other_programs.py"  # program that trains the original

    @property
    def name(self) -> str:
        """A name for files."""
        return "".join(letter if letter.isalnum() else "_" for letter in f"{self.source} {self.model} {self.precision}")


def plain(stage: int, model: str, precision: str, *others: Layout, **settings: Any) -> Original:
    """Return a user's own loop around a DeepSpeed engine with a model of transformers, at a constant rate."""
    offload = {"offload_optimizer": CPU} if settings.pop("offload", False) else {}
    values = {"program": "plain", "config": config(stage, precision=precision, micro=2, **offload), **settings}
    return Original(f"DeepSpeed, ZeRO-{stage}" + (", offload" if offload else ""), model, precision,
                    (zero(stage, **offload), *others), values,
                    flags={"lr_schedule": "constant", "lr_warmup_steps": 0})


def trainer(stage: int | None, model: str, precision: str, *layouts: Layout, schedule: str = "cosine",
            accepted: tuple[str, ...] = (), **others: Any) -> Original:
    """Return a run of transformers.Trainer with a warm-up and a schedule; stage None: without DeepSpeed.

    others: TrainingArguments.
    """
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    values = None if stage is None else {
        **dict.fromkeys(auto, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": zero(stage).blocks[_ZERO],
        "zero_allow_untested_optimizer": True}
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "seed": 17,
                 "weight_decay": 0.1, "adam_beta2": 0.95, "warmup_steps": 3, "lr_scheduler_type": schedule,
                 "max_grad_norm": 1.0, "bf16": precision == "bf16", **others}
    source = "transformers.Trainer" + (", without DeepSpeed" if stage is None else f", ZeRO-{stage}")
    return Original(source, model, precision, layouts, {"program": "trainer", "config": values, "arguments": arguments},
                    accepted=accepted)


QUICK = (plain(0, "gpt2", "fp32", PIPELINE, zero(3, 1)),
         trainer(2, "qwen3", "bf16", zero(2), PIPELINE, zero(1, 1), schedule="linear"),
         plain(1, "deepseek_v3", "fp32", PIPELINE, zero(3, 1)))
_OTHERS = {0: (zero(2), PIPELINE), 1: (PIPELINE, zero(3, 1)), 2: (zero(0, 1), PIPELINE), 3: (zero(1), PIPELINE)}


def _precision(stage: int, model: str) -> str:
    """Return the precision of a row: half of the models at each stage, and each model at half of the stages."""
    return "fp32" if (stage + list(MODELS).index(model)) % 2 == 0 else "bf16"


ALL = (
    *(plain(0, model, precision, *_OTHERS[0]) for model in MODELS for precision in TOLERANCES),
    *(trainer(stage, model, _precision(stage, model), zero(stage), *_OTHERS[stage])
      for stage in (3, 2, 1, 0) for model in MODELS),
    *(plain(stage, model, _precision(stage, model), *_OTHERS[stage]) for stage in (3, 2, 1) for model in MODELS),
    plain(2, "llama", "bf16", zero(1), PIPELINE, offload=True),
    trainer(None, "gpt2", "fp32", zero(0), PIPELINE, zero(3, 1), schedule="linear"),
    *(plain(1, model, "fp32", *_OTHERS[1]) for model in WRAPPED if ARE_WRAPPED),
    *(trainer(2, model, "fp32", zero(2), PIPELINE) for model in ("granitemoe", "deepseek_v3") if ARE_WRAPPED))


def write_samples(corpus: str, path: Path) -> None:
    """Write the first samples of this program's order, which the original program reads in the same order."""
    args = RunArguments(train_data=corpus, split="80,20,0", seq_length=SEQ_LENGTH)
    dataset = open_run_data(args.data, seq_length=SEQ_LENGTH, seed=args.seed, tokenizer=None,
                            vocab_size=256).datasets["train"]
    np.save(path, dataset.samples(range(STEPS * BATCH)))


def measure(originals: Sequence[Original], corpus: str, folder: Path) -> dict[tuple[str, str], float]:
    """Return the largest relative difference of the losses after the checkpoint, by name of the original and layout."""
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(corpus, folder / "samples.npy")
    models = ALL_MODELS
    cases = [{"name": each.name, "model": models[each.model], "samples": "../samples.npy", "save_at": SAVED,
              "steps": STEPS, **each.case} for each in originals]
    expected: dict[str, Any] = {}
    for worker in dict.fromkeys(each.worker for each in originals):
        expected |= run_worker(worker, [values for values, each in zip(cases, originals, strict=True)
                                        if each.worker == worker], RANKS, folder / "originals")
    return continue_here(originals, expected, corpus, folder)


def continue_here(originals: Sequence[Original], expected: Mapping[str, Any], corpus: str,
                  folder: Path) -> dict[tuple[str, str], float]:
    """Adopt the checkpoints in folder/originals/NAME and compare the losses: see `measure`."""
    continued: dict[int, list[Json]] = {}
    for each in originals:
        run = adopt_original(each, folder / "originals" / each.name, folder / "runs" / each.name)
        for layout in each.layouts:
            continued.setdefault(layout.ranks, []).append(continued_case(each, layout, run, corpus))
    found: dict[str, Any] = {}
    for ranks, own in continued.items():
        found |= run_worker("layout_worker.py", own, ranks, folder / f"continued{ranks}")
    return {(each.name, layout.name): relative_difference(found[_name(each, layout)]["after"]["loss"],
                                                          expected[each.name][SAVED:])
            for each in originals for layout in each.layouts}


def adopt_original(original: Original, source: Path, out: Path) -> Path:
    """Adopt the checkpoint of an original program, and return the run folder."""
    found = find_source(source, step=SAVED, config=ALL_MODELS[original.model])
    assert found is not None, f"{source}: {sorted(source.rglob('*'))}"
    out.parent.mkdir(exist_ok=True)
    run = found.read()
    run = run if run.consumed_tokens is None else with_sample_length(run, SEQ_LENGTH)
    adopt(plan_adoption(run, frozenset(original.accepted)), out)
    return out


def _name(original: Original, layout: Layout) -> str:
    return f"{original.name}-{''.join(filter(str.isalnum, layout.name))}"


def continued_case(original: Original, layout: Layout, run: Path, corpus: str) -> Json:
    """Return the case of layout_worker.py that continues an adopted run with its own run.yaml and ds_config.json."""
    values = {**json.loads((run / DS_JSON).read_text()), **layout.blocks, "train_micro_batch_size_per_gpu": 2}
    flags = {key: value for key, value in yaml.safe_load((run / RUN_YAML).read_text()).items()
             if key not in ("save", "deepspeed_config")}
    own = {"train_data": corpus, "split": "80,20,0", "seq_length": SEQ_LENGTH, "train_steps": STEPS, "seed": 1234,
           "resume_from": str(run.absolute()), "override": ["seed"]}
    return case(_name(original, layout), "continue_run", values, {**flags, **original.flags, **own})


HEAD = ("| source | precision | models | continues here in | largest difference |", "| --- | --- | --- | --- | --- |")


def table(originals: Sequence[Original], found: Mapping[tuple[str, str], float]) -> str:
    """Return a row for each source and precision: the models, the layouts, and the largest difference in each."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[Original]] = {}
    for each in originals:
        layouts = tuple(layout.name for layout in each.layouts)
        rows.setdefault((each.source, each.precision, layouts), []).append(each)
    lines = []
    for (source, precision, layouts), runs in rows.items():
        largest = [max(found[each.name, layout] for each in runs) for layout in layouts]
        lines.append(f"| {source} | {precision} | {', '.join(each.model for each in runs)} | "
                     f"{'; '.join(layouts)} | "
                     f"{'; '.join(f'{value:.1e}' for value in largest)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    from tests.conftest import write_corpus

    rows = [each for each in ALL if not words or any(word in each.source for word in words)]
    print("\n".join(HEAD))
    for source in dict.fromkeys(each.source for each in rows):
        own = [each for each in rows if each.source == source]
        with tempfile.TemporaryDirectory() as folder:
            found = measure(own, write_corpus(Path(folder) / "small"), Path(folder) / "work")
        print(table(own, found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
