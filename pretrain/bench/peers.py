"""Other training programs, and the machine's rate of matrix products, as baselines.

Each function with a `job` is the main function of a process, and never returns. The programs train the same config.json
with this project's initial weights, on the same samples in the same order. The labels are already shifted, as in this
project, so that every position has a loss.

Shapes: B batch, T positions, D hidden size, H query heads, K key/value heads, E elements per head, V vocabulary.
"""

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.bench.processes import LEARNING_RATE, BaselineJob
from pretrain.bench.profile import named_optimizer_step, operator_times
from pretrain.bench.worker import RequestLoop
from pretrain.config.validate import Plan
from pretrain.data.loader import Loader
from pretrain.data.samples.dataset import SampleDataset
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import deepspeed_output
from pretrain.engine.optimizer import parameter_groups
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.hf_weights import to_transformers
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.rope import inverse_frequencies

_PRODUCTS_S = 1.0  # duration of one repetition of `products`


def transformers_model(plan: Plan) -> nn.Module:
    """Return the transformers model in training mode, with this project's initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = as_module(plan.model)
    initialize_parameters(ours, plan.model, seed=plan.args.seed)
    values = {key: value for key, value in plan.model.hf_config.items() if key != "architectures"}
    config = AutoConfig.for_model(**values)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(to_transformers(ours.state_dict(), plan.model))
    return model.train()


def _parameter_count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _micro_batches(plan: Plan, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, labels) of consecutive micro-batches without end, both int64 [B, T]."""
    loader = Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                    gradient_accumulation_steps=1, pin_memory=device.type == "cuda")
    for consumed_samples in itertools.count(0, plan.layout.micro_batch_size):
        for tokens_BT, (labels_BT, _) in loader.step(consumed_samples):
            assert isinstance(tokens_BT, torch.Tensor)  # this loader gives no positions
            yield tokens_BT.to(device, non_blocking=True), labels_BT.to(device, non_blocking=True)


