"""Settings of public runs in the words of their programs: the facts of each run, in a short form of our own."""

from typing import Any

# EleutherAI/pythia, models/: layers, hidden size, heads, peak rate, micro-batch, accumulation, tensor-parallel, stage
_PYTHIA: dict[str, tuple[int, int, int, float, int, int, int, int]] = {
    "14m": (6, 128, 4, 1e-3, 32, 1, 1, 0), "31m": (6, 256, 8, 1e-3, 32, 1, 1, 0),
    "70m": (6, 512, 8, 1e-3, 32, 1, 1, 1), "160m": (12, 768, 12, 6e-4, 32, 1, 1, 1),
    "410m": (24, 1024, 16, 3e-4, 32, 1, 1, 1), "1b": (16, 2048, 8, 2.5e-4, 16, 1, 1, 1),
    "1.4b": (24, 2048, 16, 2e-4, 16, 1, 1, 1), "2.8b": (32, 2560, 32, 1.6e-4, 16, 1, 1, 1),
    "6.9b": (32, 4096, 32, 1.2e-4, 8, 2, 2, 1), "12b": (36, 5120, 40, 1.2e-4, 8, 2, 4, 1),
}
PYTHIA_RANKS = {"14m": 32, "31m": 32, "70m": 32, "160m": 32, "410m": 32, "1b": 64, "1.4b": 64, "2.8b": 64,
                "6.9b": 128, "12b": 256}
PYTHIA_SIZES = tuple(_PYTHIA)
_DYNAMIC_SCALE = {"fp16": True, "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 12,
                  "hysteresis": 2, "min_loss_scale": 1}


def pythia(size: str) -> dict[str, Any]:
    """Return the settings of a Pythia, with the hyphens of its YAML."""
    layers, hidden, heads, rate, micro, accumulation, tensor, stage = _PYTHIA[size]
    return {
        "pipe-parallel-size": 1 if stage else 0, "model-parallel-size": tensor, "num-layers": layers,
        "hidden-size": hidden, "num-attention-heads": heads, "seq-length": 2048, "max-position-embeddings": 2048,
        "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": True, "gpt-j-residual": True,
        "output-layer-parallelism": "column", "attention-config": [[["flash"], layers]],
        "scaled-upper-triang-masked-softmax-fusion": True, "bias-gelu-fusion": True, "init_method": "small_init",
        "output_layer_init_method": "wang_init",
        "optimizer": {"type": "Adam", "params": {"lr": rate, "betas": [0.9, 0.95], "eps": 1e-8}}, "min_lr": rate / 10,
        "zero_optimization": {"stage": stage, "allgather_partitions": True, "allgather_bucket_size": 500000000,
                              "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 500000000,
                              "contiguous_gradients": True, "cpu_offload": False},
        "train_micro_batch_size_per_gpu": micro, "gas": accumulation, "data-impl": "mmap",
        "checkpoint-activations": True, "checkpoint-num-layers": 1, "partition-activations": True,
        "synchronize-each-layer": True, "gradient_clipping": 1.0, "weight-decay": 0.1, "hidden-dropout": 0,
        "attention-dropout": 0, "fp16": _DYNAMIC_SCALE, "train-iters": 143000, "lr-decay-iters": 143000,
        "lr-decay-style": "cosine", "warmup": 0.01, "distributed-backend": "nccl", "checkpoint-factor": 1000,
        "extra-save-iters": [0, 1, 2, 4, 8], "eval-interval": 100000, "eval-iters": 10, "log-interval": 10,
        "steps_per_print": 10, "wall_clock_breakdown": True, "train-data-paths": ["data/pile"],
        "valid-data-paths": ["data/pile"], "test-data-paths": ["data/pile"], "tokenizer-type": "HFTokenizer",
        "vocab-file": "data/20B_tokenizer.json", "launcher": "slurm", "deepspeed_slurm": True,
    }


