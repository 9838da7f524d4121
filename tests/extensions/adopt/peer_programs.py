"""Runs of GPT-NeoX and Megatron-DeepSpeed themselves that continue here, on 4 CPU ranks.

`python -m tests.extensions.adopt.peer_programs FOLDER CORPUS CLONES [WORD ...]` trains 12 steps with the programs,
adopts step 6, continues in three layouts, and prints the rows of a table in the page megatron.md. CORPUS is the prefix
of token files with a vocabulary of 256. CLONES is a folder with clones of the repositories: gpt-neox,
Megatron-DeepSpeed, and Megatron-DeepSpeed-old, which is the latter at 676a482c^, the commit before the order of
query_key_value changed. They are not part of this project, and no test needs them. With words, only runs with one of
them in the name are measured.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.extensions.adopt.adopt import adopt, plan_adoption
from pretrain.extensions.adopt.megatron.layers import read
from tests.extensions.adopt import WORKERS
from tests.extensions.adopt.adopted import (
    BATCH,
    SAVED,
    SEQ_LENGTH,
    STEPS,
    Layout,
    Original,
    continued_case,
    write_samples,
    zero,
)
from tests.support.launch import run_ranks, run_worker, tails
from tests.support.layouts import relative_difference

RANKS, MICRO = 4, 2
_FP32_GRADIENTS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
_NEOX = {
    "pipe_parallel_size": 2, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": SEQ_LENGTH,
    "max_position_embeddings": 128, "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": True,
    "gpt_j_residual": True, "output_layer_parallelism": "column", "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
    "min_lr": 0.0003, "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": MICRO,
    "gradient_clipping": 1.0, "weight_decay": 0.1, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "train_iters": STEPS, "lr_decay_iters": STEPS, "lr_decay_style": "cosine", "warmup": 0.25,
    "make_vocab_size_divisible_by": 96, "tokenizer_type": "CharLevelTokenizer", "distributed_backend": "gloo",
    "checkpoint_factor": 10**6, "eval_interval": 10**6, "precision": "fp32"}
_SEQUENTIAL = {"gpt_j_residual": False, "rotary_pct": 1.0}
_NEOX_LLAMA = {**_SEQUENTIAL, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5, "activation": "swiglu", "num_kv_heads": 2,
               "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "intermediate_size": 768,
               "mlp_multiple_of": 64}
_MEGATRON = (
    f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length {SEQ_LENGTH} --max-position-embeddings 128 "
    f"--micro-batch-size {MICRO} --global-batch-size {BATCH} --train-iters {STEPS} --lr 0.003 --min-lr 0.0003 "
    f"--lr-decay-style cosine --lr-warmup-iters 3 --lr-decay-iters {STEPS} --weight-decay 0.1 --clip-grad 1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer "
    "--vocab-size 255 --make-vocab-size-divisible-by 96 --deepspeed --distributed-backend gloo --zero-stage 1 "
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion "
    "--no-async-tensor-model-parallel-allreduce --save-interval 6 --log-interval 1 --eval-iters 0 "
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2")
_MEGATRON_LLAMA = ("--swiglu --normalization rmsnorm --use-rotary-position-embeddings --no-position-embedding "
                   "--disable-bias-linear --num-key-value-heads 2 --untie-embeddings-and-output-weights "
                   "--ffn-hidden-size 96")


@dataclass(frozen=True)
class Peer:
    """A run of one of the programs."""

    source: str  # shown in the table
    clone: str
    settings: dict[str, Any] | str
    precision: str = "fp32"
    tensor_parallel: int = 2
    accepted: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for files."""
        return "".join(letter if letter.isalnum() else "_" for letter in f"{self.source} {self.precision}")


PEERS = (
    Peer("GPT-NeoX, parallel residual, data parallelism", "gpt-neox", {}, tensor_parallel=1),
    Peer("GPT-NeoX, parallel residual, with 2 summands of biases", "gpt-neox", {}, accepted=("other_states",)),
    Peer("GPT-NeoX, sequential residual, tied", "gpt-neox", {**_SEQUENTIAL, "no_weight_tying": False}),
    Peer("GPT-NeoX, sequential residual, no pipeline", "gpt-neox", {**_SEQUENTIAL, "pipe_parallel_size": 0}),
    Peer("GPT-NeoX, learned positions, tied", "gpt-neox", {**_SEQUENTIAL, "pos_emb": "learned",
                                                          "no_weight_tying": False}),
    *(Peer("GPT-NeoX, SwiGLU, grouped queries", "gpt-neox", _NEOX_LLAMA, precision) for precision in ("fp32", "bf16")),
    Peer("Megatron-DeepSpeed, learned positions, tied", "Megatron-DeepSpeed", ""),
    *(Peer("Megatron-DeepSpeed before 676a482c, SwiGLU, grouped queries", "Megatron-DeepSpeed-old", _MEGATRON_LLAMA,
           precision) for precision in ("fp32", "bf16")))