def plain_transformers(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train the transformers model with a plain PyTorch loop."""
    step = _plain_step(job, requests, transformers_model, lambda model, tokens_BT, labels_BT: model(
        input_ids=tokens_BT, labels=labels_BT, shift_labels=labels_BT).loss)
    while True:
        requests.after_step(step())


def plain_modules(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train `PlainModel` with a plain PyTorch loop, like nanoGPT."""
    step = _plain_step(job, requests, plain_model)
    while True:
        requests.after_step(step())


def plain_profile(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Profile the steps of `plain_modules`, one in each repetition."""
    plan, step = job.plan(), _plain_step(job, requests, plain_model)
    while True:
        requests.end_repetition(operators=operator_times(step, vocab_size=plan.model.vocab_size,
                                                         cuda=job.device_kind == "cuda"))


def _plain_step(job: BaselineJob, requests: RequestLoop, make_model: Callable[[Plan], nn.Module],
                loss_of: Callable[..., torch.Tensor] = lambda model, *batch: model(*batch),
                ) -> Callable[[], torch.Tensor]:
    """Return a function that does one training step, as in tutorials, and returns its loss.

    fp32 weights, autocast, gradient clipping, torch's fused AdamW.
    """
    plan = job.plan()
    device = torch.device("cuda" if job.device_kind == "cuda" else "cpu")
    model = make_model(plan).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters()), lr=LEARNING_RATE, betas=(0.9, 0.95),
                                  eps=1e-8, weight_decay=0.1, fused=True)
    batches, is_bf16 = _micro_batches(plan, device), plan.layout.precision == "bf16"
    if job.options.get("compiled"):
        model.compile()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    named_update = named_optimizer_step(update)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss = loss_of(model, *next(batches))
        loss.backward()
        named_update()
        return loss

    requests.report_build(_parameter_count(model))
    return step


def deepspeed_loop(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train the transformers model with the engine of deepspeed.initialize: forward, backward and step."""
    import deepspeed

    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        model = transformers_model(plan)
        parameters = _parameter_count(model)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model.named_parameters()),
                                          config=job.options["ds_config"])
    requests.report_build(parameters)
    for tokens_BT, labels_BT in _micro_batches(plan, engine.device):
        loss = engine(input_ids=tokens_BT, labels=labels_BT, shift_labels=labels_BT).loss
        engine.backward(loss)
        engine.step()
        requests.after_step(loss)
    requests.end()


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dataset for the Trainer's data loader. Each item is one sample."""

    def __init__(self, dataset: SampleDataset, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = torch.from_numpy(self._dataset.samples([index])[0].astype(np.int64))
        return {"input_ids": sample[:-1], "labels": sample[1:], "shift_labels": sample[1:]}


def trainer(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train with transformers.Trainer and the same DeepSpeed JSON. It neither logs nor saves."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("accelerate", problem="transformers.Trainer needs this package, which is not installed",
                          remedy="pip install -c launch/constraints.txt -e '.[bench]'")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    with deepspeed_output("error"):
        init_process_group(running_environment())
    plan = job.plan()
    losses: list[torch.Tensor] = []

    class RecordingTrainer(Trainer):
        def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
            losses.append(super().training_step(*inputs, **named))
            return losses[-1]

    class ReportSteps(TrainerCallback):
        def on_train_begin(self, *unused: Any, **named: Any) -> None:
            requests.report_build(parameters)

        def on_step_end(self, *unused: Any, **named: Any) -> None:
            requests.after_step(losses.pop())

    arguments = TrainingArguments(
        output_dir=str(Path(job.options["ds_config"]).with_suffix("")), max_steps=plan.train_steps,
        per_device_train_batch_size=plan.layout.micro_batch_size, learning_rate=LEARNING_RATE, weight_decay=0.1,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, lr_scheduler_type="constant",
        bf16=plan.layout.precision == "bf16", deepspeed=job.options["ds_config"], use_cpu=job.device_kind == "cpu",
        train_sampling_strategy="sequential", remove_unused_columns=False, save_strategy="no", report_to="none",
        logging_strategy="no", disable_tqdm=True)
    model = transformers_model(plan)
    parameters = _parameter_count(model)
    length = plan.train_steps * plan.layout.micro_batch_size
    with deepspeed_output("error"):
        RecordingTrainer(model=model, args=arguments, train_dataset=_Samples(plan.datasets["train"], length),
                         callbacks=[ReportSteps()]).train()
    requests.end()


def plain_model(plan: Plan) -> "PlainModel":
    """Return the plain modules in training mode, with this project's initial weights. Raises ValueError."""
    model, ours = PlainModel(plan.model), as_module(plan.model)
    initialize_parameters(ours, plan.model, seed=plan.args.seed)
    with torch.no_grad():  # both list their parameters in the same order
        for (name, mine), (_, theirs) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(f"plain modules: {name} has the shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
            mine.copy_(theirs)
    return model.train()


class PlainModel(nn.Module):
    """Embeddings, blocks, final norm, and the loss over all logits."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.architecture not in ("gpt2", "llama") or config.residual_dropout or config.attention_dropout:
            raise ValueError("plain modules: they have no dropout, and the shapes of gpt2 and llama only")
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        else:
            angles_TE = torch.outer(torch.arange(config.max_positions).float(), inverse_frequencies(config))
            self.register_buffer("cos", angles_TE.cos(), persistent=False)
            self.register_buffer("sin", angles_TE.sin(), persistent=False)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        length = tokens_BT.shape[1]
        x_BTD, rope = self.tokens(tokens_BT), None
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[:length]
        else:
            rope = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, rope)
        weight_VD = self.tokens.weight if self.head is None else self.head.weight
        return F.cross_entropy(F.linear(self.norm(x_BTD), weight_VD).flatten(0, 1), labels_BT.flatten())


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        hidden, inner, attended = config.hidden_size, config.intermediate_size, config.num_heads * config.head_size
        self.norm1 = _norm(config)
        self.qkv = nn.Linear(hidden, attended + 2 * config.num_kv_heads * config.head_size, bias=config.qkv_bias)
        self.out = nn.Linear(attended, hidden, bias=config.attention_out_bias)
        self.norm2 = _norm(config)
        self.gate = nn.Linear(hidden, inner, bias=config.mlp_bias) if config.gated_mlp else None
        self.up = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x_BTD = x_BTD + self._attention(self.norm1(x_BTD), rope)
        normed_BTD = self.norm2(x_BTD)
        if self.gate is None:
            return x_BTD + self.down(F.gelu(self.up(normed_BTD), approximate="tanh"))
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))

    def _attention(self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, -1, self.head_size).transpose(1, 2)
        q_BHTE, k_BKTE, v_BKTE = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if rope is not None:
            q_BHTE, k_BKTE = _rotate(q_BHTE, *rope), _rotate(k_BKTE, *rope)
        if self.num_kv_heads < self.num_heads:
            k_BKTE, v_BKTE = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k_BKTE, v_BKTE))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True)
        return self.out(y_BHTE.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements i and i + E / 2 in fp32."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat((first * cos_TE - second * sin_TE, second * cos_TE + first * sin_TE), dim=-1).type_as(x_BHTE)


def _norm(config: ModelConfig) -> nn.Module:
    norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)


def products(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Measure the highest rate of square matrix products in the training's precision. MFU is relative to this rate.

    A product of two n x n matrices has 2 n^3 FLOPs.
    """
    device = "cuda" if job.device_kind == "cuda" else "cpu"
    dtype = torch.bfloat16 if job.options["precision"] == "bf16" else torch.float32
    size = job.options["product_size"]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    requests.report_build(0)
    while True:
        begin, shortest_s = time.perf_counter(), float("inf")
        while time.perf_counter() - begin < _PRODUCTS_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            requests.synchronize()
            shortest_s = min(shortest_s, time.perf_counter() - start)
        requests.end_repetition(tflops=2 * size**3 / shortest_s / 1e12)
