"""The schema of DeepSpeed JSON keys, compared with DeepSpeed's own models and with every file of ds_configs/."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.ds_json import optimizers as ds_optimizers
from pretrain.config.ds_json import schema as ds_schema
from pretrain.config.ds_json.check_keys import check_json_keys, suggest_key
from pretrain.config.ds_json.optimizers import KNOWN_NAMES, SCHEDULERS, optimizer_params
from pretrain.config.ds_json.read import DsFile, read_ds_config
from pretrain.config.ds_json.schema import TREE, Key, Tree
from pretrain.distributed.requirements import TESTED, deepspeed_version, is_at_least
from pretrain.engine.parallelism import engine_config
from pretrain.errors import ConfigError
from tests.support.layouts import HAS_EXPERTS
from tests.support.rejection import rejection

PAGES = Path(__file__).parents[2] / "pretrain/pages"
CONFIGS = sorted(path for path in (Path(__file__).parents[2] / "ds_configs").glob("*.json")
                 if HAS_EXPERTS or "experts" not in path.name)
IS_NEWEST = str(deepspeed_version()) == TESTED[-1]
newest = pytest.mark.skipif(not IS_NEWEST, reason=f"the tree has the keys of DeepSpeed {TESTED[-1]}")


def passed_on(tree: Tree) -> set[str]:
    """Return the keys of a block that can reach the installed DeepSpeed."""
    return {name for name, key in tree.items() if not isinstance(key, Key) or not (
        key.rejected or key.ignored or (key.since and not is_at_least(key.since)))}


def aliases(model: Any) -> set[str]:
    """Return every key that a pydantic model of DeepSpeed accepts."""
    fields = model.model_fields
    return set(fields) | {field.alias for field in fields.values() if field.alias}


def test_the_schema_has_exactly_the_keys_of_deepspeeds_models() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config, "comms_logger": CommsLoggerConfig,
        "tensorboard": monitor.TensorBoardConfig, "wandb": monitor.WandbConfig, "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig, "timers.throughput": DeepSpeedThroughputTimerConfig,
        "tensor_parallel": TPTrainingConfig, "tensor_parallel.tensor_parallel": TPConfig,
        "tensor_parallel.tp": TPConfig, "compile": CompileConfig,
    }
    earlier = {"compile": {"enabled", "disable", "backend", "kwargs"}}  # keys of earlier versions
    for dotted, model in models.items():
        tree: Any = ds_schema.TREE
        for name in dotted.split("."):
            tree = tree[name]
        if IS_NEWEST:
            assert set(tree) - earlier.get(dotted, set()) == aliases(model), dotted
        elif dotted.partition(".")[0] not in ("tensor_parallel", "compile"):  # read by this package alone
            assert passed_on(tree) <= aliases(model), dotted


def test_the_schema_has_exactly_the_top_level_keys_that_deepspeed_reads() -> None:
    """The test gives DeepSpeedConfig a dictionary that records each requested key."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class RecordingDict(dict):
        requested: set[str] = set()  # noqa: RUF012

        def get(self, key: str, default: Any = None) -> Any:
            self.requested.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            self.requested.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            class Keys:
                def __contains__(_, key: object) -> bool:  # noqa: N805
                    return key in self
            return Keys()

        def __copy__(self) -> "RecordingDict":
            return self

    DeepSpeedConfig(RecordingDict({"train_batch_size": 1, "optimizer": {"type": "Adam"},
                                   "scheduler": {"type": "WarmupLR"}}))
    known = set(ds_schema.TREE) | {key for key in ds_schema.REMOVED if "." not in key}
    # DeepSpeed reads "allgather_size" only with "zero_optimization": true, and "sequence_parallel_size" only in a
    # process group.
    own = {"allgather_size", "sequence_parallel_size"}
    if not IS_NEWEST:  # "expert_parallel" is read by this package alone
        assert passed_on(ds_schema.TREE) - RecordingDict.requested - {"expert_parallel"} <= own
        return
    assert known - RecordingDict.requested == own
    assert RecordingDict.requested - known == set()
    assert not RecordingDict.requested & set(ds_schema.UNREAD)


def test_blocks_without_a_pydantic_model_have_the_keys_of_deepspeed() -> None:
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.model_checkpointing import constants as checkpointing
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    # the earlier name "thread_count" is accepted with a note
    assert set(ds_schema.TREE["aio"]) == set(AIO_DEFAULT_DICT) | {"thread_count"}
    assert set(ds_schema.ACTIVATION_CHECKPOINTING) == set(ACT_CHKPT_DEFAULT)
    flops = {getattr(profiling, name) for name in vars(profiling)
             if name.startswith("FLOPS_PROFILER_") and not name.endswith(("DEFAULT", "FORMAT"))}
    assert set(ds_schema.TREE["flops_profiler"]) == flops
    own = {"partition_method", "use_reentrant"}
    assert set(ds_schema.PIPELINE) - own == set(get_pipeline_config({}))
    assert {checkpointing.CHECKPOINT_TAG_VALIDATION, checkpointing.CHECKPOINT_SERIALIZATION,
            checkpointing.CHECKPOINT_WRITER} <= set(ds_schema.CHECKPOINT)


