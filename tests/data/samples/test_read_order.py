"""--skip_samples and --reorder_samples: the samples at each data position, for all kinds of datasets and any layout."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.data.loader import Loader
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.own import OwnSamples
from pretrain.data.samples.packed import PackedDocuments
from pretrain.data.samples.read_order import ReadOrder, ranges_text, read_order
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from tests.checkpoint.starts import resumed, start_run, write_checkpoint
from tests.data.counting import write_counting
from tests.data.test_ledger import LAYOUT, sources
from tests.support.launch import ROOT
from tests.support.own_data import build

MOST = 90  # ids in the generated flags


@st.composite
def orders(draw: st.DrawFn) -> tuple[str | None, str | None]:
    """Values of the two flags, with ranges in any order that overlap and adjoin."""
    skipped = draw(st.lists(st.tuples(st.integers(0, MOST), st.integers(1, 12)), max_size=6))
    bounds = sorted(draw(st.sets(st.integers(0, MOST), max_size=5)))
    reordered = [(first, last, draw(st.integers(0, 3))) for first, last in zip(bounds[::2], bounds[1::2], strict=False)]
    words = [f"{first}:{last}:{seed}" if seed else f"{first}:{last}" for first, last, seed in reordered]
    return (",".join(str(first) if size == 1 else f"{first}:{first + size}" for first, size in skipped) or None,
            ",".join(words) or None)


@st.composite
def datasets(draw: st.DrawFn, folder: Path) -> SampleDataset:
    seq_length, kind = draw(st.integers(2, 12)), draw(st.sampled_from(["files", "packed", "own"]))
    if kind == "own":
        return OwnSamples(build("train", seq_length + 6, length=17, plain=True), "1", "--dataset_module",
                          seq_length=seq_length + 6, seed=3, vocab_size=10**4)
    if kind == "packed":
        indexed = write_counting(folder / "packed", [3, 9, 1, 40, 12, 7, 30, 2, 2, 5])
        return PackedDocuments(indexed, seq_length=seq_length, seed=3)
    files = sources(folder, draw(st.data()), seq_length)
    return BlendedSamples(files, range(1, len(files) + 1)) if len(files) > 1 else files[0]


@given(orders())
def test_ids_are_those_of_a_list(flags: tuple[str | None, str | None]) -> None:
    """The whole order as a list: ranges are shuffled, then samples are removed."""
    order = read_order(*flags)
    skipped = {sample for first, last in order.skipped for sample in range(first, last)}
    assert skipped == {sample for word in (flags[0] or "").split(",") if word for first, _, last in
                       [word.partition(":")] for sample in range(int(first), int(last or int(first) + 1))}
    unskipped = ReadOrder(reordered=order.reordered).ids(range(2 * MOST)).tolist()
    for first, last, _ in order.reordered:
        assert sorted(unskipped[first:last]) == [*range(first, last)]
    inside = {place for first, last, _ in order.reordered for place in range(first, last)}
    assert all(sample == place for place, sample in enumerate(unskipped) if place not in inside)
    expected = [sample for sample in unskipped if sample not in skipped]
    assert order.ids(range(len(expected))).tolist() == expected
    assert ranges_text(sorted(skipped)) == ranges_text([*skipped]) or not skipped


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_layout_and_any_resume_read_the_same_samples(tmp_path_factory: pytest.TempPathFactory,
                                                         data: st.DataObject) -> None:
    dataset = data.draw(datasets(tmp_path_factory.mktemp("order")))
    order = read_order(*data.draw(orders()))
    consumed, read = 0, []
    for (ranks, micro, accumulation), steps in data.draw(st.lists(st.tuples(LAYOUT, st.integers(1, 3)), min_size=1,
                                                                  max_size=3)):
        loaders = [Loader(dataset, micro_batch_size=micro, gradient_accumulation_steps=accumulation, order=order,
                          data_parallel_rank=rank, data_parallel_size=ranks) for rank in range(ranks)]
        for _ in range(steps):
            batches = [loader.step(consumed) for loader in loaders]
            read += [row for number in range(accumulation) for rank in range(ranks)
                     for row in batches[rank][number][0].tolist()]  # type: ignore[union-attr]
            consumed += loaders[0].global_batch_size
        for loader in loaders:
            loader.close()
    expected = dataset.samples(order.ids(range(consumed)))[:, :-1]
    assert read == expected.clip(0).tolist()


@given(orders(), orders(), st.integers(0, MOST))
def test_orders_are_compared_by_what_was_read(first: tuple[str | None, str | None],
                                              second: tuple[str | None, str | None], consumed: int) -> None:
    before, after = read_order(*first), read_order(*second)
    if before.is_same_before(after, consumed):
        assert before.ids(range(consumed)).tolist() == after.ids(range(consumed)).tolist()
    later = before.end_of(consumed)
    longer = f"{first[0]},{later}:{later + 7}" if first[0] else f"{later}:{later + 7}"
    assert before.is_same_before(before, consumed)
    assert before.is_same_before(read_order(longer, first[1]), consumed) or any(
        start < later < stop for start, stop, _ in before.reordered)


@pytest.mark.parametrize(("flags", "problem"), [
    (("7:3", None), "--skip_samples: found '7:3'"), (("a", None), "--skip_samples: found 'a'"),
    (("1:2:3", None), "--skip_samples: found '1:2:3'"), (("", None), "--skip_samples: found ''"),
    ((None, "5"), "--reorder_samples: found '5'"), ((None, "1:9,8:12"), "the ranges 1:9 and 8:12 overlap"),
    ((None, "0:16777217"), "at most 16,777,216 samples"), (("99", None, 100), "sample 99 comes before --first_sample")])
def test_wrong_values(flags: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_order(*flags)


@pytest.fixture
def flags(corpus: str) -> list[str]:
    return ["--train_data", corpus, "--seq_length", "64", "--micro_batch_size", "4",
            "--gradient_accumulation_steps", "2", "--learning_rate", "1e-2"]


def _saved(run: Path, *flags: str) -> tuple[Plan, Manifest]:
    """Write a checkpoint of step 10, at sample 80."""
    plan = start_run(run, *flags).plan
    return plan, write_checkpoint(plan)


def test_a_resume_keeps_the_samples_or_names_the_change(tmp_path: Path, flags: list[str]) -> None:
    _, manifest = _saved(tmp_path, *flags, "--skip_samples", "20,90:95")
    assert manifest.recipe["skip_samples"] == "20,90:95"
    resumed(start_run(tmp_path, *flags, "--skip_samples", "90:94,94,20"))  # the same samples
    with pytest.raises(ConfigError, match="--skip_samples: it would change samples before 81, which the run has read"):
        start_run(tmp_path, *flags)
    with pytest.raises(ConfigError, match=r"--skip_samples: 20,90:95 in the checkpoint and 20 in this run.* --override "
                                          "samples"):
        start_run(tmp_path, *flags, "--skip_samples", "20")
    with pytest.raises(ConfigError, match="besides the recorded 20,90:95, or begin with a checkpoint from before"):
        start_run(tmp_path, *flags, "--skip_samples", "20,40,90:95", "--override", "samples")
    resume = resumed(start_run(tmp_path, *flags, "--skip_samples", "20,81", "--reorder_samples", "100:200",
                               "--override", "samples"))
    assert [row["setting"] for row in resume.plan.overrides] == ["--skip_samples", "--reorder_samples"]
    assert "--override samples: from step 11 on, --skip_samples is 20,81; it was 20,90:95" in resume.plan.notes


def test_a_branch_names_them_by_its_flags_alone(tmp_path: Path, flags: list[str]) -> None:
    _saved(tmp_path / "run", *flags)
    words = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json"), "--model", "tiny", "--model_overrides",
             "vocab_size=256", "--train_steps", "50", "--save", str(tmp_path / "branch"), *flags,
             "--resume_from", f"{tmp_path / 'run'}@10"]
    args = parse_arguments([*words, "--skip_samples", "80:84"])
    resume = resumed(check_start(args, world_size=1, device=cpu_device()))
    assert resume.plan.read_order.ids([79, 80, 81]).tolist() == [79, 84, 85]
    assert [(row["name"], row["to"]) for row in resume.plan.overrides] == [("samples", "80:84")]
    with pytest.raises(ConfigError, match="it would change samples before 80, which the run has read or left out"):
        check_start(parse_arguments([*words, "--reorder_samples", "79:84"]), world_size=1, device=cpu_device())
