"""Which decoders of the installed transformers can be trained: the proof of each one, in a process of its own."""

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.child import child_command
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.wrapped.extension import their_model_types
from pretrain.extensions.wrapped.parts import UnknownPartsError
from pretrain.extensions.wrapped.prove import Proof, UnprovenError, prove, tiny_config
from pretrain.extensions.wrapped.tiny import tiny_copy
from pretrain.model.config import model_config_from
from pretrain.model.config_keys import known_keys
from pretrain.model.families import FAMILIES
from pretrain.model.own_models import config_class_of

_PROCESSES = 2
_SECONDS, _MEMORY_BYTES = 120, 8 * 2**30  # limits of the proof of one model_type
_PRELOADED = ("pretrain.extensions.wrapped.prove", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2",
              "transformers.models.auto.modeling_auto")

_QWEN4 = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
          "indexer_compress_ratio": 4}
# Values for config classes whose defaults lack them, or that have further kinds of layers with them.
VALUES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4}, "qwen4_exp_text": _QWEN4,
    "xlm": {"causal": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    **{name: {"is_decoder": True} for name in (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
        "xlm-roberta-xl")},
}


@dataclass(frozen=True)
class ModelResult:
    """The result of the proof of a model_type, or why it cannot be trained."""

    model_type: str
    own_family: bool = False  # trains as one of FAMILIES
    wrapped: bool = False  # trains with transformers' modules
    reason: str = ""  # why one of the two does not
    layers: int = 0  # layers of the tiny copy
    without_gradient: tuple[str, ...] = ()  # parameters that the loss does not depend on
    bf16_problem: str = ""  # if it is wrapped: why it trains in fp32 only
    seconds: float = 0.0

    @property
    def trains(self) -> bool:
        return self.own_family or self.wrapped


def prove_model_type(model_type: str) -> ModelResult:
    """Prove the defaults of a config class, as a family of ours if it is one, and as a wrapped decoder."""
    def own() -> Proof:
        values = json.loads(tiny_copy(config).to_json_string(use_diff=False))
        known = {key: value for key, value in values.items() if key in known_keys(model_type)}
        return prove(model_config_from({**known, "model_type": model_type}, model_type))

    try:
        config = config_class_of(model_type)(**VALUES.get(model_type, {}))
    except Exception as error:
        return ModelResult(model_type, reason=_reason(error))
    proofs: list[Proof | None] = []
    reasons = []
    for kind in ((own,) if model_type in FAMILIES else ()) + (lambda: prove(tiny_config(config)),):
        try:
            proofs.append(kind())
        except Exception as error:
            proofs.append(None)
            reasons.append(_reason(error))
    wrapped = proofs[-1]
    text_type = getattr(getattr(config, "text_config", None), "model_type", None)
    if wrapped is None and text_type in their_model_types():
        reasons[-1] += f" (its text model is {text_type})"
    return ModelResult(model_type, len(proofs) > 1 and proofs[0] is not None, wrapped is not None, "; ".join(reasons),
                   wrapped.num_layers if wrapped else 0, wrapped.without_gradient if wrapped else (),
                   wrapped.bf16_problem if wrapped else "")


def _reason(error: BaseException) -> str:
    """Return the reason of a failed proof in a few words: of a ConfigError, what it was made of."""
    if isinstance(error, ConfigError) and (source := error.__cause__ or error.__context__):
        return _reason(source)
    text = shorten(" ".join(str(error).split()))
    if isinstance(error, (ConfigError, UnprovenError, UnknownPartsError)):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({os.path.basename(place.filename)}:{place.lineno})"


def prove_all(model_types: Sequence[str], *, seconds: float = _SECONDS,
              proof: Callable[[str], ModelResult] = prove_model_type) -> Iterator[ModelResult]:
    """Yield the result of each model_type, in the order in which they end. A crash or hang is a result, too.

    Args:
        seconds: limit of each proof.
        proof: runs in a process of its own.
    """
    receiver, sender = multiprocessing.Pipe()
    with receiver, subprocess.Popen(child_command("pretrain.extensions.wrapped.all_decoders", str(sender.fileno())),
                                    stdin=subprocess.DEVNULL, pass_fds=[sender.fileno()]) as process:
        sender.close()
        try:
            receiver.send_bytes(pickle.dumps((list(model_types), seconds, proof)))
            while (result := receiver.recv()) is not None:
                yield result
        except (EOFError, ConnectionError):
            raise ConfigError("--prove", problem="the process of the proofs was killed",
                              remedy="free memory, and call the program again") from None
        finally:
            process.terminate()


def fork_proofs(descriptor: int) -> None:
    """Run the proofs of the request that a connection holds, each in a fork of this process, and send the results."""
    for name in _PRELOADED:
        importlib.import_module(name)  # a proof then takes 0.5 s instead of 6 s
    with multiprocessing.connection.Connection(descriptor) as connection:
        for result in _in_forks(*pickle.loads(connection.recv_bytes())):
            connection.send(result)
        connection.send(None)


def _in_forks(model_types: Sequence[str], seconds: float, proof: Callable[[str], ModelResult]) -> Iterator[ModelResult]:
    context = multiprocessing.get_context("fork")
    waiting = list(model_types)[::-1]
    running: dict[Any, tuple[str, Any, float]] = {}  # receiver -> model_type, process, start
    while waiting or running:
        while waiting and len(running) < _PROCESSES:
            receiver, sender = context.Pipe(duplex=False)
            name = waiting.pop()
            process = context.Process(target=_prove_in_child, args=(name, sender, proof))
            process.start()
            sender.close()
            running[receiver] = name, process, time.monotonic()
        ready = multiprocessing.connection.wait(list(running), timeout=1.0)
        for receiver, (name, process, start) in list(running.items()):
            used = time.monotonic() - start
            if receiver in ready or used > seconds:
                del running[receiver]
                yield _result_of_child(name, process, receiver, has_ended=receiver in ready, seconds=used)


def _result_of_child(name: str, process: Any, receiver: Any, *, has_ended: bool, seconds: float) -> ModelResult:
    """Return what a process has sent, or how it ended without that."""
    result: ModelResult | None = None
    if has_ended:
        with contextlib.suppress(EOFError):
            result = receiver.recv()
    else:
        process.kill()
    process.join()
    receiver.close()
    if result is not None:
        return result
    how = f"its process ended with exit code {process.exitcode}" if has_ended else f"no result after {seconds:.0f} s"
    return ModelResult(name, reason=f"the proof did not end: {how}", seconds=seconds)


def _prove_in_child(model_type: str, sender: Any, proof: Callable[[str], ModelResult]) -> None:
    """Send the result. Memory is limited, so that a model with a large buffer has a result, too."""
    from transformers import logging

    logging.set_verbosity_error()
    start = time.monotonic()
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    result = proof(model_type)
    sender.send(ModelResult(**{**vars(result), "seconds": time.monotonic() - start}))


if __name__ == "__main__":
    from pretrain.extensions.wrapped import (
        all_decoders,  # not __main__: results are pickled by the name of their module
    )

    all_decoders.fork_proofs(int(sys.argv[1]))