@newest
def test_blocks_of_autoep_and_data_efficiency_have_the_keys_of_deepspeed() -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config

    assert set(ds_schema.TREE["expert_parallel"]) == {each.name for each in fields(AutoEPConfig) if each.init}
    ours, read = ds_schema.TREE["data_efficiency"], get_data_efficiency_config({})
    assert set(ours) == set(read)
    for name in ("data_sampling", "data_routing"):
        assert set(ours[name]) == set(read[name])


_VALUES = {"tensor_parallel.vocab_parallel_ce_backend": "liger", "data_efficiency.data_sampling.num_workers": 2}
_LEGAL = ("compile.enabled", "compile.disable", "compile.backend", "tensor_parallel.autotp_size",
          "expert_parallel.enabled", "expert_parallel.autoep_size",
          *(f"tensor_parallel.{name}.tp_size" for name in ("tp", "tensor_parallel")),
          *(f"data_efficiency{name}" for name in (".enabled", ".seed", ".data_sampling.enabled",
                                                  ".data_routing.enabled")))


def leaves(tree: dict[str, Any], parent: str) -> Iterator[str]:
    for name, key in tree.items():
        if isinstance(key, Key):
            yield f"{parent}.{name}"
        else:
            yield from leaves(key, f"{parent}.{name}")


@pytest.mark.parametrize("dotted", [
    key for block in ("tensor_parallel", "expert_parallel", "compile", "data_efficiency")
    for key in leaves(ds_schema.TREE[block], block) if key not in _LEGAL])  # type: ignore[arg-type]
def test_each_key_of_a_feature_is_rejected_by_name_with_a_remedy(dotted: str) -> None:
    *parents, name = dotted.split(".")
    values: dict[str, Any] = {name: _VALUES.get(dotted, {"enabled": True, "x": 3})}
    for parent in reversed(parents):
        values = {parent: values}
    caught = rejection(check_json_keys, DsFile("ds.json", values))
    assert caught.startswith(f"ds.json: {dotted}: found ")
    assert "unknown" not in caught
    assert re.search(r"[Rr]emove the (key|block)|config\.json has|--\w+", caught), caught


