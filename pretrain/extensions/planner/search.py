"""The workload and the layouts that the flags of `ds-pretrain compare` describe."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import with_dropout
from pretrain.errors import ConfigError
from pretrain.extensions.planner.estimates import ClusterEstimates
from pretrain.extensions.planner.flags import axes_of, cluster_of
from pretrain.extensions.planner.step_time.calibrate import Calibration, calibrate, on_cpus
from pretrain.extensions.planner.step_time.kernel_time import with_predicted_times
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.memory.compare.candidates import (
    Candidate,
    CandidateSet,
    batch_keys,
    generate_candidates,
    resolve_candidate,
)
from pretrain.memory.compare.compare import Workload
from pretrain.memory.compare.compare_zero import DEFAULT_SEQ_LENGTH
from pretrain.memory.hardware import DEFAULT_GPU, Cluster
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig


@dataclass(frozen=True)
class PlannerWorkload(Workload):
    """A workload with what its step times are predicted from."""

    time_parameters: TimeParameters = DEFAULT_PARAMETERS
    calibration: Calibration | None = None


def workload_of(flags: argparse.Namespace) -> PlannerWorkload:
    """Return the model and the machines that the flags describe, or that the run in --calibrate used."""
    calibration = calibrate(flags.calibrate, flags.gpu) if flags.calibrate else None
    cluster = cluster_of(flags, flags.gpu) if calibration is None else _calibrated_cluster(flags, calibration)
    if flags.kernel_efficiency is not None:
        cluster = replace(cluster, gpu=replace(cluster.gpu, product_efficiency=flags.kernel_efficiency))
    parameters = calibration.parameters if calibration else DEFAULT_PARAMETERS
    if flags.num_parameters is not None:
        return PlannerWorkload(cluster, flags.num_parameters, name=f"{flags.num_parameters / 1e9:,.4g} B parameters")
    if flags.model is not None:
        model, name = with_dropout(load_model_config(flags.model, flags.model_overrides), flags), flags.model
    else:
        assert calibration is not None
        model, name = calibration.runs[0].model, f"the model of {calibration.runs[0].path}"
    return PlannerWorkload(cluster, model.num_parameters(), model, name, ClusterEstimates(cluster, parameters),
                           parameters, calibration)


def _calibrated_cluster(flags: argparse.Namespace, calibration: Calibration) -> Cluster:
    """Return machines like in the measured runs. Without flags, the number of ranks is the first run's."""
    run = calibration.runs[0]
    if flags.world_size is None and flags.nodes is None and flags.gpus_per_node is None:
        flags = argparse.Namespace(**{**vars(flags), "world_size": run.layout.world_size})
    cluster = cluster_of(flags, calibration.gpu.name if calibration.gpu else DEFAULT_GPU)
    return cluster if calibration.gpu else on_cpus(cluster, run)


def candidates_of(flags: argparse.Namespace, workload: Workload, device_kind: str) -> CandidateSet:
    """Return the layouts that the flags describe."""
    positions = workload.model.max_positions if workload.model else DEFAULT_SEQ_LENGTH
    seq_length = min(DEFAULT_SEQ_LENGTH, positions)
    documents = bool(flags.document_attention)
    if not flags.configs:
        return generate_candidates(axes_of(flags, seq_length), workload.cluster, workload.model,
                                   device_kind=device_kind, document_attention=documents)
    assert workload.model is not None
    given = Layout(seq_length=(flags.seq_length or [seq_length])[0], document_attention=documents,
                   device_kind=device_kind)
    return read_candidates(flags.configs, given, workload.cluster, workload.model,
                           micro_batch_size=(flags.micro_batch_size or [None])[0],
                           gradient_accumulation_steps=flags.gradient_accumulation_steps)


def read_candidates(paths: list[str], given: Layout, cluster: Cluster, model: ModelConfig, *,
                    micro_batch_size: int | None = None,
                    gradient_accumulation_steps: int | None = None) -> CandidateSet:
    """Read the layouts of DeepSpeed JSONs.

    Args:
        given: has the sequence length and the fields that a JSON does not set, except the name.
        micro_batch_size, gradient_accumulation_steps: used if the JSON's values are missing or "auto".

    Raises:
        ConfigError: a file is not a valid JSON, or no file describes a possible layout.
    """
    candidates, impossible = list[Candidate](), dict[str, int]()
    for path in paths:
        file = read_ds_config(path, flag="--configs")
        values = {**file.values}
        for key, size in (("train_micro_batch_size_per_gpu", micro_batch_size),
                          ("gradient_accumulation_steps", gradient_accumulation_steps)):
            if size is not None and values.get(key) in (None, "auto"):
                values[key] = size
        if {values.get(key) for key in ("train_micro_batch_size_per_gpu", "train_batch_size")} == {None}:
            values["train_micro_batch_size_per_gpu"] = FLAGS["micro_batch_size"].unset
        try:
            found = resolve_candidate(replace(file, values=values), replace(given, name=Path(path).stem), cluster,
                                      model, path=path)
        except ConfigError as error:
            impossible[str(error)] = 1
            continue
        candidates.append(replace(
            found, layout=with_predicted_times(found.layout, model, cluster), config={**file.values, **{
                key: size for key, size in batch_keys(found.layout).items() if file.get(key) in (None, "auto")}}))
    if not candidates:
        reason = next(iter(impossible), "no file given")
        raise ConfigError("--configs", problem=f"no file describes a possible layout ({reason.removesuffix('.')})")
    return CandidateSet(candidates, impossible)
