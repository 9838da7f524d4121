"""Validate the manifests of launch/k8s without a cluster, with the schemas of Kubernetes and of Kubeflow's operator."""

import re
from typing import Any

import pytest
import yaml

from tests.support.launch import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow.training.models")
FOLDER = ROOT / "launch" / "k8s"
VERSION = "1.31"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def _check(document: dict[str, Any]) -> None:
    """Raise ValidationError for a key that is unknown, missing or of the wrong type."""
    kubernetes_validate.validate(document, VERSION, strict=True)


def _check_model(value: Any, kind: str) -> None:
    """Validate `value` with the operator's model classes. A pod template is validated with the schema of Kubernetes."""
    model = getattr(models, kind, None)
    if kind == "V1PodTemplateSpec":
        _check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": value})
    elif kind.startswith("dict(str, "):
        for item in value.values():
            _check_model(item, kind.removeprefix("dict(str, ").removesuffix(")"))
    elif model is not None:
        names = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
        assert value.keys() <= names.keys(), f"{kind}: {value.keys() - names.keys()}"
        for key, item in value.items():
            _check_model(item, names[key])
    else:
        assert isinstance(value, {"str": str, "int": int, "bool": bool}.get(kind, object)), (kind, value)


def test_the_indexed_job_is_valid() -> None:
    service, job = _documents("indexed-job.yaml")
    _check(service)
    _check(job)
    pod = job["spec"]["template"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    command = pod["spec"]["containers"][0]["args"][0]
    assert f"--nnodes {job['spec']['completions']} " in command
    assert f"--master_addr {job['metadata']['name']}-0.{service['metadata']['name']} " in command
    with pytest.raises(kubernetes_validate.ValidationError):
        _check({**job, "spec": {**job["spec"], "completionsMode": "Indexed"}})


def test_the_pytorchjob_is_valid() -> None:
    (job,) = _documents("pytorchjob.yaml")
    _check_model({key: value for key, value in job.items() if key != "metadata"}, "KubeflowOrgV1PyTorchJob")
    assert job["spec"]["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]
    with pytest.raises(AssertionError, match="nprocPerPod"):
        _check_model({"nprocPerPod": "8"}, "KubeflowOrgV1PyTorchJobSpec")


def test_manifests_start_the_program_of_the_image() -> None:
    (build,) = re.findall(r"^# +docker build .* -t (\S+:cuda) ", (ROOT / "launch/Dockerfile").read_text(), re.MULTILINE)
    for path in sorted(FOLDER.iterdir()):
        assert re.findall(r"image: (.*)", path.read_text()) == [build]
        assert re.search(r"torchrun\b.*-m\W+pretrain\.train\b", path.read_text(), re.DOTALL)
        assert (ROOT / "pretrain/train.py").is_file()
