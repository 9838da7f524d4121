"""The text of the two files of a new run, and the commands that come next, which its YAML lists."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.active_extensions import advice_on
from pretrain.commands.next_command import LISTED
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout
from pretrain.config.write_yaml import comment_line, yaml_entry
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.errors import counted, format_number, one_line, tokens_text
from pretrain.extensions.new.answers import Data, ModelOfRun, TokenizerOfRun
from pretrain.extensions.new.sizes import SizeDefaults
from pretrain.memory.compare.compare import ComparisonRow, step_estimates
from pretrain.memory.footprint import checkpoint_text, in_unit
from pretrain.memory.hardware import Cluster

SECONDS_BETWEEN_SAVES, STEPS_BETWEEN_SAVES = 1800, 1000  # the latter if nothing predicts the time of a step
HOSTFILE = "hosts"
DEFAULT_SPLIT, _LARGE_VALIDATION, _NO_VALIDATION = RunArguments().split, "90,10,0", "100,0,0"


@dataclass(frozen=True)
class NewRun:
    """Everything that the files of a run say."""

    path: Path  # of the YAML
    data: Data
    reading: ReadSettings
    tokenizer: TokenizerOfRun
    model: ModelOfRun
    cluster: Cluster
    row: ComparisonRow  # the chosen layout
    seq_length: int
    steps: int | None  # None: the run has `tokens`
    tokens: int
    why_tokens: str
    split: str  # value of --split
    defaults: SizeDefaults
    save: str

    @property
    def json_path(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def num_steps(self) -> int:
        return self.steps or -(-self.tokens // self.row.candidate.layout.tokens_per_step)

    @property
    def interval(self) -> int:
        """Steps between two checkpoints."""
        steps = round(SECONDS_BETWEEN_SAVES / self.row.step_seconds) if self.row.step else STEPS_BETWEEN_SAVES
        return max(1, min(steps, self.num_steps // 4))


def tokens_word(number: int) -> str:
    """Return a number of tokens as a flag takes it: 26B."""
    return tokens_text(number).replace(" ", "").replace(",", "")


def title(run: NewRun) -> str:
    """Describe the model and the machines."""
    cluster, count = run.cluster, tokens_text(run.model.config.num_parameters())
    devices = counted(cluster.world_size, "CPU rank") if cluster.gpu.kind == "cpu" else \
        f"{counted(cluster.nodes, 'node')} x {cluster.gpus_per_node} {cluster.gpu.name}"
    return f"{run.model.config.architecture}, {count} parameters, on {devices}"


def layout_line(run: NewRun) -> str:
    """Describe the layout, its memory and, on GPUs, its predicted time."""
    row, cluster = run.row, run.cluster
    line = f"{row.describe(cluster, 'GiB')} of a rank"
    if not row.step or cluster.gpu.kind == "cpu":
        return line
    return f"{line}, {format_number(row.step_seconds)} s a step, MFU {row.step['mfu']:.0%}"


def length_line(run: NewRun) -> str:
    """Describe the length of the run, and on GPUs its predicted cost."""
    layout, estimates = run.row.candidate.layout, step_estimates(run.cluster)
    if run.cluster.gpu.kind == "cpu" or estimates is None:
        return f"{run.num_steps:,} steps x {layout.tokens_per_step:,} tokens"
    return str(estimates(layout, run.model.config, run.num_steps * layout.tokens_per_step)["cost"])


def yaml_text(run: NewRun) -> str:
    """Return the YAML: the commands, then each value below its reason."""
    lines = [f"{title(run)}. The commands of this run, in this order:",
             *(f"{LISTED.removeprefix('# ')}{line}" for line in commands(run)), *hosts_note(run)]
    parts = ["".join(map(comment_line, lines))]
    for comment, values in _yaml_values(run):
        entries = [yaml_entry(key, value) for key, value in values.items()]
        parts.append("".join([comment_line(comment), *entries]))
    return "\n".join(parts)


def _yaml_values(run: NewRun) -> list[tuple[str, dict[str, Any]]]:
    """Return (reason, keys with their values) in the order of the file."""
    data, tokenizer, layout, defaults = run.data, run.tokenizer, run.row.candidate.layout, run.defaults
    text = f"about {tokens_text(data.tokens(tokenizer.value))} tokens, which `ds-pretrain prepare` writes; estimated " \
           f"from {data.text_bytes / 1e9:.3g} GB of text"
    recompute = {} if layout.recompute == "none" else {"recompute": layout.recompute}
    return [
        (f"the layout that `ds-pretrain compare` recommends: {layout_line(run)}",
         {"deepspeed_config": str(run.json_path), **recompute}),
        (run.model.why, {"model": run.model.value,
                         **({"model_overrides": run.model.overrides} if run.model.overrides else {})}),
        (text if data.inputs else f"{data.num_tokens:,} tokens", {"train_data": data.prefix}),
        *_split(run),
        (f"{tokenizer.vocab_size:,} tokens" + (", trained by `ds-pretrain prepare`" if tokenizer.to_train else ""),
         {"tokenizer": tokenizer.value}),
        (f"of the model's {run.model.config.max_positions:,} positions; GPT-3 had 2,048",
         {"seq_length": run.seq_length}),
        (run.why_tokens, {"train_steps": run.steps} if run.steps else
         {"train_tokens": tokens_word(run.tokens)}),
        (f"peak rate of {defaults.name} ({defaults.source}); warm-up in 1% of the steps, cosine to 10%",
         {"learning_rate": defaults.learning_rate}),
        (("about 30 minutes of training, as predicted" if run.row.step else f"{STEPS_BETWEEN_SAVES:,} steps")
         + ", and at most a quarter of the run",
         {"eval_interval": run.interval, "save_interval": run.interval}),
        (checkpoint_text(layout.checkpoint_bytes(run.model.config.num_parameters()), run.cluster.nodes),
         {"keep_checkpoints": 2}),
        ("the run folder", {"save": run.save}),
    ]


def split_for(layout: Layout, data: Data, tokenizer: str) -> str:
    """Return the value of --split whose validation data is longer than a global batch, if any is."""
    return next((split for split in (DEFAULT_SPLIT, _LARGE_VALIDATION)
                 if data.validation_tokens(split, tokenizer) > layout.tokens_per_step), _NO_VALIDATION)


def _split(run: NewRun) -> list[tuple[str, dict[str, Any]]]:
    """Return --split with its reason, unless it is the default."""
    why = {_LARGE_VALIDATION: "10% for validation: 3% might be shorter than the global batch",
           _NO_VALIDATION: "no validation: 10% of the data might be shorter than the global batch"}
    return [(why[run.split], {"split": run.split})] if run.split in why else []


def json_text(run: NewRun) -> str:
    """Return the DeepSpeed JSON, with a comment above the values that it explains."""
    layout, gpu, defaults = run.row.candidate.layout, run.cluster.gpu, run.defaults
    zero = {0: "no state is divided", 1: "optimizer states are divided among the ranks",
            2: "optimizer states and gradients are divided among the ranks",
            3: "optimizer states, gradients and parameters are divided among the ranks"}[layout.zero_stage]
    comments = {
        "train_micro_batch_size_per_gpu": (
            f"{layout.global_batch_size} samples x {layout.seq_length} = {layout.tokens_per_step:,} tokens a step; "
            f"{defaults.name} had {tokens_text(defaults.batch_tokens)} ({defaults.source})"),
        "gradient_clipping": "\"auto\": 1.0, or --gradient_clipping",
        "optimizer": f"\"auto\": the flags of {run.path.name}; betas 0.9 and 0.95, weight decay 0.1",
        "bf16": "no loss scaling, and the range of fp32", "fp16": f"{gpu.name} has no bf16",
        "zero_optimization": f"{zero}: {in_unit(run.row.estimate.device_bytes, 'GiB')} of "
                             f"{in_unit(gpu.memory_bytes, 'GiB')} GiB",
        "pipeline": "stages of layers, and layers that are recomputed in the backward pass",
        "activation_checkpointing": "the inputs of recomputed layers are in host memory",
        "tensor_parallel": "ranks that share each matrix", "sequence_parallel_size": "ranks that share each sequence",
        "expert_parallel": "ranks that share the experts",
    }
    lines = []
    for key, value in run.row.candidate.config.items():
        comment = [f"// {one_line(comments[key])}"] if key in comments else []
        entry = f"{json.dumps(key)}: {json.dumps(value, indent=2)}"
        lines.append("\n".join(f"  {line}" for line in [*comment, *entry.split("\n")]))
    return f"{{\n  // {one_line(title(run))}\n" + ",\n".join(lines) + "\n}\n"


def commands(run: NewRun) -> list[str]:
    """Return the commands after this one: prepare (unless the data is), check, train, look."""
    cluster, ranks, words = run.cluster, str(run.cluster.world_size), list[Sequence[str]]()
    is_cpu = cluster.gpu.kind == "cpu"
    if run.data.inputs:
        words.append(["prepare", *run.data.inputs, "--tokenizer", run.tokenizer.value, "--out", run.data.prefix,
                      *(["--vocab_size", str(run.tokenizer.vocab_size)] if run.tokenizer.to_train else []),
                      *(["--jsonl_key", run.reading.jsonl_key] if run.reading.jsonl_key != "text" else []),
                      *(["--on_error", "skip"] if run.reading.skip_errors else [])])
    words.append(["check", "--config", str(run.path), "--world_size", ranks,
                  *(["--device", "cpu"] if is_cpu else ["--gpu", cluster.gpu.word])])
    here = ["--num_accelerators" if is_cpu else "--num_gpus", ranks]
    words.append([*(here if cluster.nodes == 1 else ["--hostfile", HOSTFILE]), "--config", str(run.path)])
    return [*(shlex.join(["ds-pretrain", *line]) for line in words),
            *(command.format(run=shlex.quote(run.save)) for command in advice_on("finished"))]


def hosts_note(run: NewRun) -> list[str]:
    """Explain how several nodes are named."""
    cluster = run.cluster
    if cluster.nodes == 1:
        return []
    ranks = f" --ntasks-per-node={cluster.gpus_per_node}" if cluster.gpu.kind == "cpu" else ""  # GPUs are counted
    return [f"{HOSTFILE} needs a line `NAME slots={cluster.gpus_per_node}` for each node; all nodes must share this "
            "folder",
            f"under SLURM: ds-pretrain template slurm > pretrain.sbatch; sbatch -N {cluster.nodes}{ranks} "
            f"pretrain.sbatch {shlex.quote(str(run.path))}"]
