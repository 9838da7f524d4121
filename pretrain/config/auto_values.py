"""Fill a DeepSpeed JSON from the flags: keys that are missing or "auto", batch sizes, a missing optimizer.

A flag fills a key that is missing in the JSON or is "auto". If the JSON has values and the flags other ones, the run is
rejected with one error for all of them. An "auto" without a flag gets the default that `filled_keys` names.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pretrain.config.ds_json.optimizers import optimizer_params
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import DEFAULT_REDUCE_BUCKET_SIZE, Key
from pretrain.config.flags.arguments import FLAGS, RunArguments
from pretrain.config.make_schedule import default_warmup_steps
from pretrain.config.schedule import rate_factor
from pretrain.data.token_schedules import BATCH_SCHEDULE, BatchSizes, fixed_batch, parse_batch_sizes
from pretrain.errors import ConfigError, counted
from pretrain.model.config import ModelConfig
from pretrain.paths import PROFILES_FOLDER

DEFAULT_LEARNING_RATE: float = FLAGS["learning_rate"].unset
DEFAULT_BETAS = (FLAGS["adam_beta1"].unset, FLAGS["adam_beta2"].unset)
PRECISIONS = ("bf16", "fp16", "fp32")
NVME_PATH_VARIABLE = "DS_PRETRAIN_NVME_PATH"
_OFFLOAD = ("offload_optimizer", "offload_param")
_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_PARAMS = "optimizer.params"


@dataclass(frozen=True)
class FilledKey:
    """A key of the JSON that a flag fills, if the key is missing or "auto"."""

    key: str
    flag: str  # "": no flag
    wanted: Any  # value of the flag; None: not given
    default: Any = None  # of "auto"; None: the value is computed


def filled_keys(file: DsFile, args: RunArguments) -> dict[str, FilledKey]:
    """Return the keys that flags fill, except the switches of the precision."""
    batch: tuple[str, int | None] = ("--global_batch_size", args.global_batch_size)
    if args.batch_schedule is not None:
        batch = (BATCH_SCHEDULE, parse_batch_sizes(args.batch_schedule, seq_length=args.seq_length).final)
    micro, steps, total = _BATCH_KEYS
    rows = [
        FilledKey(micro, "--micro_batch_size", args.micro_batch_size),
        FilledKey(steps, "--gradient_accumulation_steps", args.gradient_accumulation_steps),
        FilledKey(total, *batch),
        FilledKey("gradient_clipping", "--gradient_clipping", args.gradient_clipping, FLAGS["gradient_clipping"].unset),
        FilledKey(f"{_PARAMS}.lr", "--learning_rate", args.learning_rate, DEFAULT_LEARNING_RATE),
        FilledKey(f"{_PARAMS}.weight_decay", "--weight_decay", args.weight_decay, FLAGS["weight_decay"].unset),
        FilledKey(f"{_PARAMS}.eps", "--adam_epsilon", args.adam_epsilon, FLAGS["adam_epsilon"].unset),
        FilledKey(f"{_PARAMS}.betas", "--adam_beta1 / --adam_beta2", _betas(file, args), list(DEFAULT_BETAS)),
        FilledKey("scheduler.params.warmup_num_steps", "--lr_warmup_steps", args.lr_warmup_steps),
        *(FilledKey(f"zero_optimization.{block}.nvme_path", "--nvme_path", args.nvme_path) for block in _OFFLOAD),
    ]
    return {row.key: row for row in rows}


def set_value(config: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `config["a"]["b"] = value` for "a.b"; missing blocks are created."""
    *parents, name = dotted.split(".")
    for parent in parents:
        if not isinstance(config.get(parent), dict):
            config[parent] = {}
        config = config[parent]
    config[name] = value