@pytest.mark.parametrize(("values", "message"), [
    ({"disable_python_gc": True}, "disable_python_gc: DeepSpeed 0.18.9 does not have this key. Remove it, or pip "),
    ({"zero_optimization": {"stage": 2, "parameter_alignment": True}}, "parameter_alignment: DeepSpeed 0.18.9 does "),
    ({"optimizer": {"type": "Muon"}}, "optimizer.type: Muon is supported from DeepSpeed 0.19.8 on; 0.18.9 is "),
])
def test_a_key_that_the_installed_version_does_not_have_is_rejected(
        monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.9")
    deepspeed_version.cache_clear()
    try:
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_json_keys(DsFile("ds.json", values))
    finally:
        deepspeed_version.cache_clear()


@newest
def test_defaults_that_the_program_writes_out_are_those_of_deepspeed() -> None:
    """engine/parallelism.py, engine_config: earlier versions have other defaults."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    written = engine_config({"bf16": {"enabled": True}})
    assert written["gradient_clipping"] == GRADIENT_CLIPPING_DEFAULT
    assert written["bf16"]["check_grad_overflow"] == DeepSpeedBF16Config().check_grad_overflow


@newest
def test_removed_keys_match_deepspeed() -> None:
    from deepspeed.runtime import config
    top = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    zero = {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(ds_schema.REMOVED) == top | zero


@newest
def test_optimizers_and_schedulers_match_deepspeed_and_torch() -> None:
    import inspect

    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.muon.original_muon import NS_METHODS

    from_torch = {row.name: row.params for row in ds_optimizers.OPTIMIZERS.values() if row.from_torch}
    own = set(ds_optimizers.OPTIMIZERS) - {name.lower() for name in from_torch}
    known = own | set(ds_optimizers.DEEPSPEED_REJECTED)
    assert set(DEEPSPEED_OPTIMIZERS) <= known
    classes = {name for name, value in vars(torch.optim).items() if inspect.isclass(value)} - {"Optimizer"}
    ours = {name for name in classes if name.lower() in own}
    assert classes - ours == set(from_torch) | set(ds_optimizers.TORCH_REJECTED)
    for name, params in from_torch.items():
        taken = set(inspect.signature(getattr(torch.optim, name)).parameters)
        assert set(params) - {"max_grad_norm"} == taken - {"params"}, name
    assert set(ds_optimizers.SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, params in ds_optimizers.SCHEDULERS.items():
        taken = set(inspect.signature(getattr(lr_schedules, name).__init__).parameters)
        assert set(params) == taken - {"self", "optimizer"}, name
    ns_method = ds_optimizers.OPTIMIZERS["muon"].params["ns_method"]
    assert isinstance(ns_method, Key)
    assert set(ns_method.choices) == NS_METHODS


def keys_of(values: dict[str, Any], parent: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{parent}{name}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{parent}{name}.")


def test_each_misspelt_key_of_ds_configs_gets_a_suggestion() -> None:
    """Each key that a file has is misspelt in three ways, once for all files that have it."""
    seen: set[str] = set()
    for path in CONFIGS:
        values = read_ds_config(str(path)).values
        for dotted in keys_of(values):
            name = dotted.split(".")[-1]
            misspellings = (name + name[-1], "x" + name[1:], name[:1] + name[2:] if len(name) > 3 else name + "s")
            for misspelt in misspellings if dotted not in seen else ():
                document = json.loads(json.dumps(values))
                _rename(document, dotted, misspelt)
                caught = rejection(check_json_keys, DsFile("ds.json", document))
                # if "optimizer" or "type" is misspelt, the message is about the missing optimizer.type
                if "optimizer.type" not in caught:
                    assert misspelt in caught
                    assert f'Did you mean "{name}"' in caught, f"{dotted} as {misspelt}: {caught}"
            seen.add(dotted)


def _blocks(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """Yield (dotted name with a dot at the end, keys) of every block with fixed keys."""
    yield prefix, tree
    for name, key in tree.items():
        if not isinstance(key, Key) and key:
            yield from _blocks(key, f"{prefix}{name}.")


def test_a_hint_never_names_the_block_where_the_key_is_nor_the_key_itself() -> None:
    params = {**{kind: ("optimizer.params.", optimizer_params(kind) or {}) for kind in KNOWN_NAMES},
              **{kind: ("scheduler.params.", tree) for kind, tree in SCHEDULERS.items()}}
    blocks = [*(("", *block) for block in _blocks(TREE)), *((kind, *block) for kind, block in params.items())]
    names = {name for _, _, tree in blocks for name in tree}
    for kind, prefix, tree in blocks:
        for name in names - set(tree):
            hint = suggest_key(name, tree, prefix, kind)
            assert hint, f"{prefix}{name}"
            belongs = hint.partition("belongs under ")[2].split(" or ")
            assert f'"{prefix[:-1]}"' not in belongs, f"{prefix}{name} ({kind}): {hint}"
            assert f'Did you mean "{name}"?' not in hint, f"{prefix}{name} ({kind}): {hint}"
    assert suggest_key("momentum", optimizer_params("AdamW") or {}, "optimizer.params.", "AdamW") == \
        "AdamW has no such parameter; Muon, RMSprop, SGD have it"


@pytest.mark.parametrize(("dotted", "hint"), [
    ("gradient_accumulation_dtype", 'Did you mean "grad_accum_dtype" under "data_types"?'),
    ("grad_accum_steps", 'Did you mean "gradient_accumulation_steps"?'),
    ("activation_checkpointing_interval", 'Did you mean "activation_checkpoint_interval" under "pipeline"?'),
    ("pipeline_stages", 'Did you mean "stages" under "pipeline"?'),
    ("fp16.bf16_enabled", 'Did you mean "enabled" under "bf16"?'),
    ("zero_optimization.offload_optimizer_device",
     'Did you mean "device" under "zero_optimization.offload_optimizer"?'),
    ("zero_optimization.gradient_cliping", 'Did you mean "gradient_clipping" at the top level?'),
    ("train_micro_batch_size", 'Did you mean "train_micro_batch_size_per_gpu"?'),
    ("deepspeed_activation_checkpointing", "here it is --recompute"),
    ("offload_activations", ""),  # compile.offload_activation, which is rejected
    ("loglevel", '"log_level" would be rejected, too: use --deepspeed_log_level'),
    ("sparse_gradient", '"sparse_gradients" would be rejected, too: sparse compression of dense embedding gradients '
                        "has been removed"),
    ("score_func", 'it belongs under "expert_parallel", and is rejected there: the model\'s config.json describes '
                   "router and experts; remove the key"),
    ("end_weight_decay", "remove it: the weight decay is constant here")])
def test_a_suggestion_has_the_meaning_of_the_key_and_is_accepted(dotted: str, hint: str) -> None:
    prefix, _, name = dotted.rpartition(".")
    tree: Any = TREE[prefix] if prefix else TREE
    assert suggest_key(name, tree, f"{prefix}." if prefix else "") == hint


def _documented_autos() -> Iterator[dict[str, Any]]:
    """Yield the blocks with "auto" in the documentation of transformers and accelerate."""
    yield dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                         "gradient_clipping", "steps_per_print"), "auto")
    yield {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    yield {"scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}}
    yield {"scheduler": {"type": "WarmupLR", "params": dict.fromkeys(names[:3], "auto")}}
    yield {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "amp": {"enabled": "auto", "opt_level": "auto"}}
    yield {"zero_optimization": {
        "stage": 3, **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size",
                                     "stage3_param_persistence_threshold",
                                     "stage3_gather_16bit_weights_on_model_save"), "auto"),
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"}, "offload_param": {"device": "auto"}}}


@pytest.mark.parametrize("document", _documented_autos(), ids=lambda document: next(iter(document)))
def test_each_auto_of_transformers_documentation_is_accepted(document: dict[str, Any]) -> None:
    config, ignored = check_json_keys(DsFile("ds.json", {"optimizer": {"type": "AdamW"}, **document}))
    assert "amp" not in config
    assert [key for key, _ in ignored if key == "amp"] == ["amp"] * ("amp" in document)


def test_types_have_the_names_that_deepspeed_knows() -> None:
    from deepspeed.runtime.config import DtypeEnum

    for dtype in (DtypeEnum.fp16, DtypeEnum.bf16, DtypeEnum.fp32):
        names = [name for name in dtype._all_values if isinstance(name, str)]
        for name in names:
            config, _ = check_json_keys(DsFile("ds.json", {"data_types": {"grad_accum_dtype": name}}))
            assert config["data_types"]["grad_accum_dtype"] == dtype.name


def _rename(values: dict[str, Any], dotted: str, misspelt: str) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        values = values[parent]
    renamed = {misspelt if key == name else key: value for key, value in values.items()}
    values.clear()
    values.update(renamed)


def test_file_names_match_the_contents() -> None:
    for path in CONFIGS:
        file = read_ds_config(str(path))
        zero_stage = file.get("zero_optimization.stage")
        degrees = {"tensor": file.get("tensor_parallel.autotp_size", 1), "sequence": file.get(
            "sequence_parallel_size", 1), "experts": file.get("expert_parallel.autoep_size", 1),
            "pipeline": file.get("pipeline.stages", 1)}
        above_1 = [f"{name}{degree}_" for name, degree in degrees.items() if degree > 1]
        assert path.stem.startswith("".join(above_1) or f"zero{zero_stage}_")
        ranks = re.search(r"// ranks: (\d+)", path.read_text(encoding="utf-8"))
        assert ranks is not None
        assert int(ranks[1]) == math.prod(degrees.values())
        if match := re.search("zero(.)", path.stem):
            assert int(match[1]) == zero_stage
        if match := re.search("_(bf16|fp16|fp32)(_|$)", path.stem):
            precisions = [name for name in ("bf16", "fp16") if file.get(f"{name}.enabled")]
            assert precisions == ([] if match[1] == "fp32" else [match[1]])
        assert ("nvme" in path.stem) == ("aio" in file.values)


def test_every_file_of_ds_configs_is_in_the_table() -> None:
    table = (PAGES / "layouts.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)\.json`", cell)} == {
        path.stem for path in CONFIGS[0].parent.glob("*.json")}


def _features() -> list[tuple[str, str, list[str]]]:
    """Return (feature, what the page says, its keys) for each feature of DeepSpeed in deepspeed_json.md."""
    page = (PAGES / "deepspeed_json.md").read_text(encoding="utf-8")
    lines = page.partition("| feature | JSON key |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
    return [(row[0], row[2], re.findall(r"`([\w.]+)`", row[1])) for row in rows]


@pytest.mark.parametrize(("here", "keys"), [row[1:] for row in _features()], ids=[row[0] for row in _features()])
def test_the_page_on_features_agrees_with_the_schema(here: str, keys: list[str]) -> None:
    for key in keys:
        *parents, name = key.split(".")
        tree: Any = TREE
        for parent in parents:
            tree = tree[parent]
        known = tree.get(name) if key not in ds_schema.REMOVED else Key(rejected=ds_schema.REMOVED[key])
        assert known is not None, key
        if here in ("runs", "CUDA only"):
            assert not (isinstance(known, Key) and known.rejected), key
        elif here == "rejected" and key != "optimizer.type":
            values: dict[str, Any] = {name: {"enabled": True} if name != "ratio" else 0.5}
            for parent in reversed(parents):
                values = {parent: values}
            with pytest.raises(ConfigError, match=re.escape(key)):
                check_json_keys(DsFile("ds.json", values))
