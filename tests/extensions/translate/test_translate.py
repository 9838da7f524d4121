"""`ds-pretrain translate`: public runs of other programs, and a row for each setting that these programs have."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from pretrain.config.flags.arguments import FLAGS
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_settings
from pretrain.distributed.device import cuda_device
from pretrain.errors import ConfigError
from pretrain.extensions.translate.main import check_names, main, translate
from pretrain.extensions.translate.parts import BECAME, DIFFERS, NONE, Result
from pretrain.extensions.translate.read_input import read_settings
from pretrain.extensions.translate.settings import PROGRAMS, Settings, current_name, defaults_of
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig
from tests.extensions.translate.configs import (
    BLOOM_176B,
    GPT3_175B,
    NEOX_20B,
    PYTHIA_RANKS,
    PYTHIA_SIZES,
    RUN_CLM,
    RUN_CLM_JSON,
    TINY_LLAMA,
    pythia,
    torchtitan_toml,
)
from tests.support.launch import ROOT

SETTINGS = json.loads((ROOT / "tests/golden/other_programs.json").read_text(encoding="utf-8"))
DEVICE = dataclasses.replace(cuda_device(), bf16=True, fp16=True)


def translated(folder: Path, words: Sequence[str], world_size: int) -> Plan:
    """Translate, and return the plan of the run that was written."""
    out = folder / "out"
    main(["--output", str(out), *words])
    args = parse_arguments(["--config", str(out / "run.yaml")])
    return check_settings(args, world_size=world_size, device=DEVICE)


def written(folder: Path, name: str, content: Any) -> str:
    """Write an input file, and return its path."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def assert_same_model(model: ModelConfig, preset: str, *, without: Sequence[str] = ()) -> None:
    """Compare all fields of a model with those of a preset, which is the published config.json."""
    expected = load_model_config(preset)
    skipped = {"hf_config", "key_names", *without}
    names = [each.name for each in dataclasses.fields(ModelConfig) if each.name not in skipped]
    assert {name: getattr(model, name) for name in names} == {name: getattr(expected, name) for name in names}
    if "vocab_size" not in without:
        assert model.num_parameters() == expected.num_parameters()