def check_contradictions(file: DsFile, args: RunArguments) -> None:
    """Raise one ConfigError for all values of the JSON that flags contradict, and for flags that it overrules."""
    differing = [*_other_values(file, args), *_other_precision(file, args), *_ignored_schedule_flags(file, args)]
    if not differing:
        return
    remedy = "; ".join(dict.fromkeys(remedy for _, _, remedy in differing))
    if len(differing) == 1:
        raise ConfigError(file.where(differing[0][0]), problem=f"found {differing[0][1]}", remedy=remedy)
    lines = [f"{file.where(dotted).removeprefix(f'{file.path}:').strip()} {found}" for dotted, found, _ in differing]
    raise ConfigError(file.path, problem=f"{len(lines)} settings contradict flags (line: key): {'; '.join(lines)}",
                      remedy=remedy)


_AUTO_REMEDY = 'write "auto" in the JSON for flags to fill, or leave the flags out'


def _other_values(file: DsFile, args: RunArguments) -> Iterator[tuple[str, str, str]]:
    """Yield (key, both values, remedy) for each key whose value in the JSON is not its flag's."""
    for row in filled_keys(file, args).values():
        value = file.get(row.key)
        is_unused = row.flag == "--nvme_path" and file.get(row.key.replace("nvme_path", "device")) != "nvme"
        if row.wanted is not None and value not in (None, "auto", row.wanted) and not is_unused:
            yield row.key, f"{value}, but {row.flag} {row.wanted}", _AUTO_REMEDY


def _other_precision(file: DsFile, args: RunArguments) -> Iterator[tuple[str, str, str]]:
    """Yield the precision switches of the JSON that --precision contradicts."""
    for name, key in _precision_keys(file).items():
        state = file.get(key)
        if args.precision in PRECISIONS and state not in (None, "auto") and state is not (args.precision == name):
            yield key, f"{str(state).lower()}, but --precision {args.precision}", _AUTO_REMEDY


def _ignored_schedule_flags(file: DsFile, args: RunArguments) -> Iterator[tuple[str, str, str]]:
    """Yield the --lr_* flags that a scheduler of the JSON would ignore."""
    kind, defaults = file.get("scheduler.type"), RunArguments()
    for name in (field.name for field in fields(defaults) if field.name.startswith(("lr_", "min_lr"))):
        value = getattr(args, name)
        is_warmup = name == "lr_warmup_steps" and "warmup_num_steps" in file.get("scheduler.params", {})
        if kind is not None and value != getattr(defaults, name) and not is_warmup:
            yield "scheduler", f'"{kind}", but --{name} {value}', 'remove the --lr_* flags, or the "scheduler" block'


def choose(file: DsFile, row: FilledKey) -> Any:
    """Return the value of a key: from the JSON, else from the flag, else the default if the JSON has "auto"."""
    value = file.get(row.key)
    if value is None or value == "auto":
        return row.wanted if row.wanted is not None else row.default if value == "auto" else None
    return value


def _fill(file: DsFile, config: dict[str, Any], row: FilledKey) -> None:
    """Write the result of `choose` into `config`; a key that neither the file nor a flag sets is left out."""
    value = choose(file, row)
    if value is not None:
        set_value(config, row.key, value)


def _precision_keys(file: DsFile) -> dict[str, str]:
    bf16 = "bfloat16" if "bfloat16" in file.values and "bf16" not in file.values else "bf16"
    return {"bf16": f"{bf16}.enabled", "fp16": "fp16.enabled"}


