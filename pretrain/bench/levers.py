"""tools/bench.py --explain: what makes training fast here; each lever in one place, with the file that has it."""

import textwrap
from dataclasses import dataclass

_WIDTH = 110


@dataclass(frozen=True)
class Lever:
    """One thing that is done to be faster or smaller."""

    name: str
    home: str  # the file, or the key of the DeepSpeed JSON
    what: str
    when: str  # it is on
    buys: str  # on which device; what was not measured says so


LEVERS = (
    Lever("attention of matrix products", "pretrain/model/kernels/cpu_attention.py",
          "Causal attention in blocks of 128 query rows, each two matrix products and a softmax; what lies above the "
          "diagonal is not computed; the backward pass computes the probabilities anew, so that q, k and v are all "
          "that is kept.",
          "CPU, bf16, no attention dropout, no --plain_operators. Otherwise torch's scaled_dot_product_attention (on "
          "CUDA: its flash or cuDNN kernel, whichever torch picks).",
          "CPU: forward and backward in half of torch's time at 512 positions, 0.8 of it at 2,048 (8 heads of 64, "
          "AVX512_BF16)."),
    Lever("the MLP's second half as one operator", "pretrain/model/kernels/activation.py",
          "down(activation(up)), with a gate or without, keeps its inputs alone and computes the activation anew in "
          "the backward pass.",
          "Unless --plain_operators asks for torch's own.",
          "Memory on every device: a quarter of what a GPT-2 block keeps. It costs one more pass over the MLP's inner "
          "elements. CUDA: not measured."),
    Lever("GELU in C", "pretrain/model/kernels/cpu_kernels.c, cpu_kernels.py",
          "The tanh approximation and its derivative in one vectorised loop over bf16 numbers, compiled when first "
          "used, in a tenth of a second.",
          "CPU, bf16, activation gelu_new or gelu_pytorch_tanh, where there is a C compiler; otherwise torch's "
          "operator.",
          "CPU: 0.5 ns an element forward and 0.6 ns backward, where torch's takes 2.0 ns each (an AVX512_BF16 core)."),
    Lever("head and loss as one operator", "pretrain/model/kernels/fused_loss.py",
          "Logits, cross-entropy and their gradients chunk by chunk of 1,024 tokens, in the forward pass: the logits "
          "never exist as a whole.",
          "Always when training or evaluating a loss, on every engine, tied and untied heads alike. Generation takes "
          "whole logits.",
          "Memory on every device: the logits of a micro-batch in 16 bits and, several times, in fp32 (4,096 tokens x "
          "16k words: 0.13 GB and 0.27 GB each). Time on CPU: what is beside the three matrix products falls from "
          "0.26 s to 0.12 s at that size. CUDA: not measured."),
    Lever("memory kept between steps", "pretrain/distributed/allocator.py",
          "Freed blocks stay with the process; glibc gives every large one back to the kernel, which maps, zeroes and "
          "faults it in anew in each step. With jemalloc (Debian's libjemalloc2; train.py starts itself anew with it) "
          "or, where there is none, with glibc told to keep its heap.",
          "CPU, unless MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ or LD_PRELOAD is set. CUDA has torch's caching "
          "allocator.",
          "CPU: 12 ms instead of 36 ms for a bf16 softmax of 32 MiB, 4 ms instead of 20 ms for an fp32 copy of it. "
          "A step of the preset cpu peaks at 1.22 GB with jemalloc, at 1.45 to 1.64 GB with glibc's heap, and takes "
          "as long."),
    Lever("reduce buckets no larger than the model", "pretrain/config/fill.py",
          "DeepSpeed allocates a bucket for gradients of reduce_bucket_size elements, 5e8 unless told; here at most as "
          "many as the model has parameters, which hold all gradients as well.",
          "ZeRO-1, 2 and 3.",
          "Memory: 1 GB less for a bf16 model of 34 M parameters on CUDA (by arithmetic; not measured). CPU: untouched "
          "pages cost nothing, but the hole in glibc's heap does: its peak varied from 1.45 to 1.79 GB."),
    Lever("compiled blocks", "--compile_blocks",
          "torch.compile of every block, one graph for all of them, so that the time to compile does not grow with "
          "depth; it fuses what lies between the matrix products.",
          "With --compile_blocks, meant for CUDA. tools/bench.py --compile_blocks true gives it to this project.",
          "CUDA: not measured. CPU: slower as a rule, as the attention and GELU above are left out."),
    Lever("TF32", "--tf32", "fp32 matrices multiplied with 10 bits of mantissa.", "With --tf32, on CUDA in fp32.",
          "CUDA: not measured; MFU is still of products in full fp32. Nothing in bf16 or fp16."),
    Lever("fused AdamW", '"optimizer" in the DeepSpeed JSON',
          "DeepSpeed's FusedAdam (compiled ahead by launch/setup.sh): one pass over weights and moments.",
          "Adam and AdamW on CPU, and on CUDA where nvcc is there; otherwise torch's AdamW.",
          "A part of the bare DeepSpeed loop's time too: no difference between the two."),
    Lever("nothing waits in the loop", "pretrain/trainer.py, pretrain/data/loader.py",
          "The next step's samples are read in a thread while this one computes; the loss is read from the device on "
          "logged steps only (--log_interval).",
          "Always.", "Every device: see --what overhead."),
    Lever("checkpoints in the background", "--async_save",
          "Training waits for a copy in host memory only; a process beside it writes and commits.",
          "With --async_save: it takes host memory for a copy of each rank's files.",
          "Every device: see --what checkpoint."),
    Lever("operators compiled ahead", "launch/setup.sh, python -m pretrain.engine.build_ops",
          "DeepSpeed's C++ operators are built once per machine, not within the first step; whatever can be refused is "
          "refused before torch is imported.",
          "After launch/setup.sh.", "Every device: minutes at the first start; see --what startup."),
    Lever("pipelines cut by work", '"pipeline": {"partition_method": "flops"} in the DeepSpeed JSON',
          "Stages of about equal FLOPs, the head's included; DeepSpeed's \"parameters\" counts embeddings, which cost "
          "next to nothing.",
          "Unless the JSON names another method.",
          "Every device, by arithmetic: 2 stages of the preset cpu have 49 : 51 of the FLOPs instead of 39 : 61, which "
          "lifts the bound of 8 micro-batches from 1.52 to 1.74 times one stage's speed; see --what pipeline."),
    Lever("selective recomputation", "cpu_attention.py, activation.py, fused_loss.py",
          "What is large and cheap is computed anew in the backward pass: attention's probabilities (by torch's flash "
          "kernels too), the MLP's activation, the logits' softmax. No matrix product is repeated but q k^T.",
          "Always.", "Memory on every device: a GPT-2 block keeps 12 B T D elements; see the levers above."),
    Lever("activation checkpointing", '"pipeline": {"activation_checkpoint_interval": k} in the DeepSpeed JSON',
          "Groups of k blocks keep their input alone, and are computed anew in the backward pass.",
          "Off; the JSON asks for it.", "Memory, for up to a third more FLOPs, which MFU does not count."),
    Lever("aio settings of NVMe offload", '"aio" in the DeepSpeed JSON',
          "Block size, queue depth and threads of DeepSpeed's transfers between host memory and disk.",
          "With offload to nvme; tools/bench.py --what offload --nvme_path FOLDER finds those that suit a disk.",
          "CPU and CUDA: depends on the disk."),
)