@pytest.mark.parametrize("size", PYTHIA_SIZES)
def test_pythia(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = pythia(size)
    plan = translated(tmp_path, [written(tmp_path, "pythia.yml", settings)], PYTHIA_RANKS[size])
    assert_same_model(plan.model, f"pythia-{size}")
    rate = settings["optimizer"]["params"]["lr"]
    assert plan.layout.tokens_per_step == 1024 * 2048
    assert plan.schedule is not None
    # steps counted from 0: step 1430 of the program is the 1431st
    assert [plan.schedule(step) for step in (1430, 143000)] == pytest.approx([rate, rate / 10])
    assert (plan.train_steps, plan.schedule.kind, plan.schedule.warmup_steps) == (143000, "cosine", 1430)
    assert (plan.layout.precision, plan.args.init_method, plan.args.output_init_method) == (
        "fp16", "small_init", "wang_init")
    assert "remains to do: --train_data" in capsys.readouterr().out


def test_gpt_neox_20b(tmp_path: Path) -> None:
    plan = translated(tmp_path, [written(tmp_path, "20B.yml", NEOX_20B)], 96)
    assert (plan.model.num_layers, plan.model.hidden_size, plan.model.vocab_size) == (44, 6144, 50432)
    assert plan.model.num_parameters() == 20_554_567_680
    assert (plan.layout.pipeline_stages, plan.layout.tensor_parallel_size, plan.layout.zero_stage) == (4, 2, 1)
    assert plan.layout.global_batch_size == 4 * 32 * 12
    assert plan.schedule is not None
    assert plan.schedule.peak == 0.97e-4
    assert plan.ds_config["optimizer"]["params"]["weight_decay"] == 0.01


def test_bloom_176b(tmp_path: Path) -> None:
    plan = translated(tmp_path, ["--", *BLOOM_176B.split()], 384)
    assert (plan.model.architecture, plan.model.position, plan.model.embedding_norm) == ("bloom", "alibi", True)
    assert plan.model.num_parameters() == 176_247_271_424
    assert (plan.layout.tensor_parallel_size, plan.layout.pipeline_stages, plan.layout.data_parallel_size) == (4, 12, 8)
    assert plan.layout.global_batch_size == 2048
    assert plan.length.tokens_after(plan.train_steps) == pytest.approx(220e6 * 2048, rel=1e-4)
    assert plan.length.batch_sizes.stages[:2] == ((0, 192), (84187, 208))
    assert plan.length.batch_sizes.at(9_765_625) == 2048
    assert plan.schedule is not None
    assert plan.schedule.peak == 6e-5
    assert plan.schedule(plan.train_steps - 1) == pytest.approx(6e-6)


def test_tiny_llama(tmp_path: Path) -> None:
    plan = translated(tmp_path, ["--", *TINY_LLAMA.split()], 16)
    model = plan.model
    assert model.architecture == "llama"
    assert model.num_parameters() == 1_100_048_384
    assert (model.num_kv_heads, model.head_size, model.intermediate_size) == (4, 64, 5632)
    assert plan.layout.tokens_per_step == 1024 * 2048
    assert plan.layout.grad_accum_dtype == "fp32"
    assert plan.data.weights == (0.7, 0.3)
    assert plan.schedule is not None
    assert [plan.schedule(step) for step in (2000, 715256)] == pytest.approx([4e-4, 4e-5])


def test_gpt3_175b_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = translated(tmp_path, [written(tmp_path, "train.sh", GPT3_175B)], 128)
    assert_same_model(plan.model, "gpt3-175b", without=(
        "vocab_size", "initializer_range", "attention_dropout", "residual_dropout", "embedding_dropout"))
    assert plan.model.vocab_size == 51200  # padded to 128 x 8 tensor-parallel ranks
    # a default of Megatron-LM that its example does not change
    assert (plan.model.attention_dropout, plan.model.residual_dropout) == (0.1, 0.1)
    assert (plan.args.lr_warmup_steps, plan.args.lr_decay_steps) == (430, 430000)
    assert plan.ds_config["fp16"]["initial_scale_power"] == 32
    out = capsys.readouterr().out
    assert "launcher: nproc_per_node" in out


@pytest.mark.parametrize(("flavor", "preset", "rate", "batch", "tensor", "recompute"), [
    ("8B", "llama3-8b", 3e-4, 1, 1, "selective"), ("70B", "llama3-70b", 1.5e-4, 8, 8, "full")])
def test_llama3_of_torchtitan(tmp_path: Path, flavor: str, preset: str, rate: float, batch: int, tensor: int,
                              recompute: str) -> None:
    toml = torchtitan_toml(flavor, rate=rate, batch=batch, tensor=tensor, recompute=recompute)
    plan = translated(tmp_path, [written(tmp_path, "llama3.toml", toml)], 64)
    assert_same_model(plan.model, preset)
    assert plan.layout.global_batch_size == batch * 64 // tensor
    assert (plan.layout.zero_stage, plan.layout.tensor_parallel_size) == (3, tensor)
    assert plan.ds_config["optimizer"]["params"] == {"lr": rate, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert plan.args.decay_vectors
    assert plan.schedule is not None
    assert (plan.schedule.kind, plan.schedule.min_ratio, plan.schedule.warmup_steps) == ("wsd", 0.0, 200)


def test_the_trainers_run_clm(tmp_path: Path) -> None:
    ds_json = written(tmp_path, "ds.json", RUN_CLM_JSON)
    plan = translated(tmp_path, ["--", *RUN_CLM.replace("DS_JSON", ds_json).split()], 4)
    assert_same_model(plan.model, "gpt2-medium")
    assert plan.layout.tokens_per_step == 4 * 2 * 4 * 1024
    assert (plan.layout.zero_stage, plan.layout.precision, plan.layout.recompute) == (2, "bf16", "blocks")
    assert plan.ds_config["optimizer"]["params"] == {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert plan.schedule is not None
    assert (plan.schedule.kind, plan.schedule.min_ratio, plan.schedule.warmup_steps) == ("cosine", 0.0, 20)
    assert (plan.args.eval_interval, plan.args.save_interval, plan.args.keep_checkpoints, plan.args.seed) == (
        100, 200, 2, 7)


@pytest.mark.parametrize(("given", "steps"), [
    ({}, 1), ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.03}, 3), ({"warmup_steps": 0.025}, 3),
    ({"warmup_steps": 7, "warmup_ratio": 0.5}, 7)])
def test_the_trainers_warm_up_fills_the_scheduler_of_its_json(tmp_path: Path, given: dict[str, float],
                                                             steps: int) -> None:
    """The steps equal TrainingArguments.get_warmup_steps; 0 becomes 1, which is the same to DeepSpeed's schedulers."""
    scheduler = {"type": "WarmupLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    arguments = {"config_name": "tiny", "output_dir": "out", "learning_rate": 4e-4, "max_steps": 100, "bf16": True,
                 "deepspeed": {"scheduler": scheduler, "bf16": {"enabled": "auto"}}, **given}
    plan = translated(tmp_path, [written(tmp_path, "args.json", arguments)], 2)
    assert plan.ds_config["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 4e-4,
                                                     "warmup_num_steps": steps}


def test_megatron_deepspeed_in_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A string of options, a DeepSpeed JSON, and a variable with further options that the script does not set."""
    ds_json = written(tmp_path, "ds.json", {
        "train_batch_size": 512, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "elastic_checkpoint": True}, "fp16": {"enabled": True, "loss_scale": 0}})
    script = written(tmp_path, "ds_pretrain_gpt_1.3B.sh", f"""
SEQ_LEN=2048
options=" \\
    --adam-beta2 0.95 --init-method-std 0.013 --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 \\
    --micro-batch-size 16 --global-batch-size 512 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
    --seq-length ${{SEQ_LEN}} --max-position-embeddings $SEQ_LEN --train-tokens 300000000000 --lr 2.0e-4 \\
    --min-lr 1.0e-6 --lr-decay-style cosine --fp16 --merge-file gpt2-merges.txt --data-path data/pile"
deepspeed pretrain_gpt.py ${{options}} --deepspeed --deepspeed_config {ds_json} --zero-stage 2 ${{more_options}} $@
""")
    plan = translated(tmp_path, [script], 32)
    assert_same_model(plan.model, "gpt3-1.3b", without=(
        "vocab_size", "initializer_range", "attention_dropout", "residual_dropout", "embedding_dropout"))
    assert (plan.layout.zero_stage, plan.layout.global_batch_size, plan.args.train_tokens) == (2, 512, 300 * 10**9)
    assert plan.schedule is not None
    assert plan.schedule.warmup_steps == -(-375_000_000 // (512 * 2048))
    assert plan.schedule.decay_steps == -(-260 * 10**9 // (512 * 2048))
    assert "the script adds ${more_options}, which it does not set" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["olmo2-1b", "olmo2-7b"])
def test_training_arguments_as_json_with_olmo2(tmp_path: Path, preset: str) -> None:
    """Defaults that differ are written: a linear schedule to 0, no weight decay, 3 epochs."""
    arguments = {"config_name": preset, "output_dir": "out", "learning_rate": 4e-4, "bf16": True,
                 "per_device_train_batch_size": 2, "block_size": 4096, "warmup_ratio": 0.1, "fsdp": "full_shard"}
    plan = translated(tmp_path, [written(tmp_path, "args.json", arguments), "--dataset_tokens", "1000000"], 2)
    assert_same_model(plan.model, preset)
    assert plan.ds_config["optimizer"]["params"]["weight_decay"] == 0.0
    assert (plan.args.train_tokens, plan.args.lr_warmup_tokens, plan.args.lr_schedule) == (3_000_000, 300_000, "linear")
    assert (plan.args.min_lr, plan.args.seed, plan.layout.zero_stage) == (0.0, 42, 3)


EXPERTS_OF_MEGATRON = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --micro-batch-size 2 "
    "--max-position-embeddings 512 --global-batch-size 16 --lr 1e-4 --train-iters 100 --bf16 --swiglu --num-experts 8 "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 50304 "
    "--data-path corpus --untie-embeddings-and-output-weights --moe-router-topk 2 --tensor-model-parallel-size 2 "
    "--moe-extended-tp ")


@pytest.mark.parametrize(("flags", "degree"), [
    ("", 2), ("--expert-model-parallel-size 4", 8), ("--expert-tensor-parallel-size 1", 2),
    ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 4),
    ("--expert-model-parallel-size 8 --expert-tensor-parallel-size 2", 8)])
def test_ranks_that_divide_the_experts_of_megatron_share_them(tmp_path: Path, flags: str, degree: int) -> None:
    (tmp_path / "run.sh").write_text(EXPERTS_OF_MEGATRON + flags)
    plan = translated(tmp_path, [str(tmp_path / "run.sh")], 8)
    assert (plan.layout.expert_parallel_size, plan.layout.tensor_parallel_size) == (degree, 2)


LLAMA_OF_NEOX = {  # EleutherAI/gpt-neox, configs/llama/7B.yml, with a training section
    "pipe_parallel_size": 1, "model_parallel_size": 1, "make_vocab_size_divisible_by": 1, "num_layers": 32,
    "hidden_size": 4096, "intermediate_size": 32768, "num_attention_heads": 32, "seq_length": 2048,
    "max_position_embeddings": 2048, "pos_emb": "rotary", "rotary_pct": 1, "no_weight_tying": True, "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-6, "use_bias_in_mlp": False, "use_bias_in_norms": False, "use_bias_in_attn_linear": False,
    "activation": "swiglu", "mlp_multiple_of": 256, "train_micro_batch_size_per_gpu": 1, "train_iters": 1000,
}


def test_llama_and_the_clipped_line_of_gpt_neox(tmp_path: Path) -> None:
    settings = {**LLAMA_OF_NEOX, "min_lr": 5e-4}
    plan = translated(tmp_path, [written(tmp_path, "7B.yml", settings), "--vocab_size", "32000"], 1)
    assert (plan.model.architecture, plan.model.intermediate_size, plan.model.vocab_size) == ("llama", 11008, 32000)
    assert plan.model.num_parameters() == 6_738_415_616
    # without an optimizer: Adam, 1e-3, betas 0.9 and 0.999; the line would reach 0 at step 1000, so 5e-4 at 505
    assert plan.ds_config["optimizer"]["params"] == {
        "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert plan.schedule is not None
    assert [plan.schedule(step) for step in (258, 505, 999)] == pytest.approx([1e-3 * (1 - 248 / 990), 5e-4, 5e-4])


@pytest.mark.parametrize(("change", "line"), [
    ({"num-layerz": 2}, 'pythia.yml: num-layerz: .*Did you mean "num_layers"'),
    ({"pos-emb": "sinusoidal"}, "pythia.yml: pos-emb: found sinusoidal; expected one of learned, rotary, alibi"),
    ({"moe_num_experts": 8}, "moe_num_experts: nothing here computes this: the router and the experts of GPT-NeoX"),
    ({"norm": "rmsnorm"}, "no family of models here computes it; the most similar one"),
    ({"lr-decay-style": "exponential"}, "lr-decay-style: found exponential; expected one of linear, cosine, constant"),
    ({"num-unique-layers": 2}, "pythia.yml: num-unique-layers: nothing here computes this: parameters that several"),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge: DeepSpeed has no such key"),
    ({"attention-config": [[["mamba"], 6]]}, "attention-config: found mamba; expected global or flash"),
    ({"hidden-size": "wide"}, "hidden-size: found wide; expected a number"),
    ({"vocab-file": "other.json"}, "--vocab_size: the input does not say how many tokens"),
])
def test_errors_name_the_setting(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    file = written(tmp_path, "pythia.yml", {**pythia("70m"), **change})
    with pytest.raises(ConfigError, match=line):
        main([file, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def neox_rate(number: int, *, style: str, warmup: int, end: int, lowest: float) -> float:
    """Return the rate of GPT-NeoX with the peak 1 (megatron/learning_rates.py)."""
    if warmup and number <= warmup:
        return max(1, number) / warmup
    progress = (number - warmup) / (end - warmup)
    return max(1 - progress if style == "linear" else lowest + (1 - lowest) / 2 * (math.cos(math.pi * progress) + 1),
               lowest)


def megatron_rate(number: int, *, style: str, warmup: int, end: int, lowest: float) -> float:
    """Return the rate of Megatron-LM with the peak 1 (megatron/core/optimizer_param_scheduler.py); WSD decays 20."""
    if warmup and number <= warmup:
        return number / warmup
    if number > end:
        return lowest
    progress = (number - warmup) / (end - warmup)
    after = (number - (end - 20)) / 20
    return lowest + (1 - lowest) * {
        "linear": 1 - progress, "cosine": (math.cos(math.pi * progress) + 1) / 2,
        "WSD": 1.0 if after <= 0 else 1 - math.sqrt(after)}[style]


def torchtitan_rate(step: int, *, shape: str, warmup: int, end: int, decay: int, lowest: float) -> float:
    """Return the rate of torchtitan with the peak 1 (torchtitan/components/optimizer/lr_scheduler.py)."""
    stable = end + 1 - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable:
        return 1.0
    progress = (step + 1 - stable) / decay
    fall = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return lowest + (1 - lowest) * fall[shape]


def rates_of(folder: Path, file: str) -> list[float]:
    """Translate a run of 100 steps with the peak 1, and return all its rates."""
    plan = translated(folder, [file, "--overwrite"], 1)
    assert plan.schedule is not None
    return [plan.schedule(step) for step in range(plan.train_steps)]


def test_each_rate_is_that_of_the_program(tmp_path: Path) -> None:
    """GPT-NeoX's first step alone differs: it has the rate of the second one there, and 0 here."""
    common: dict[str, Any] = {"warmup": 10, "end": 100, "lowest": 0.125}
    for style in ("linear", "cosine"):
        neox = {**LLAMA_OF_NEOX, "train_iters": 100, "warmup": 0.1, "lr_decay_style": style, "min_lr": 0.125,
                "optimizer": {"type": "Adam", "params": {"lr": 1.0}}, "padded_vocab_size": 512}
        assert rates_of(tmp_path, written(tmp_path, "a.yml", neox))[1:] == pytest.approx(
            [neox_rate(number, style=style, **common) for number in range(1, 100)], abs=1e-2 / 3)
    for style in ("linear", "cosine", "WSD"):
        script = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --lr 1 "
                  "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 110 --lr-decay-iters 100 "
                  f"--min-lr 0.125 --lr-warmup-iters 10 --lr-decay-style {style} --lr-wsd-decay-iters 20 "
                  "--lr-wsd-decay-style minus_sqrt")
        assert rates_of(tmp_path, written(tmp_path, "a.sh", script)) == pytest.approx(
            [megatron_rate(number, style=style, **common) for number in range(110)])
    for shape, ratio in (("linear", None), ("cosine", None), ("sqrt", 0.25)):
        toml = (f'[model]\nflavor = "debugmodel"\n[optimizer]\nlr = 1.0\n[training]\nsteps = 100\n[lr_scheduler]\n'
                f'warmup_steps = 10\nmin_lr_factor = 0.125\ndecay_type = "{shape}"\n'
                + (f"decay_ratio = {ratio}\n" if ratio else ""))
        assert rates_of(tmp_path, written(tmp_path, "a.toml", toml)) == pytest.approx(
            [torchtitan_rate(step, shape=shape, decay=25 if ratio else 90, **common) for step in range(100)])


