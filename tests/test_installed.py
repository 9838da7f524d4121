"""The wheel in a new environment, used from an empty folder: nothing needs the checkout.

tests/test_quickstart.py runs the quickstart, and then the commands of all pages, in such an environment.
"""

import ast
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from pretrain.commands import COMMANDS
from pretrain.shipped import TEMPLATES, layout_names
from tests.cluster.workers.slurm_cluster import SlurmCluster, slurm
from tests.support.installed import SHIPPED, build_wheel, install
from tests.support.launch import LIMIT_S, ROOT
from tests.test_train import rows

__all__ = ["slurm"]  # the fixture


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed") / "env")


def test_the_wheel_holds_the_package_and_the_shipped_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pretrain").rglob("*")}
    for folder in ("ds_configs", "launch"):
        expected |= {f"{SHIPPED}/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*")}
    assert names == {name for name in expected if (ROOT / name.removeprefix(f"{SHIPPED}/")).is_file()
                     and "__pycache__" not in name}


def test_layouts_and_templates_are_printed_as_they_are_in_the_checkout(environment: Path, tmp_path: Path) -> None:
    def run(command: str) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, text=True, capture_output=True, timeout=LIMIT_S,
                              env={"HOME": str(tmp_path), "PATH": f"{environment}/bin:/usr/bin:/bin"}, check=True)
        return done.stdout

    assert run("python -c 'import pretrain; print(pretrain.__file__)'").startswith(str(environment))
    folder = ROOT / "ds_configs"
    assert run("ds-pretrain config").split() == sorted(path.stem for path in folder.glob("*.json"))
    names = " ".join(layout_names())
    everything = run(f"for name in {names}; do ds-pretrain config $name; done")
    assert everything == "".join((folder / f"{name}.json").read_text() for name in layout_names())
    assert [line.split()[0] for line in run("ds-pretrain template").splitlines()] == list(TEMPLATES)
    for name, file in TEMPLATES.items():
        assert run(f"ds-pretrain template {name}") == (ROOT / "launch" / file).read_text()


def test_messages_name_what_an_installed_package_has() -> None:
    """Texts of the package name no file of a checkout, and only subcommands that exist."""
    wrong = []
    for path in (ROOT / "pretrain").rglob("*.py"):
        for text in _texts(path):
            if re.search(r"(?:tools|launch|ds_configs|tests)/[\w/]+\.(?:py|sh|md|json|sbatch|yaml)", text):
                wrong.append(f"{path}: {text}")
            if set(re.findall(r"`ds-pretrain ([a-z][a-z-]*)", text)) - COMMANDS.keys():
                wrong.append(f"{path}: {text}")
    assert wrong == []


def _texts(path: Path) -> list[str]:
    """Return the string constants of a module that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                  if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                  and node.body and isinstance(node.body[0], ast.Expr)}
    return [node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("launcher", ["srun", "deepspeed"])
def test_the_slurm_job_of_the_template(launcher: str, slurm: SlurmCluster, environment: Path, corpus: str) -> None:
    values = {"deepspeed_config": "zero2_bf16", "model": "tiny",
              "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "train_data": corpus, "seq_length": 64,
              "split": "80,20,0", "micro_batch_size": 2,
              "gradient_accumulation_steps": 2, "eval_steps": 1, "log_interval": 1, "train_steps": 4,
              "save": launcher}
    folder = slurm.folder
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    with (folder / "pretrain.sbatch").open("w") as script:
        subprocess.run([environment / "bin" / "ds-pretrain", "template", "slurm"], stdout=script, check=True)
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "pretrain.sbatch", "run.yaml", LAUNCHER=launcher,
                       PYTHONPATH="", PATH=f"{environment}/bin:{slurm.environ['PATH']}")
    slurm.wait_for(job, "COMPLETED")
    assert "2 data-parallel" in slurm.log(job)
    assert rows(folder / launcher)[-1]["step"] == 4
