"""Read a checkpoint in DeepSpeed's universal format: a folder for each parameter, with complete tensors.

`ds_to_universal` of DeepSpeed writes zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt, zero/optimizer_state.pt and the
engine's model-states files, for each ZeRO stage in a form of its own. This program writes the same format
(`export --format universal`), under transformers' names or its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import SubparamShape

from pretrain.checkpoint.format.shard_index import FP32
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.deepspeed.universal_states import EngineStates, read_engine_states
from pretrain.extensions.adopt.deepspeed.zero_files import with_schedule
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, Shape
from pretrain.extensions.adopt.mapping import load_foreign_pickle, module_shapes, shapes_in_module
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.hf_names import HEAD, TensorRule, name_in_module
from pretrain.model.hf_weights import module_tensors, rules_by_module_tensors

_NO_STATES = ("step",)  # files of a parameter that have no number for each weight
# names of GPT-NeoX, Megatron-DeepSpeed and Megatron-LM in pipelines and without
_MEGATRON = re.compile(r"(\d+|language_model\.\w+\.layers\.\d+)\.(self_)?attention\.query_key_value\.weight")
_ANOTHER = "use another checkpoint"
_OTHER_CONFIG = "use the config.json of the model that wrote the checkpoint"


def read(folder: Path, config: Mapping[str, Any] | None) -> ForeignRun:
    """Read a universal checkpoint.

    Args:
        folder: has zero/ and a model-states file.
        config: content of the model's config.json.

    Raises ConfigError.
    """
    if config is None:
        raise ConfigError("--model", problem=f"it is missing, and {folder} has no config.json: a universal checkpoint "
                          "does not describe its model", remedy="name the config.json of the transformers model")
    model = model_config_from(dict(config), "config.json")
    files = _Files(folder, model)
    engine = read_engine_states(folder, sorted(files.stored_shapes), files.states)
    run = ForeignRun(
        program=f"DeepSpeed's universal format, {files.naming}", folder=folder,
        files=(*files.paths(), *engine.files), config=dict(config),
        shapes=shapes_in_module(files.rules, model), read=files.read,
        states=engine.optimizer.states, step=engine.step, optimizer_step=engine.optimizer_step,
        skipped_steps=engine.skipped_steps,
        optimizer={"type": engine.optimizer.type, "params": engine.optimizer.params},
        weight_decay=_decay_of(engine, files), global_batch_size=engine.global_batch_size,
        consumed_samples=engine.consumed_samples, seq_length=engine.seq_length, precision=engine.precision,
        loss_scale=engine.loss_scale, seed=engine.seed, ds_config=engine.ds_config,
        omissions=(*engine.omissions, *files.omissions()),
        notes=tuple(f"{rows} rows of {name}, which ds_to_universal has removed as padding of the vocabulary, are zeros"
                    for name, rows in files.padded.items()))
    if engine.groups:
        rate, has_scheduler = float(engine.groups[0]["lr"]), bool(engine.ds_config.get("scheduler"))
        run = replace(run, schedule={"next_rate": rate}, learning_rate=None if has_scheduler else rate)
    return run if engine.scheduler is None else with_schedule(run, engine.scheduler)


def _decay_of(engine: EngineStates, files: "_Files") -> dict[str, float]:
    """Return the weight decay of each parameter; {} if the checkpoint does not record it."""
    names = {name: rules[0].ours if files.ours else files.prefix + name
             for rules in files.rules for name in module_shapes(rules, files.config)}
    if not isinstance(engine.weight_decay, Mapping):
        return {} if engine.weight_decay is None else dict.fromkeys(names, engine.weight_decay)
    if not {*names.values()} <= engine.weight_decay.keys():
        return {}
    return {name: engine.weight_decay[stored] for name, stored in names.items()}


@dataclass
class _Files:
    """The tensors of a universal checkpoint. Names are those of transformers' model, whatever the files have.

    Raises ConfigError unless the files have all parameters of the model, with the right sizes, and no others.
    """

    folder: Path
    config: ModelConfig
    rules: list[tuple[TensorRule, ...]] = field(init=False)
    states: tuple[str, ...] = field(init=False)  # states of the optimizer
    ours: bool = field(init=False, default=False)  # the files have this program's names
    prefix: str = field(init=False, default="")  # before each of transformers' names, if the model is a part of another
    stored_shapes: dict[str, Shape] = field(init=False)  # name in the files -> shape of the complete parameter
    frozen: tuple[str, ...] = field(init=False)  # parameters in the files without optimizer states
    padded: dict[str, int] = field(init=False, default_factory=dict)  # name in the files -> rows that were removed
    _latest: tuple[tuple[str, str], dict[str, torch.Tensor]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rules = rules_by_module_tensors(self.config)
        found = {path.parent.name for path in self.folder.glob(f"zero/*/{FP32}.pt")}
        if not found:
            raise ConfigError(str(self.folder), problem=f"there is no zero/NAME/{FP32}.pt",
                              remedy="name the output folder of DeepSpeed's ds_to_universal")
        self.stored_shapes = self._recognize(found)
        files = {name: {path.stem for path in self._path(name, FP32).parent.glob("*.pt")}
                 for name in self.stored_shapes}
        self.states = tuple(sorted(set().union(*files.values()) - {FP32, *_NO_STATES}))
        self.frozen = tuple(name for name, stems in files.items() if self.states and not stems & {*self.states})
        for name in self.stored_shapes:  # before anything is written
            for state in (FP32, *self.states):
                self._stored(name, state)
        if not self.ours and self.config.tie_word_embeddings:
            self._check_tied_head(found)

    @property
    def naming(self) -> str:
        """Whose names the files have."""
        return "names of ds-pretrain" if self.ours else "names of transformers"

    def paths(self) -> list[Path]:
        """List all files with tensors of the model."""
        return [self._path(name, state) for name in self.stored_shapes
                for state in (FP32, *(() if name in self.frozen else self.states))]

    def omissions(self) -> list[Omission]:
        """Return what the run loses because this program trains all parameters."""
        if not self.frozen:
            return []
        others = len(self.frozen) - 1
        names = self.frozen[0] + (f" and {others} other parameters have" if others else " has")
        return [Omission("other_states", f"{names} no optimizer states, as if not trained; here all parameters are "
                     "trained, and these begin with states of 0")]

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a complete tensor under transformers' name, in fp32."""
        if not self.ours:
            return self._stored(self.prefix + name, state)
        rules = next(rules for rules in self.rules if name in module_shapes(rules, self.config))
        key = rules[0].ours, state
        if self._latest is None or self._latest[0] != key:  # q, k and v are one tensor of this program
            self._latest = None
            stored = [self._stored(rule.ours, state) for rule in rules]
            self._latest = key, module_tensors(rules, stored, self.config)
        return self._latest[1][name].contiguous()

    def _recognize(self, found: set[str]) -> dict[str, Shape]:
        """Return name -> shape of the parameters in the files, under transformers' or this program's names."""
        ours = {rule.ours: rule.shape for rules in self.rules for rule in rules}
        if found == set(ours):
            self.ours = True
            return ours
        if fused := sorted(filter(_MEGATRON.fullmatch, found)):
            raise ConfigError(f"{self.folder / 'zero'}: {shorten(fused[0])}", problem="this is a name of Megatron or "
                              "GPT-NeoX, whose universal checkpoints do not record the order of these rows",
                              remedy="import the checkpoint that ds_to_universal has converted")
        theirs = shapes_in_module(self.rules, self.config)
        embedding, head = next(iter(theirs)), name_in_module(HEAD, self.config)
        ends = [name for name in found if name.endswith(embedding)]
        self.prefix = ends[0].removesuffix(embedding) if len(ends) == 1 else ""
        expected = {self.prefix + name: shape for name, shape in theirs.items()}
        copies = {self.prefix + head} if self.config.tie_word_embeddings else set()
        for names, problem in ((set(expected) - found, "the model of the config.json has this parameter, and the "
                                "checkpoint does not"),
                               (found - set(expected) - copies, "the checkpoint has this parameter, and the model of "
                                "the config.json does not")):
            if names:
                others = f", and {len(names) - 1} others" if len(names) > 1 else ""
                raise ConfigError(f"{self.folder / 'zero'}: {shorten(min(names))}{others}", problem=problem,
                                  remedy=_OTHER_CONFIG)
        return expected

    def _path(self, name: str, state: str) -> Path:
        return self.folder / "zero" / name / f"{state}.pt"

    def _stored(self, name: str, state: str) -> torch.Tensor:
        """Return a complete tensor under its name in the files, in fp32. Raises ConfigError if it does not fit."""
        path, shape = self._path(name, state), self.stored_shapes[name]
        if state != FP32 and name in self.frozen:
            return torch.zeros(shape)
        tensor, is_vocabulary = _tensor_of(path)
        has_columns = tensor.dim() == 2 == len(shape) and tensor.shape[1] == shape[1]
        if has_columns and is_vocabulary and tensor.shape[0] < shape[0]:
            # ds_to_universal removed rows that pad the vocabulary; DeepSpeed fills them with zeros when it loads them
            self.padded[name] = shape[0] - tensor.shape[0]
            return torch.nn.functional.pad(tensor.float(), (0, 0, 0, shape[0] - tensor.shape[0]))
        if has_columns and tensor.shape[0] != shape[0] == self.config.vocab_size:
            key = self.config.key("vocab_size")
            raise ConfigError(str(path), found=f"{tensor.shape[0]} rows", expected=f"{key} of the config.json "
                              f"({shape[0]})", remedy=f"set {key} to {tensor.shape[0]}, if these are rows of tokens")
        # the files of ZeRO-3 have flat tensors
        if tuple(tensor.shape) not in (tuple(shape), (prod(shape),)):
            raise ConfigError(str(path), found=f"a tensor of shape {list(tensor.shape)}", expected=str(list(shape)),
                              remedy=_OTHER_CONFIG)
        return tensor.reshape(shape).float()

    def _check_tied_head(self, found: set[str]) -> None:
        """Raise ConfigError if a copy of the tied head differs from the embedding.

        `ds_to_universal` writes all of the module's tensors that have no optimizer states. This copy has the module's
        precision, and the embedding that of the master weights.
        """
        name = self.prefix + name_in_module(HEAD, self.config)
        if name not in found:
            return
        embedding = next(iter(self.stored_shapes))
        self.stored_shapes[name] = self.stored_shapes[embedding]
        # without rows that pad the vocabulary
        found_rows = _tensor_of(self._path(embedding, FP32))[0].numel() // self.stored_shapes[name][1]
        head, master = self._stored(name, FP32)[:found_rows], self._stored(embedding, FP32)[:found_rows]
        del self.stored_shapes[name]
        if not any(torch.equal(head, master.to(dtype).float()) for dtype in (torch.float32, torch.bfloat16,
                                                                             torch.float16)):
            raise ConfigError(str(self._path(name, FP32)), problem=f"it differs from {embedding}, although "
                              "tie_word_embeddings is true in the config.json", remedy="set it to false there")


def _tensor_of(path: Path) -> tuple[torch.Tensor, bool]:
    """Return the tensor of a file, which is memory-mapped, and whether rows that pad the vocabulary were removed.

    DeepSpeed writes a tensor, or a dict with the tensor and facts for a run that divides it among ranks.
    """
    if not path.is_file():
        raise ConfigError(str(path), problem="this file is missing; other parameters have it", remedy=_ANOTHER)
    value = load_foreign_pickle(path, mmap=True, also=(SubparamShape,))
    facts = value if isinstance(value, dict) else {"param": value}
    tensor = facts.get("param")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise ConfigError(str(path), problem="it holds no tensor of floating-point numbers", remedy=_ANOTHER)
    if "sub_param_shape" in facts:  # the tensor has this shape, with the same elements in the same order
        tensor = tensor.reshape(-1)
    return tensor, facts.get("vocab_tensor") is True