def fill_precision(file: DsFile, config: dict[str, Any], args: RunArguments) -> None:
    """Set bf16.enabled and fp16.enabled; --precision decides if the JSON does not.

    Without it, true comes before "auto", and bf16 before fp16; fp32 is selected if neither is true or "auto".
    """
    wanted = args.precision
    if wanted is not None and wanted not in PRECISIONS:
        raise ConfigError("--precision", found=wanted, expected=", ".join(PRECISIONS))
    keys = _precision_keys(file)
    states = {name: file.get(key) for name, key in keys.items()}
    if states["bf16"] is True and states["fp16"] is True:
        raise ConfigError(file.where("fp16.enabled"), problem="bf16.enabled is true as well",
                          remedy="enable only one of the two")
    enabled = [name for name, state in states.items() if state is True]
    if wanted is None and not enabled and states["fp16"] == "auto" and states["bf16"] != "auto":
        raise ConfigError(file.where("fp16.enabled"), found='"auto" without --precision', expected="true or false",
                          remedy="give --precision fp16, bf16 or fp32")
    selected = [name for value in (True, "auto") for name, state in states.items() if state == value]
    precision = wanted or (*selected, "fp32")[0]
    for name in keys:
        if name == precision or name in config:
            set_value(config, f"{name}.enabled", name == precision)


def _complete_batch_sizes(micro: int | None, steps: int | None, total: int | None,
                          data_parallel_size: int) -> tuple[int, int, int]:
    """Return micro-batch size, accumulation steps and global batch size. None is computed from the other values.

    Divisions round down, as in DeepSpeed. The caller checks that the product is the global batch size.
    """
    if total is None:
        micro = micro or FLAGS["micro_batch_size"].unset
        steps = steps or FLAGS["gradient_accumulation_steps"].unset
        return micro, steps, micro * steps * data_parallel_size
    if micro is None:
        steps = steps or FLAGS["gradient_accumulation_steps"].unset
        return total // (steps * data_parallel_size), steps, total
    if steps is None:
        steps = total // (micro * data_parallel_size)
    return micro, steps, total


def fill_batch(file: DsFile, config: dict[str, Any], args: RunArguments, data_parallel_size: int) -> BatchSizes:
    """Set the three batch sizes; missing ones follow from the others. Raises ConfigError if they are inconsistent.

    Returns the batch size at each data position. With --batch_schedule, the JSON gets the last and largest one.
    """
    scheduled = None if args.batch_schedule is None else parse_batch_sizes(args.batch_schedule,
                                                                           seq_length=args.seq_length)
    if scheduled is not None and args.global_batch_size not in (None, scheduled.final):
        raise ConfigError(BATCH_SCHEDULE, found=f"{scheduled.final} as the last global batch",
                          expected=f"that of --global_batch_size, {args.global_batch_size}")
    rows, keys = filled_keys(file, args), _BATCH_KEYS
    micro, steps, total = (choose(file, rows[key]) for key in keys)
    if total is None and micro is None and "auto" not in (file.get(keys[0]), file.get(keys[2])):
        raise ConfigError(file.where(keys[0]), problem=f"there is no batch size: neither {keys[0]} nor {keys[2]}",
                          remedy="give --micro_batch_size")
    fitting = _fitting_ranks(total, micro, steps) if total and micro and steps else ""
    micro, steps, total = _complete_batch_sizes(micro, steps, total, data_parallel_size)
    if not 0 < micro * steps * data_parallel_size == total:
        product = f"{total} != {micro or '?'} x {steps or '?'} x {data_parallel_size}"
        where = file.where(keys[2]) if scheduled is None or keys[2] in file.values else BATCH_SCHEDULE
        raise ConfigError(where, found=product,
                          expected="train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
                          "data-parallel size (ranks / pipeline.stages)",
                          remedy=fitting + 'change one of them, or leave one at "auto"')
    config.update(zip(keys, (int(micro), int(steps), int(total)), strict=True))
    sizes, unit = scheduled or fixed_batch(int(total)), int(micro) * data_parallel_size
    for _, size in sizes.stages:
        if size % unit:
            raise ConfigError(BATCH_SCHEDULE, found=f"a global batch of {size}",
                              expected=f"a multiple of {unit} = {micro} micro-batch x {data_parallel_size} "
                              "data-parallel ranks", remedy="or give a smaller --micro_batch_size")
    return sizes


