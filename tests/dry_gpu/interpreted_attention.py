"""flex_attention's kernels, as inductor writes them, computed by triton's interpreter in the memory of a dry GPU.

    TRITON_INTERPRET=1 dry-gpu python -m tests.dry_gpu.interpreted_attention

Prints for each case the relative errors of the output and of the gradients of q, k and v against fp32 on the CPU. In
fp16: numpy, with which the interpreter computes, has no bf16. The masks are made on the CPU, because torch's own
kernels compute nothing here.
"""

import torch

from pretrain.model.kernels import flex_attention as flex
from pretrain.model.kernels.documents import Documents, first_keys
from pretrain.model.kernels.torch_attention import alibi_slopes, torch_causal_attention
from tests.support.tensors import relative_error

LENGTH, HEADS = 256, 4
# size of a head, window, soft-capping, ALiBi, documents, heads of keys
CASES = ((16, 0, 0.0, False, True, 4), (64, 100, 0.0, False, True, 2), (32, 0, 0.0, True, False, 4),
         (128, 0, 30.0, False, False, 2))
_TABLES = [f"{full}{of}_{what}" for full in ("", "full_") for of in ("kv", "q") for what in ("num_blocks", "indices")]


def replace_tanh() -> None:
    """Give soft-capping a function that the interpreter can call, in place of CUDA's libdevice."""
    import triton
    import triton.language as tl
    from torch._inductor.runtime.triton_helpers import libdevice

    def tanh(x):
        return 2 * tl.sigmoid(2 * x) - 1

    globals()["tl"] = tl  # where triton looks for it
    libdevice.tanh = triton.jit(tanh)


def mask_of_the_host(first_BT: torch.Tensor) -> object:
    """Return the BlockMask on the GPU with the tables that the CPU computes."""
    on_host, on_gpu = flex.make_block_mask(first_BT), flex.make_block_mask(first_BT.cuda())
    for name in _TABLES:
        setattr(on_gpu, name, getattr(on_host, name).cuda())
    return on_gpu


def errors(head_size: int, window: int, softcap: float, alibi: bool, is_packed: bool, kv_heads: int) -> list[float]:
    """Return the relative errors of a case."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, LENGTH, head_size, generator=generator).half()
               for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    positions_BT = (torch.arange(LENGTH) % (100 if is_packed else LENGTH)).expand(2, -1)
    how = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes(HEADS) if alibi else None, "scale": 0.1}
    flex.block_mask = lambda *_: mask_of_the_host(first_keys(positions_BT, window))
    results = []
    for move, operator, options in ((torch.Tensor.float, torch_causal_attention, {"plain": True}),
                                    (torch.Tensor.cuda, flex.flex_causal_attention, {})):
        q, k, v, grad = (move(tensor) for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = operator(*leaves, documents=Documents(positions_BT) if is_packed else None, **how, **options)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    return [float(relative_error(found.detach().cpu(), exact.detach()))
            for exact, found in zip(*results, strict=True)]


if __name__ == "__main__":
    replace_tanh()
    for case in CASES:
        print("errors:", *(f"{error:.5f}" for error in errors(*case)), flush=True)