@pytest.mark.parametrize(("name", "extra"), [
    ("linear", {}), ("cosine", {}), ("constant_with_warmup", {}), ("inverse_sqrt", {}),
    ("polynomial", {"lr_end": 0.25}), ("cosine_with_min_lr", {"min_lr": 0.125}),
    ("warmup_stable_decay", {"num_decay_steps": 20})])
def test_each_rate_is_that_of_transformers(tmp_path: Path, name: str, extra: dict[str, Any]) -> None:
    arguments = {"config_name": "tiny", "output_dir": "out", "max_steps": 100, "warmup_steps": 10, "learning_rate": 1.0,
                 "lr_scheduler_type": name, "lr_scheduler_kwargs": extra}
    found = rates_of(tmp_path, written(tmp_path, "a.json", arguments))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = transformers.get_scheduler(name, optimizer, 10, 100, scheduler_specific_kwargs=extra)
    for rate in found:
        assert rate == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


SCRIPT = """
#!/bin/bash
tokens=$(( 300 * 1000 ))
num_gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
options=" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
if [ "${checkpoint}" = "true" ]; then
options="${options} --checkpoint-activations"
fi
ARGS=("--vocab-size 512" "--lr 1e-3")
python tools/report.sh --verbose
echo pretrain_gpt.py ${options}
deepspeed pretrain_gpt.py ${options} ${ARGS[@]} --lr 2e-3 --micro-batch-size $((8/2)) \\
    --train-tokens ${tokens} &>> log_${num_gpus}.txt
"""


