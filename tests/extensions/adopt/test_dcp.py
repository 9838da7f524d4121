"""Checkpoints of torch.distributed.checkpoint: chunks of ranks, damage, hostile pickles."""

import argparse
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pretrain.extensions.adopt.dcp import read
from pretrain.extensions.adopt.dcp.files import read_dcp
from pretrain.extensions.adopt.sources import find_source
from tests.extensions.adopt.dcp_writer import DcpWriter, write_dcp
from tests.support.poison import Poison
from tests.support.rejection import rejection


def test_chunks_of_ranks_in_several_dimensions_are_joined(tmp_path: Path) -> None:
    tensors = {"rows": torch.randn(5, 4), "grid": torch.randn(5, 7, 3), "few": torch.randn(1, 4).bfloat16(),
               "number": torch.tensor(6.0), "vector": torch.arange(9), "empty": torch.zeros(0, 3)}
    writer = DcpWriter(tmp_path / "a")
    for name, splits in {"rows": (3,), "grid": (2, 3), "few": (3,), "number": (), "vector": (4,), "empty": ()}.items():
        writer.add(name, tensors[name], *splits)
    writer.add_value("step", 7)
    files = read_dcp(writer.finish())
    for name, tensor in tensors.items():
        found = files.read(name)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    assert torch.equal(files.read("grid", 4), tensors["grid"][4])
    assert files.value("step") == 7
    assert {path.name for path in files.files} == {".metadata", *(f"__{rank}_0.distcp" for rank in range(6))}


def test_files_of_this_torch_are_read(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(4, 3), "optimizer": {"state.a.weight.step": torch.tensor(3.0),
                                                          "param_groups.a.weight.betas": (0.9, 0.95)}}
    dcp.save(state, checkpoint_id=tmp_path / "step-3")
    files = read_dcp(tmp_path / "step-3")
    assert torch.equal(files.read("a.weight"), state["a.weight"])
    assert files.value("optimizer.param_groups.a.weight.betas") == (0.9, 0.95)


def damaged(folder: Path, how: str) -> Path:
    writer = DcpWriter(folder)
    writer.add("weight", torch.randn(6, 4), 2, 2)
    writer.add_value("step", 7)
    chunks = writer.entries["weight"].chunks
    index, place = next(iter(writer.places.items()))
    second = folder / "__1_0.distcp"
    if how == "gap":
        chunks.pop()
    elif how == "overlap":
        chunks[1].sizes = torch.Size((3, 4))
        chunks[1].offsets = torch.Size((0, 0))
    elif how == "outside":
        chunks[3].offsets = torch.Size((4, 2))
    elif how == "other folder":
        place.relative_path = "../weights.distcp"
    elif how == "compressed":
        place.transform_descriptors = ["zstd"]
    elif how == "dtype":
        writer.entries["weight"].properties.dtype = torch.float16
    elif how == "short chunk":
        place.length = 10
    elif how == "not there":
        del writer.places[index]
    writer.finish()
    if how == "truncated":
        second.write_bytes(second.read_bytes()[:-7])
    elif how == "missing":
        second.unlink()
    elif how == "safetensors":
        second.write_bytes(b"\x08" + second.read_bytes()[1:])
    elif how == "zeros":
        content = second.read_bytes()
        second.write_bytes(content[:200] + bytes(len(content) - 200))
    elif how == "metadata":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-50])
    elif how == "another object":
        (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    return folder


@pytest.mark.parametrize(("how", "expected"), [
    ("gap", "weight: its chunks leave a gap in a tensor of [6, 4]"), ("overlap", "weight: its chunks"),
    ("outside", "a chunk of weight that ends at"), ("other folder", "the file ../weights.distcp"),
    ("compressed", "weight: its chunks are transformed by ['zstd'], which this program does not read"),
    ("dtype", "torch.float32"), ("short chunk", "found 10 bytes for a chunk; expected at least 24"),
    ("not there", "KeyError"), ("truncated", "__1_0.distcp: found "),
    ("missing", "this file of the checkpoint is missing"),
    ("safetensors", "weight: it is not in the format of torch.save"),
    ("zeros", "__1_0.distcp: weight: found an unreadable"),
    ("metadata", ".metadata: it is damaged"), ("another object", ".metadata: it is not a description of a checkpoint")])
def test_damage_is_reported_in_one_line(how: str, expected: str, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "a", how)
    assert expected in rejection(lambda: read_dcp(folder).read("weight"))


def hostile(folder: Path, where: str, canary: str) -> None:
    """Write a checkpoint of Megatron Core in which one pickle creates the file `canary`."""
    content, writer = io.BytesIO(), DcpWriter(folder)
    torch.save(Poison(canary), content)
    writer.add("embedding.word_embeddings.weight", torch.zeros(2, 2) if where == "chunk" else torch.zeros(96, 32))
    if where == "chunk":
        next(iter(writer.places.values())).length = len(content.getvalue())
    if where == "value":
        writer.add_value("embedding.step", Poison(canary))
    writer.finish()
    torch.save({"args": argparse.Namespace(num_layers=Poison(canary) if where == "common.pt" else 2)},
               folder / "common.pt")
    if where == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Poison(canary)}))
    elif where == "chunk":
        (folder / "__0_0.distcp").write_bytes(content.getvalue())


@pytest.mark.parametrize("where", [".metadata", "common.pt", "chunk", "value"])
def test_no_pickle_of_a_checkpoint_runs_code(where: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "iter_0000006"
    hostile(folder, where, str(canary))

    def read_all() -> None:
        files = read_dcp(folder)
        for name in files.tensors:
            files.read(name)
        for name in files.objects:
            files.value(name)
        read(folder, None)

    line = rejection(read_all)
    assert "othing in the file was run" in line, line
    assert not canary.exists()


@pytest.mark.parametrize("value", [os.system, getattr, eval, torch.nn.Linear, pickle.loads, Path.unlink])
def test_other_classes_and_functions_are_rejected(value: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps([value]))
    line = rejection(lambda: read_dcp(tmp_path))
    assert ".metadata: " in line


def test_names_of_other_programs_are_rejected(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "step-1", {"encoder.weight": torch.zeros(3)}, {})
    assert "found tensors with names such as encoder.weight; expected names of torchtitan" in rejection(
        lambda: read(folder, None))
    shards = tmp_path / "other/step-2"
    shards.mkdir(parents=True)
    (shards / "shard-00001-model-00001-of-00001.safetensors").touch()
    for path in (shards, shards.parent):
        assert f"{shards}: shards that torch's HuggingFaceStorageWriter wrote are not read" in rejection(
            lambda path=path: find_source(path, step=None, config=None))
