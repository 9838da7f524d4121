"""Checkpoint pickles: enum members of every Python version, rejected code, and the reports of `verify`."""

import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch._weights_only_unpickler import _get_allowed_globals

from pretrain.checkpoint.format.hashed_files import HashedFile
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.format.verify import USUAL_GLOBALS, damage_of, has_only_usual_globals, pickle_globals
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint
from pretrain.checkpoint.save.save_checkpoint import FileEngine
from pretrain.errors import ConfigError
from tests.support.checkpoints import LAYOUTS, copy_checkpoints, real_run
from tests.support.poison import Poison, put_into


class Call:
    """An object whose pickle calls `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call

    def __str__(self) -> str:
        function, arguments = self.call
        return f"{function.__name__}({', '.join(map(str, arguments))})"


@pytest.fixture
def as_in_3_11_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this Python pickle members of ZeroStageEnum as Python 3.11.0 to 3.11.3 do."""
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))


def optimizer_file() -> dict[str, Any]:
    """Return the content of a small optimizer file of DeepSpeed."""
    return {"optimizer_state_dict": {"zero_stage": ZeroStageEnum.gradients, "partition_count": (1, 2),
                                     "single_partition_of_fp32_groups": [torch.arange(5.0)],
                                     "param_slice_mappings": [OrderedDict(a=1)]}, "ds_version": "0.19.8"}


@pytest.mark.usefixtures("as_in_3_11_2")
def test_enum_members_are_saved_as_ints(tmp_path: Path) -> None:
    engine, value = FileEngine(HashedFile), optimizer_file()
    engine.save(value, str(tmp_path / "ours.pt"))
    assert engine.error is None
    assert pickle_globals(tmp_path / "ours.pt") == {"collections OrderedDict", "torch FloatStorage",
                                                    "torch._utils _rebuild_tensor_v2"}
    loaded = load_pickle(tmp_path / "ours.pt")["optimizer_state_dict"]
    assert type(loaded["zero_stage"]) is int
    assert loaded["zero_stage"] == ZeroStageEnum.gradients
    assert loaded["partition_count"] == (1, 2)
    assert type(loaded["param_slice_mappings"][0]) is OrderedDict
    assert torch.equal(loaded["single_partition_of_fp32_groups"][0], torch.arange(5.0))
    assert type(value["optimizer_state_dict"]["zero_stage"]) is ZeroStageEnum, "saving changed the engine's own state"


@pytest.mark.usefixtures("as_in_3_11_2")
def test_files_of_python_3_11_2_are_read(tmp_path: Path) -> None:
    torch.save([*ZeroStageEnum, optimizer_file()], tmp_path / "theirs.pt")
    assert "__builtin__ getattr" in pickle_globals(tmp_path / "theirs.pt")
    *stages, file = load_pickle(tmp_path / "theirs.pt", mmap=True)
    assert stages == [0, 1, 2, 3]
    assert file["optimizer_state_dict"]["zero_stage"] == 2


@pytest.mark.parametrize("value", [
    Call(getattr, os.path.join, "__globals__"),
    Call(getattr, ZeroStageEnum, "mro"),
    Call(getattr, ZeroStageEnum, "__init__"),
    Call(getattr, ZeroStageEnum, "from_bytes"),
    Call(getattr, ZeroStageEnum, ("weights",)),
    Call(getattr, ZeroStageEnum, "weights", None),
    Call(getattr, OrderedDict, "fromkeys"),
    Call(getattr, Call(getattr, ZeroStageEnum, "weights"), "to_bytes"),
    Call(getattr, torch.Tensor, "numpy"),
    getattr, eval, Call(exec, "open('canary', 'w')"),
], ids=lambda value: re.sub(r" at 0x\w+", "", str(value)))
def test_getattr_of_other_objects_is_rejected_and_not_run(value: Any, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"zero_stage": value, "canary": Poison("canary")}, "file.pt")
    assert not has_only_usual_globals(Path("file.pt"))
    with pytest.raises(ConfigError, match="Nothing in the file was run") as rejected:
        load_pickle(Path("file.pt"))
    assert "not written by this program" not in str(rejected.value)
    assert os.listdir() == ["file.pt"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_protocols_do_not_hide_a_class(tmp_path: Path, protocol: int) -> None:
    torch.save({"module": Call(exec, "pass")}, tmp_path / "file.pt", pickle_protocol=protocol)
    assert not has_only_usual_globals(tmp_path / "file.pt")
    with pytest.raises(ConfigError):
        load_pickle(tmp_path / "file.pt")


def test_the_scan_accepts_only_globals_that_torch_accepts(tmp_path: Path) -> None:
    known = _get_allowed_globals().keys()
    torch_only = {name.replace(" ", ".") for name in USUAL_GLOBALS if not name.startswith("deepspeed")}
    assert torch_only <= known
    assert not has_only_usual_globals(tmp_path / "missing")
    (tmp_path / "text").write_text("text")
    assert not has_only_usual_globals(tmp_path / "text")
    with open(tmp_path / "legacy", "wb") as file:
        pickle.dump({}, file)
    assert not has_only_usual_globals(tmp_path / "legacy")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_verify_reports_pickles_that_cannot_be_loaded(layout: str, corpus: str, tmp_path: Path,
                                                      tmp_path_factory: pytest.TempPathFactory,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """verify accepts a pickle of Python 3.11.2 and reports a pickle with a foreign class. Both have correct hashes."""
    checkpoints = copy_checkpoints(real_run(layout, corpus, tmp_path_factory), tmp_path / "checkpoints")
    folder, canary = find_checkpoint(checkpoints)[0], tmp_path / "canary"
    pickles = sorted(folder.glob("*.pt"))
    assert all(has_only_usual_globals(path) for path in pickles), "verify must not need torch for our own files"
    assert not any("ZeroStageEnum" in name for path in pickles for name in pickle_globals(path))
    assert damage_of(folder, read_manifest(folder)) == []

    path = max(folder.glob("*optim_states.pt"))
    content = load_pickle(path)
    with monkeypatch.context() as patch:
        patch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        content["optimizer_state_dict"]["zero_stage"] = ZeroStageEnum.optimizer_states
        put_into(folder, path.name, content)
    assert not has_only_usual_globals(path)
    assert damage_of(folder, read_manifest(folder)) == []

    put_into(folder, path.name, {"module": Poison(str(canary)), "tensor": torch.zeros(3)})
    (problem,) = damage_of(folder, read_manifest(folder))
    assert problem.startswith(f"{path}: found a pickle that needs ")
    assert "system" in problem
    assert not canary.exists()