# EleutherAI/gpt-neox, configs/20B.yml: 96 GPUs
NEOX_20B: dict[str, Any] = {
    "vocab_file": "20B_checkpoints/20B_tokenizer.json", "save": "20B_checkpoints", "load": "20B_checkpoints",
    "data_path": "data/pile", "pipe_parallel_size": 4, "model_parallel_size": 2, "num_layers": 44, "hidden_size": 6144,
    "num_attention_heads": 64, "seq_length": 2048, "max_position_embeddings": 2048, "norm": "layernorm",
    "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True, "gpt_j_residual": True,
    "output_layer_parallelism": "column", "scaled_upper_triang_masked_softmax_fusion": True, "bias_gelu_fusion": True,
    "rope_fusion": False, "layernorm_fusion": False, "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1e-8}}, "min_lr": 0.97e-5,
    "zero_optimization": {"stage": 1, "allgather_partitions": True, "allgather_bucket_size": 1260000000,
                          "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 1260000000,
                          "contiguous_gradients": True},
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32, "data_impl": "mmap", "split": "995,4,1",
    "checkpoint_activations": True, "checkpoint_num_layers": 1, "partition_activations": False,
    "synchronize_each_layer": True, "gradient_clipping": 1.0, "weight_decay": 0.01, "hidden_dropout": 0,
    "attention_dropout": 0, "fp16": _DYNAMIC_SCALE, "train_iters": 150000, "lr_decay_iters": 150000,
    "distributed_backend": "nccl", "lr_decay_style": "cosine", "warmup": 0.01, "checkpoint_factor": 500,
    "eval_interval": 1000, "eval_iters": 10, "log_interval": 2, "steps_per_print": 2, "wall_clock_breakdown": False,
    "tokenizer_type": "HFTokenizer", "tensorboard-dir": "tensorboard", "log_dir": "logs",
}

# bigscience-workshop/bigscience, train/tr11-176B-ml: 384 GPUs; the JSON is bf16 with ZeRO stage 0
BLOOM_176B = """--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --num-layers 70 --hidden-size 14336
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2
    --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --train-samples 220_000_000 --embed-layernorm
    --position-embedding-type alibi --pad-vocab-size-to 250880 --init-method-std 0.0048 --sync-tp-duplicated-parameters
    --attention-dropout 0 --hidden-dropout 0 --bf16 --seed 42 --checkpoint-activations
    --abort-on-unmet-fused-kernel-constraints
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
    --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path tokenizer --data-path data/roots --split 949,50,1
    --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1 --tensorboard-dir tb
    --tensorboard-queue-size 5 --deepspeed --zero-stage 0 --exit-duration-in-mins 5990"""

# TinyLlama 1.1B (arXiv 2401.02385), in the words of Megatron-LM
TINY_LLAMA = """--num-layers 22 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4
    --ffn-hidden-size 5632 --seq-length 2048 --max-position-embeddings 2048 --swiglu --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope --no-position-embedding
    --untie-embeddings-and-output-weights --vocab-size 32000 --make-vocab-size-divisible-by 1 --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 8 --global-batch-size 1024 --train-iters 715256 --lr 4e-4 --min-lr 4e-5
    --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --bf16 --use-distributed-optimizer --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
    --tokenizer-model tokenizer.model --data-path 0.7 data/slimpajama 0.3 data/starcoder --save out --load out
    --save-interval 5000 --use-flash-attn --transformer-impl transformer_engine"""

# NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh: a script with arrays and variables
GPT3_175B = """#!/bin/bash
# Runs the "175B" parameter model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE=gpt2-vocab.json
DATA_PATH=data/pile
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-file $VOCAB_FILE
    --merge-file gpt2-merges.txt
    --tokenizer-type GPT2BPETokenizer
    --split 949,50,1
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --eval-iters 10
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    ${DATA_ARGS[@]} \\
    ${EVAL_AND_LOGGING_ARGS[@]}
"""

# the command of transformers' run_clm.py, with GPT-2 from scratch and DeepSpeed
RUN_CLM = """deepspeed --num_gpus 4 run_clm.py --model_type gpt2 --tokenizer_name gpt2
    --config_overrides n_embd=1024,n_head=16,n_layer=24,n_positions=1024 --train_file train.txt
    --validation_file valid.txt --block_size 1024 --do_train --do_eval --per_device_train_batch_size 4
    --gradient_accumulation_steps 2 --max_steps 2000 --learning_rate 6e-4 --lr_scheduler_type cosine --warmup_ratio 0.01
    --weight_decay 0.1 --adam_beta2 0.95 --bf16 --output_dir out --logging_steps 10 --save_steps 200
    --eval_strategy steps --eval_steps 100 --save_total_limit 2 --report_to tensorboard
    --gradient_checkpointing True --seed 7 --overwrite_output_dir --deepspeed DS_JSON"""
RUN_CLM_JSON: dict[str, Any] = {
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000,
}


def torchtitan_toml(flavor: str, *, rate: float, batch: int, tensor: int, recompute: str) -> str:
    """Return the TOML of a Llama 3 (torchtitan v0.2.2, train_configs/)."""
    return f"""
[job]
dump_folder = "outputs"
description = "Llama 3 {flavor} training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "{flavor}"
hf_assets_path = "assets/hf"
[optimizer]
name = "AdamW"
lr = {rate}
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = {batch}
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = {tensor}
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
interval = 500
last_save_model_only = true
async_mode = "disabled"
[activation_checkpoint]
mode = "{recompute}"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
[validation]
enable = false
freq = 500
steps = 1200
"""