def test_only_the_command_that_starts_the_program_is_read(tmp_path: Path) -> None:
    settings = read_settings([written(tmp_path, "train.sh", SCRIPT)], [], None)
    assert (settings.given["train_tokens"], settings.given["micro_batch_size"], settings.given["lr"]) == (
        "300000", "4", "2e-3")
    assert {"query_gpu", "verbose", "format"}.isdisjoint(settings.given)
    assert settings.notes[0] == 'train.sh: line 6 was not understood: if [ "${checkpoint}" = "true" ] (taken as true)'
    assert settings.notes[1:] == (f"{tmp_path / 'train.sh'}: --lr is given several times: the last value is used",)


@pytest.mark.parametrize(("name", "content", "line"), [
    ("a.yml", "", "a.yml: found a NoneType; expected a mapping"), ("a.yml", "a: [", "a.yml: it is not YAML: line 1"),
    ("a.yml", "num-layers: 1\nnum_layers: 2", "the key num_layers is there twice"),
    ("a.json", "[1]", "a.json: found a list; expected a mapping"), ("a.json", "{", "a.json: it is not JSON"),
    ("a.toml", "[model", "a.toml: it is not TOML"), ("a.sh", "--num-layers 'x", "is not a list of words"),
    ("a.yml", "seed: 1", "--from: the settings do not show which program"),
    ("a.sh", "--num-layers $LAYERS --hidden-size 8", r"a.sh: --num-layers: found \$LAYERS; expected a number"),
    ("a.sh", "--num-layers 2 --hidden-size 64 --num-attention-heads 3 --seq-length 8 --vocab-size 9",
     "no family of models here computes it"),
    ("a.sh", "python pretrain_bert.py --num-layers 2", "pretrain_bert.py trains no GPT-style model on text"),
    ("a.json", {"output_dir": "x", "max_steps": 9, "config_name": "tiny", "lr_scheduler_type": "cosine",
                "lr_scheduler_kwargs": {"num_cycles": 2}}, "nothing here computes num_cycles 2 of cosine"),
    ("a.json", {"model_type": "llama", "vocab_size": 9, "hidden_size": 8}, "config.json of a model.* as --model of"),
    ("a.json", {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}, "as --deepspeed_config of"),
    ("a.toml", '[model]\nname = "llama4"\nflavor = "17Bx16E"', "the model llama4 17Bx16E is not in the table"),
    ("a.json", {"output_dir": "x", "learning_rate": 1, "deepspeed": {"zero_optimisation": {}}}, "Did you mean"),
])
def test_files_that_cannot_be_translated(tmp_path: Path, name: str, content: Any, line: str) -> None:
    file = written(tmp_path, name, content)
    with pytest.raises(ConfigError, match=line):
        main([file, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_files_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    words = [written(tmp_path, "pythia.yml", pythia("70m")), "--output", str(tmp_path / "out")]
    main(words)
    with pytest.raises(ConfigError, match="--overwrite replaces it"):
        main(words)
    main([*words, "--overwrite"])


def test_several_files_must_not_repeat_a_setting(tmp_path: Path) -> None:
    first = written(tmp_path, "model.yml", {"num-layers": 2})
    with pytest.raises(ConfigError, match=r"num_layers: the same setting is in .*model.yml: num-layers"):
        read_settings([first, written(tmp_path, "other.yml", {"num_layers": 3})], [], None)


# one complete input of each program, to which the property tests add settings
BASES: dict[str, dict[str, Any]] = {
    "neox": {name.replace("-", "_"): value for name, value in LLAMA_OF_NEOX.items()},
    "megatron": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512,
                 "max_position_embeddings": 64, "micro_batch_size": 1, "train_iters": 100, "lr": 1e-3, "bf16": True},
    "trainer": {"config_name": "tiny", "output_dir": "out", "max_steps": 100},
    "torchtitan": {"model.flavor": "debugmodel"},
}
VALUES: tuple[Any, ...] = (True, False, 1, 0, 2, 0.5, -1, "", "x", "none", "64", [], [1], {},
                            {"enabled": True}, None, 10**30, "1e-3")


def names_of(program: str) -> list[str]:
    """List all settings of a program that the golden file has."""
    golden = SETTINGS[PROGRAMS[program]]
    return sorted({current_name(name) for name in f"{golden['known']} {golden['without_counterpart']}".split()})


def verdict_is_complete(settings: Settings, result: Result) -> None:
    for name, value in settings.given.items():
        rows = [row for row in result.rows if row == name or row.startswith(f"{name}.")]
        assert rows, f"{settings.program}: {name} = {value} has no verdict"
    assert {row.outcome for row in result.rows.values()} <= {BECAME, DIFFERS, NONE}
    assert all(row.text for row in result.rows.values())


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_setting_of_each_program_is_known(program: str) -> None:
    for name in names_of(program):
        check_names(Settings(program, {name: None}))


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_setting_alone_and_in_random_subsets_has_a_verdict_or_one_line(program: str) -> None:
    base, names = BASES[program], names_of(program)
    random_subset = random.Random(32)
    default = dict(defaults_of(program))
    accepted = 0
    subsets = [[name] for name in names] + [random_subset.sample(names, 6) for _ in range(150)]
    for subset in subsets:
        values = {name: default.get(name, random_subset.choice(VALUES)) for name in subset if name not in base}
        settings = Settings(program, {**base, **values})
        try:
            result = translate(settings, vocab_size=512)
        except ConfigError:  # one line; anything else is a defect
            continue
        accepted += 1
        verdict_is_complete(settings, result)
    assert accepted > len(names) // 2


def test_the_table_says_what_is_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([written(tmp_path, "a.yml", LLAMA_OF_NEOX), "--output", str(tmp_path / "out"), "--vocab_size", "32000"])
    out = capsys.readouterr().out
    assert "not given; lr_warmup_steps: 10" in out
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text(encoding="utf-8"))["lr_warmup_steps"] == 10