def _fitting_ranks(total: int, micro: int, steps: int) -> str:
    """Return the number of ranks for which three given batch sizes are right, as the beginning of a remedy."""
    ranks, rest = divmod(total, micro * steps)
    if rest:
        return ""
    return f"they fit {counted(ranks, 'data-parallel rank')} (`ds-pretrain check` takes --world_size); otherwise, "


def with_optimizer(file: DsFile, args: RunArguments) -> DsFile:
    """Return the file. If it has no "optimizer", return a copy with AdamW, whose parameters are "auto".

    Many JSONs of transformers users have no "optimizer", because transformers takes the learning rate from a flag.
    Raises ConfigError if both "optimizer" and --learning_rate are missing.
    """
    if "optimizer" in file.values:
        return file
    if args.learning_rate is None:
        raise ConfigError(file.where("optimizer"), problem="the block is missing, and there is no --learning_rate",
                          remedy='--learning_rate 3e-4 selects AdamW; with "optimizer": '
                          '{"type": "AdamW", "params": {"lr": "auto"}} the rate has a default')
    auto = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    return replace(file, values={**file.values, "optimizer": auto})


def fill_optimizer(file: DsFile, config: dict[str, Any], args: RunArguments) -> float:
    """Set optimizer.params and gradient_clipping. Returns the peak learning rate."""
    rows = filled_keys(file, args)
    _fill(file, config, rows["gradient_clipping"])
    kind, params = file.get("optimizer.type"), config["optimizer"]["params"]
    known = {name for name, key in (optimizer_params(kind) or {}).items() if isinstance(key, Key) and key.auto}
    names = ("lr", "weight_decay", "eps", "betas")
    for name in names:
        row = rows[f"{_PARAMS}.{name}"]
        if name in known:
            _fill(file, config, row)
        elif row.wanted is not None:
            raise ConfigError(row.flag, problem=f'the JSON\'s optimizer, "{kind}", has no parameter "{name}"',
                              remedy="leave the flag out")
    params.setdefault("lr", DEFAULT_LEARNING_RATE)
    if "betas" in params:
        params["betas"] = [float(beta) for beta in params["betas"]]  # torch.optim.Adam rejects [0, 0.9]
    for name in names:
        value = params.get(name, 0)
        if any(number < 0 for number in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"{_PARAMS}.{name}", found=value, expected="a number from 0")
    return float(params["lr"])


def scale_rates(config: dict[str, Any], rate: float, args: RunArguments) -> float:
    """Apply --lr_scaling to the optimizer's learning rates. Returns the scaled peak rate."""
    factor = rate_factor(args.lr_scaling, batch=config["train_batch_size"], reference_batch=args.lr_reference_batch)
    params = config["optimizer"]["params"]
    if factor != 1:
        params.update({name: params[name] * factor for name in ("lr", "muon_lr", "adam_lr") if name in params})
    return rate * factor


def _betas(file: DsFile, args: RunArguments) -> list[float] | None:
    """Return the pair of --adam_beta1 and --adam_beta2; a missing one comes from the JSON or the default."""
    flags = (args.adam_beta1, args.adam_beta2)
    if flags == (None, None):
        return None
    for number, flag in zip((1, 2), flags, strict=True):
        if flag is not None and not 0 <= flag < 1:
            raise ConfigError(f"--adam_beta{number}", found=flag, expected="a number from 0 to below 1")
    own = file.get("optimizer.params.betas")
    fallback = own if isinstance(own, list) else DEFAULT_BETAS
    return [other if flag is None else flag for flag, other in zip(flags, fallback, strict=True)]