def layouts(peer: Peer) -> tuple[Layout, ...]:
    """Return the layout of the original, and two others."""
    blocks = {**zero(1).blocks, "pipeline": {"stages": 2}}
    same = Layout("2 pipeline stages x 2 data-parallel", RANKS, blocks) if peer.tensor_parallel == 1 else \
        Layout("2 pipeline stages x 2 tensor-parallel", RANKS, {**blocks, "tensor_parallel": {"autotp_size": 2}})
    return same, zero(2), zero(3, 1)


def train(peer: Peer, folder: Path, clones: Path) -> tuple[Path, list[float]]:
    """Train with the program, and return the checkpoint and the losses."""
    folder.mkdir(parents=True)
    has_pipeline = isinstance(peer.settings, str) or peer.settings.get("pipe_parallel_size") != 0
    replicas = RANKS // (2 if has_pipeline else 1) // peer.tensor_parallel
    config = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": 1}, "steps_per_print": 10**6, "zero_allow_untested_optimizer": True,
              **(_FP32_GRADIENTS if peer.precision == "bf16" else {})}
    settings: Any
    if isinstance(peer.settings, dict):
        values = {**_NEOX, **peer.settings, "model_parallel_size": peer.tensor_parallel, "save": str(folder / "saved"),
                  "gradient_accumulation_steps": BATCH // MICRO // replicas}
        if peer.precision == "bf16":
            values |= {**_FP32_GRADIENTS, "precision": "bfloat16"}
        settings = str(folder / "settings.yml")
        Path(settings).write_text(yaml.safe_dump(values))
    else:
        (folder / "config.json").write_text(json.dumps(config))
        settings = [*f"{_MEGATRON} {peer.settings}".split(), "--save", str(folder / "saved"),
                    "--deepspeed_config", str(folder / "config.json"), *(["--bf16"] * (peer.precision == "bf16"))]
    job = {"program": "neox" if isinstance(peer.settings, dict) else "megatron", "clone": str(clones / peer.clone),
           "settings": settings, "config": config, "samples": str(folder.parent / "samples.npy"), "save_at": SAVED,
           "steps": STEPS, "losses": str(folder / "losses.json")}
    (folder / "job.json").write_text(json.dumps(job))
    results = run_ranks([str(WORKERS / "peer_program.py"), "job.json"], RANKS, cwd=folder,
                        environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert all(result.returncode == 0 for result in results), tails(folder, RANKS)
    return folder / "saved" / f"global_step{SAVED}", json.loads((folder / "losses.json").read_text())


def measure(peers: Sequence[Peer], folder: Path, corpus: str, clones: Path) -> list[str]:
    """Return the rows of the table: the largest relative difference of the losses after the checkpoint."""
    folder.mkdir(parents=True)
    write_samples(corpus, folder / "samples.npy")
    losses, cases = {}, []
    for peer in peers:
        checkpoint, losses[peer.name] = train(peer, folder / peer.name, clones)
        run = folder / f"{peer.name}_adopted"
        adopt(plan_adoption(read(checkpoint, None), frozenset(peer.accepted)), run)
        original = Original(peer.name, "", peer.precision, (), {})
        cases += [(peer, layout, continued_case(original, layout, run, corpus)) for layout in layouts(peer)]
    found: dict[str, Any] = {}
    for ranks in sorted({layout.ranks for _, layout, _ in cases}):
        found |= run_worker("layout_worker.py", [case for _, layout, case in cases if layout.ranks == ranks], ranks,
                            folder / f"continued{ranks}")
    rows = []
    for peer in peers:
        own = [relative_difference(found[case["name"]]["after"]["loss"], losses[peer.name][SAVED:])
               for each, _, case in cases if each is peer]
        rows.append(f"| {peer.source}, {peer.precision} | " + " | ".join(f"{value:.1e}" for value in own) + " |")
    return rows


if __name__ == "__main__":
    peers = [peer for peer in PEERS if not sys.argv[4:] or any(word in peer.name for word in sys.argv[4:])]
    print("\n".join(measure(peers, Path(sys.argv[1]).absolute(), str(Path(sys.argv[2]).absolute()),
                            Path(sys.argv[3]).absolute())))
