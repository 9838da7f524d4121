"""The reader assembles parameters, and any elements or parts of them, from parts that any ranks have written."""

import json
import tempfile
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.checkpoint.format.fragments import FileLocation, Fragment
from pretrain.checkpoint.format.shard_index import FP32, index_name, index_text, tensor_entry
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.distributed.parallel_groups import RankGroup
from pretrain.errors import ConfigError
from pretrain.model.parameters import Part, split_segments

MOMENT = "exp_avg"


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Part | None]:
    """Draw how ranks divide a parameter: one part for each rank; None: every rank has the complete parameter."""
    ranks = draw(st.integers(1, 4))
    if not shape or draw(st.integers(0, 3)) == 0:
        return [None] * ranks
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=2))})  # such as q, k and v
    sizes = [stop - start for start, stop in pairwise(cuts)]
    return [Part(shape, dim, split_segments(sizes, RankGroup(ranks, rank))) for rank in range(ranks)]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[list[tuple[str, Part | None]]], int]:
    """Draw shapes of parameters, what each tensor- or expert-parallel rank holds, and a number of ZeRO partitions."""
    shapes = {f"p{i}": tuple(draw(st.lists(st.integers(1, 7), max_size=3))) for i in range(draw(st.integers(1, 3)))}
    divided = {name: draw(divisions(shape)) for name, shape in shapes.items()}
    ranks = max(len(parts) for parts in divided.values())
    holds = [[(name, parts[rank]) for name, parts in divided.items() if rank < len(parts)] for rank in range(ranks)]
    return shapes, holds, draw(st.integers(1, 3))


def _tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {state: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            for state in (FP32, MOMENT)}


def _write(folder: Path, tensors: dict[str, dict[str, torch.Tensor]],
           holds: list[list[tuple[str, Part | None]]], partitions: int) -> None:
    """Write the files of every rank, as ZeRO-1 divides what a tensor-parallel rank holds over its data ranks."""
    for rank, held in enumerate(holds):
        for data in range(partitions):
            flats: dict[str, list[torch.Tensor]] = {state: [torch.empty(0)] for state in tensors}
            fragments, offset = [], 0
            local = {name: part.local_shape if part else tuple(tensors[FP32][name].shape) for name, part in held}
            total = sum(prod(shape) for shape in local.values())
            low, high = total * data // partitions, total * (data + 1) // partitions
            begin = 0
            for name, part in held:
                numel = prod(local[name])
                first, last = max(low, begin), min(high, begin + numel)
                if first < last:
                    fragments.append(Fragment(name, tuple(tensors[FP32][name].shape), first - begin, last - first,
                                              offset, part))
                    for state, values in tensors.items():
                        own = part.of(values[name]) if part else values[name]
                        flats[state].append(own.reshape(-1)[first - begin:last - begin])
                    offset += last - first
                begin += numel
            if not fragments:
                continue
            joined = {state: torch.cat(flat) for state, flat in flats.items()}
            file = f"rank_{rank}_{data}.pt"
            torch.save(joined, folder / file)
            location = FileLocation(file, ())
            entry = tensor_entry(location.at(FP32), location, fragments, elementwise=[MOMENT], scalars={"step": 3.0})
            (folder / index_name(rank * partitions + data)).write_text(index_text("AdamW", [{}], [entry]))


def _write_index(folder: Path, rank: int, index: dict[str, Any]) -> None:
    (folder / index_name(rank)).write_text(json.dumps(index))


@given(checkpoints(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_part_of_any_parameter_is_read(drawn: Any, data: st.DataObject) -> None:
    shapes, holds, partitions = drawn
    tensors = _tensors(shapes)
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), tensors, holds, partitions)
        reader = CheckpointReader(Path(folder))
        assert reader.shapes == shapes
        assert reader.states == [FP32, MOMENT]
        assert reader.scalars == {"step": 3.0}
        for name, shape in shapes.items():
            assert torch.equal(reader.tensor(name), tensors[FP32][name])
            for part in data.draw(divisions(shape)):
                state = data.draw(st.sampled_from([FP32, MOMENT]))
                expected = (part.of(tensors[state][name]) if part else tensors[state][name]).reshape(-1)
                start = data.draw(st.integers(0, expected.numel()))
                stop = data.draw(st.integers(start, expected.numel()))
                out = torch.full((stop - start,), torch.nan)
                reader.copy(name, state, start, out, part)
                assert torch.equal(out, expected[start:stop])


@given(checkpoints(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_missing_fragments_are_detected(drawn: Any, random: Any) -> None:
    shapes, holds, partitions = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, _tensors(shapes), holds, partitions)
        removed = random.choice(sorted(folder.glob("shard_index_*")))
        fragments = json.loads(removed.read_text())["tensors"][0]["fragments"]
        removed.unlink()
        left = [fragment for path in folder.glob("shard_index_*")
                for fragment in json.loads(path.read_text())["tensors"][0]["fragments"]]
        remaining = {each[0] for each in left}
        lost = any(_elements(each) - set().union(*(_elements(other) for other in left if other[0] == each[0]))
                   for each in fragments if each[0] in remaining)
        if lost or not remaining:
            with pytest.raises(ConfigError, match=r"shard indexes (cover|have) only the first|there is no shard_index"):
                CheckpointReader(folder)
        else:  # a parameter that is in no index is unknown to the reader; the model that is filled has it
            assert CheckpointReader(folder).shapes.keys() == remaining


def _elements(fragment: list[Any]) -> set[int]:
    """Return the indexes of a fragment's elements in the flattened complete parameter."""
    _, shape, start, length, _, *part = fragment
    complete = torch.arange(prod(shape)).view(shape)
    own = Part(tuple(shape), part[0][0], tuple(map(tuple, part[0][1]))).of(complete) if part else complete
    return set(own.reshape(-1)[start:start + length].tolist())


def test_an_index_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    _write_index(tmp_path, 0, {"format": 3, "parameters": {}})
    with pytest.raises(ConfigError, match=r"format: found 3; expected at most 2\. A newer version .* update this one"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("part", [[2, [[0, 1]]], [0, [[0, 9]]], [0, [[0, 1]]], [0, 5], 7])
def test_a_damaged_part_is_rejected(part: Any, tmp_path: Path) -> None:
    fragment = ["weight", [4, 2], 0, 4, 0, part]
    entry = {"group": 0, "weights": ["a.pt", []], "states": ["a.pt", []], "elementwise": [], "scalars": {}, "other": [],
             "fragments": [fragment]}
    _write_index(tmp_path, 0, {"format": 2, "optimizer": "AdamW", "groups": [{}], "tensors": [entry]})
    with pytest.raises(ConfigError, match="the shard index cannot be read"):
        CheckpointReader(tmp_path)