def fill_model_sizes(config: dict[str, Any], model: ModelConfig, zero_stage: int) -> None:
    """Set the ZeRO sizes (elements) that depend on the model; "auto" by the formulas that transformers documents.

    DeepSpeed allocates each reduce bucket at its full size, 5e8 elements by default. A bucket never needs more elements
    than the model has parameters.
    """
    zero, hidden_size = config.get("zero_optimization", {}), model.hidden_size
    sizes = {"reduce_bucket_size": hidden_size**2, "prefetch_bucket_size": int(0.9 * hidden_size**2),
             "param_persistence_threshold": 10 * hidden_size}
    for name, size in sizes.items():
        for key in (name, f"stage3_{name}"):
            if zero.get(key) == "auto":
                zero[key] = size
    if zero_stage > 0:
        bucket = zero.get("reduce_bucket_size", DEFAULT_REDUCE_BUCKET_SIZE)
        zero["reduce_bucket_size"] = min(bucket, model.num_parameters())


def swap_folder(nvme_path: str, save: str) -> Path:
    """Return the folder for the swap files of this run.

    DeepSpeed names swap files by rank and parameter only. Two runs with the same nvme_path would silently read each
    other's files.
    """
    run = Path(save).absolute()
    return Path(nvme_path, f"ds-pretrain-{run.name}-{zlib.crc32(str(run).encode()):08x}")


def fill_nvme_path(file: DsFile, config: dict[str, Any], args: RunArguments) -> None:
    """Set nvme_path of the offload blocks from the JSON, --nvme_path or the variable DS_PRETRAIN_NVME_PATH."""
    used, rows = False, filled_keys(file, args)
    for block in _OFFLOAD:
        own = get_value(config, f"zero_optimization.{block}")
        if not isinstance(own, dict):
            continue
        dotted = f"zero_optimization.{block}.nvme_path"
        if own.get("device") != "nvme":
            if own.get("nvme_path") in (None, "auto"):
                own.pop("nvme_path", None)
            continue
        used = True
        path = choose(file, rows[dotted]) or os.environ.get(NVME_PATH_VARIABLE)
        if not path:
            raise ConfigError(file.where(dotted), problem="the folder is missing",
                              remedy=f"give --nvme_path, a folder on a fast local disk, or set {NVME_PATH_VARIABLE}")
        own["nvme_path"] = str(swap_folder(path, args.save))
    if args.nvme_path is not None and not used:
        raise ConfigError("--nvme_path", problem='the JSON offloads nothing to "nvme"',
                          remedy="leave the flag out")


def fill_scheduler(file: DsFile, config: dict[str, Any], args: RunArguments, train_steps: int, rate: float) -> None:
    """Set "auto" values of scheduler.params: the run's length, its warm-up and the peak rate."""
    if "scheduler" not in config:
        return
    for name, wanted, default in (("total_num_steps", None, train_steps),
                                  ("warmup_num_steps", args.lr_warmup_steps, default_warmup_steps(train_steps)),
                                  ("warmup_max_lr", None, rate), ("warmup_min_lr", None, 0)):
        _fill(file, config, FilledKey(f"scheduler.params.{name}", "", wanted, default))


def fill_reports(config: dict[str, Any], args: RunArguments, zero_stage: int) -> None:
    """Set the output folders of file monitors, and steps_per_print if timers are on. Remove a comms_logger that is off.

    File monitors and the flops profiler write to the run folder unless the JSON names another one. With timers,
    DeepSpeed 0.19.8's PipelineEngine computes `global_steps % steps_per_print`, which fails for the default None.
    DeepSpeed 0.19.8 (comm/config.py) logs the communication if there is a block "comms_logger", whatever its "enabled".
    """
    if not get_value(config, "comms_logger.enabled"):
        config.pop("comms_logger", None)
    timers = config.get("wall_clock_breakdown") or get_value(config, "flops_profiler.enabled")
    if timers and zero_stage < 2 and config.get("steps_per_print") is None:
        config["steps_per_print"] = args.log_interval
    for name, folder in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
        if config.get(name, {}).get("enabled") and not config[name].get("output_path"):
            config[name]["output_path"] = str(Path(args.save, folder))
    if get_value(config, "flops_profiler.enabled") and not get_value(config, "flops_profiler.output_file"):
        config["flops_profiler"]["output_file"] = str(Path(args.save, PROFILES_FOLDER, "flops.txt"))