def test_text_with_line_breaks_begins_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths, names and the output folder with line breaks remain values and comments of run.yaml."""
    injected = "".join(f"{line_break}notify_command: x" for line_break in ("\n", "\r", "\x85", "\u2028"))
    names = ("data_path", "save", "load", "tensorboard_dir", "wandb_team", "wandb_host", "hostfile")
    settings = {name.replace("-", "_"): value for name, value in pythia("70m").items()} | \
        dict.fromkeys(names, f"some{injected}")
    main([written(tmp_path, "pythia.yml", settings), "--output", str(tmp_path / f"out{injected}")])
    values = yaml.safe_load(next(tmp_path.glob("out*/run.yaml")).read_text(encoding="utf-8"))
    assert not values.keys() - FLAGS.keys()
    assert "notify_command" not in values
    assert values["save"] == f"some{injected}"
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("notify_command")]


@pytest.mark.parametrize("name", ["extension", "notify_command", "model_code", "dataset_module"])
def test_a_foreign_file_sets_no_flag_that_loads_code_or_sends(name: str, tmp_path: Path) -> None:
    settings = {key.replace("-", "_"): value for key, value in pythia("70m").items()} | {name: "evil:EXTENSION"}
    with pytest.raises(ConfigError, match=f"{name}: GPT-NeoX has no setting that is known here by this name"):
        main([written(tmp_path, "pythia.yml", settings), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
