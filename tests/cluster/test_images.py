"""launch/Dockerfile and launch/apptainer.def. The steps of the Dockerfile run in a bare Debian."""

import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.cluster.workers.packages import need_packages
from tests.support.image import Image, instructions, joined_lines, pip_variables
from tests.support.installed import build_wheel
from tests.support.launch import ROOT

DOCKERFILE = ROOT / "launch" / "Dockerfile"
APPTAINER = ROOT / "launch" / "apptainer.def"


def _sections(definition: Path) -> dict[str, list[str]]:
    """Return the lines of each section of an Apptainer definition. The header is section ""."""
    sections: dict[str, list[str]] = {"": []}
    for line in joined_lines(definition):
        if line.startswith("%"):
            sections[line.strip("% ")] = []
        else:
            sections[list(sections)[-1]].append(line)
    return sections


def test_both_images_have_the_same_steps() -> None:
    """The Dockerfile also creates a user. Under Apptainer the program runs as the user who starts it."""
    steps = instructions(DOCKERFILE)
    found = _sections(APPTAINER)
    of = {name: [words for instruction, words in steps if instruction == name] for name, _ in steps}
    assert found["arguments"] == of["ARG"]
    assert found["files"] == of["COPY"]
    assert found["environment"] == [f"export {words}" for words in of["ENV"]]
    assert found["post"][1:] == [*found["environment"], *of["RUN"][:-1]]
    assert of["RUN"][-1].startswith("useradd ")
    assert found["runscript"] == [f'exec {" ".join(json.loads(of["ENTRYPOINT"][0]))} "$@"']


def test_the_constraints_pin_what_the_image_installs() -> None:
    listed = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [\n")[1].split("\n]")[0]
    required = re.findall(r'^ +"([\w-]+)', listed, re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "launch/constraints.txt").read_text(), re.MULTILINE)
    assert required
    assert set(required) - set(pinned) == set()


@pytest.mark.slow
@pytest.mark.root
def test_the_image_trains_on_a_fresh_machine() -> None:
    """Nothing of this host is used but the wheel, the constraints and the settings of pip."""
    need_packages("bare Debians", {"debootstrap": "debootstrap"})
    if not Image.is_possible():
        pytest.skip("this machine allows no namespaces")
    pip, mounts = pip_variables()
    links = pip.get("PIP_FIND_LINKS")
    with tempfile.TemporaryDirectory() as folder:
        context, image = Path(folder, "context"), Image(Path(folder, "root"), mounts)
        (context / "launch").mkdir(parents=True)
        (context / "launch/constraints.txt").write_bytes((ROOT / "launch/constraints.txt").read_bytes())
        build_wheel(ROOT, context / "dist")
        image.make_debian("bookworm")
        image.build(DOCKERFILE, context, **pip, **({"TORCH_LINKS": links} if links else {}))
        image.run_shell("test $(id -u) = 10001 && ! touch /opt/ds-pretrain/file 2>/dev/null")
        image.run("quickstart")
        start = "torchrun --nproc_per_node 2 -m pretrain.train --config runs/quickstart/quickstart.yaml"
        image.run_shell(f"{start} | grep 'is complete'")
        assert folder not in Path("/proc/self/mounts").read_text()