# A step of the preset cpu (34 M parameters, 8 x 512 tokens, bf16), by torch.profiler over three steps on 2 cores.
PROFILE = (("matrix products of projections, MLPs and head", 72.3), ("products within attention", 8.5),
           ("copies and casts", 4.7), ("softmax of attention and loss", 3.1), ("GELU and its derivative", 2.0),
           ("sums of gradients and biases", 2.2), ("layer norms", 1.0), ("AdamW", 0.7))
TRIED = ("fp32 inside torch's attention, chunks of torch's GELU, other memory layouts of the projections, transparent "
         "huge pages, mmap for blocks from 32 MiB on, jemalloc that gives pages back after a minute (each fault costs "
         "more than it saves), tcmalloc (as fast as jemalloc, a little larger), DeepSpeed's TiledFusedLogitsLoss.")
NOT_BUILT = "Liger's kernels and CUDA graphs: there was no GPU to try them on."


def explain() -> str:
    """Every lever: what it is, when it is on, what it buys on which device; then where the time still goes."""
    parts = []
    for lever in LEVERS:
        lines = [f"{lever.name}  [{lever.home}]"]
        for label, text in (("what", lever.what), ("on", lever.when), ("buys", lever.buys)):
            lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<6}", subsequent_indent=" " * 8)
        parts.append("\n".join(lines))
    shares = [f"{what} {share}%" for what, share in PROFILE]
    rest = [*shares, f"everything else {100 - sum(share for _, share in PROFILE):.1f}%"]
    for label, text in (("Where a step's time goes (preset cpu): ", ", ".join(rest)), ("Tried without gain: ", TRIED),
                        ("Not built: ", NOT_BUILT)):
        parts.append(textwrap.fill(label + text, _WIDTH))
    return "\n\n".join(parts)
