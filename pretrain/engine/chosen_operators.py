"""Choose the kernels of attention on CUDA. All ranks choose the same ones."""

import warnings
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from torch.nn.attention import SDPBackend

from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.model.config import ModelConfig
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.flex_attention import flex_causal_attention, reject_flex, why_not_flex
from pretrain.model.kernels.torch_attention import alibi_slopes, takes_fewer_heads, torch_causal_attention
from pretrain.model.parameters import DTYPES

_NAMES = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN",
          SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.MATH: "math"}
_TOLERANCE = 0.02  # of outputs and gradients in 16 bits, relative to their norm


@dataclass(frozen=True)
class _Attention:
    """An attention of the model: its inputs for a micro-batch, and how the scores are computed."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
    window: int
    softcap: float
    slopes: torch.Tensor | None
    documents: Documents | None
    dropout: float
    scale: float

    @property
    def is_special(self) -> bool:
        return bool(self.window or self.softcap or self.slopes is not None or self.documents is not None)


def choose_attention(plan: Plan, device: torch.device) -> str:
    """Test the fused kernels of special attentions, and describe the operators of all. Collective.

    All ranks choose the same ones. If a kernel fails or has other results than separate operators, it is not used.
    """
    if chosen := plan.model.implementation.attention_name(plan.model):
        return chosen
    reject_flex("--plain_operators" if plan.args.plain_operators else "")
    found = []
    for window in dict.fromkeys(plan.model.window(index) for index in range(plan.model.num_layers)):
        attention = _attention_of(plan, window if window < plan.args.seq_length else 0, device)
        found.append(_describe(attention))
    return ", ".join(dict.fromkeys(found))


def _attention_of(plan: Plan, window: int, device: torch.device) -> _Attention:
    model, length, batch = plan.model, plan.args.seq_length, plan.layout.micro_batch_size
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, model.head_size, generator=generator, device=device,
                           dtype=DTYPES[plan.layout.precision]).requires_grad_()
               for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads))
    documents = None
    if plan.args.document_attention:  # documents of a third of the sample
        documents = Documents((torch.arange(length, device=device) % max(1, length // 3)).expand(batch, -1))
    return _Attention((q, k, v), window, model.attention_softcap, _slopes(model), documents, model.attention_dropout,
                      model.attention_scale or model.head_size**-0.5)


def _slopes(model: ModelConfig) -> torch.Tensor | None:
    return alibi_slopes(model.num_heads) if model.position == "alibi" else None


def _describe(attention: _Attention) -> str:
    q, k, v = attention.inputs
    if not attention.is_special:
        return _sdpa_backend(q, k, v, dropout=attention.dropout)
    reason = why_not_flex(q, dropout=attention.dropout, on_cuda=q.device.type == "cuda")
    if not reason:
        failures = [text for text in gather(_failure_of_flex(attention)) if text]
        if not failures:
            return "flex_attention"
        reason = f"its kernel failed: {failures[0]}"
        reject_flex(reason)
    if attention.softcap:
        return f"separate operators (no flex_attention: {reason})"
    mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device)
    return f"{_sdpa_backend(q, k, v, mask=mask, dropout=attention.dropout)} with a mask (no flex_attention: {reason})"


def _sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None,
                  dropout: float = 0.0) -> str:
    """Return the name of the kernel that torch chooses; of the slowest one, also why it takes no other."""
    grouped = mask is None and q.shape[1] != k.shape[1] and takes_fewer_heads(q)
    if not grouped:  # torch_attention.py repeats the heads
        k = v = q
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None, enable_gqa=grouped))
    name = _NAMES.get(chosen, str(chosen))
    if chosen != SDPBackend.MATH:
        return name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cuda.can_use_flash_attention(
            torch.backends.cuda.SDPAParams(q, k, v, mask, dropout, mask is None, grouped), debug=True)
    reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
    return f"{name} ({reasons[-1]})" if reasons else name


def _failure_of_flex(attention: _Attention) -> str:
    """Compare outputs and gradients of the first key/value head of the first sample; return what differs, or ""."""
    q, k, v = attention.inputs
    group = q.shape[1] // k.shape[1]
    try:
        out = flex_causal_attention(q, k, v, scale=attention.scale, window=attention.window, softcap=attention.softcap,
                                    alibi_slopes=attention.slopes, documents=attention.documents)
        grad = out.detach().roll(1, dims=-1)  # the random generators remain as they are
        found = [x[:1, : x.shape[1] * group // q.shape[1] or 1].float()
                 for x in (out, *torch.autograd.grad(out, (q, k, v), grad))]
        first = [x[:1, :heads].detach().float().requires_grad_() for x, heads in ((q, group), (k, 1), (v, 1))]
        documents = attention.documents and Documents(attention.documents.positions_BT[:1])
        expected_out = torch_causal_attention(
            *first, scale=attention.scale, window=attention.window, softcap=attention.softcap, documents=documents,
            alibi_slopes=None if attention.slopes is None else attention.slopes[:group], plain=True)
        expected = [expected_out, *torch.autograd.grad(expected_out, first, grad[:1, :group].float())]
    except Exception as error:  # a kernel that cannot be compiled can raise any type of exception
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for name, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), found, expected, strict=True):
        difference = float((a.detach() - b.detach()).norm() / b.detach().norm())
        if not difference < _TOLERANCE:
            return f"its {name} differs by {difference:.2g} from that of separate operators"
    return ""


def operators_on_cuda(engine: DeepSpeedEngine, plan: Plan) -> dict[str, str]:
    """Choose and describe the operators of a run; {} on other devices. Call it before blocks are compiled. Collective.

    The peak of memory until now, with the tests of kernels, belongs to no step: it is forgotten.
    """
    if engine.device.type != "cuda":
        return {}
    attention = choose_attention(plan, engine.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"attention": attention, "optimizer": optimizer_name(engine)}


def optimizer_name(engine: DeepSpeedEngine) -> str:
    """Return the class that updates the weights, such as "FusedAdam of DeepSpeed" or "AdamW of torch (fused)"."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's wrappers for ZeRO and 16 bits
        optimizer = optimizer.optimizer
    library = type(optimizer).__module__.split(".")[0]
    fused = " (fused)" if any(group.get("fused") for group in optimizer.param_groups) else ""
    return f"{type(optimizer).__name__} of {library}{fused}"
