"""Flags with two names and with several words, on the command line and in the YAML file; --help."""

import argparse
import re
from pathlib import Path

import pytest

from pretrain.cli import OWNED, Parser, note_old_name
from pretrain.cluster.hosts.preflight import preflight_request
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.flags.parse import parse_arguments
from pretrain.errors import ConfigError
from pretrain.old_names import OLD_NAMES


def test_old_names_are_read_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Each old name in a YAML and on the command line sets the flag of today; other ranks and children are silent."""
    assert not OLD_NAMES.keys() & {*FLAGS, *OLD_NAMES.values()}
    path = tmp_path / "run.yaml"
    path.write_text("exit-at-step: 7\n")
    for silent in ({"RANK": "1"}, {OWNED: "1"}):
        with monkeypatch.context() as patch:
            patch.setenv(*next(iter(silent.items())))
            note_old_name.cache_clear()
            assert parse_arguments(["--config", str(path)]).exit_step == 7
            assert capsys.readouterr().err == ""
    note_old_name.cache_clear()
    assert parse_arguments(["--config", str(path), "--exit-at-step=5"]).exit_step == 5
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.partition("exit-at-step")[0] for line in lines) == [
        f"ds-pretrain: {path}:1: note: ", "ds-pretrain: command line: note: "]
    parser = Parser()
    parser.add_argument("--accept_without")
    assert parser.parse_args(["--accept-loss-of", "rng"]).accept_without == "rng"
    assert "accept-loss-of is called accept_without now" in capsys.readouterr().err
    assert parse_arguments(["--exit_at_step", "6"]).exit_step == 6
    path.write_text("exit_at_step: 7\nexit_step: 8\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: exit_step: the same key is on line 1"):
        parse_arguments(["--config", str(path)])


def test_tokens_can_be_written_with_an_exponent_or_a_unit(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train_tokens: 3e9\nlr_warmup_tokens: 2.5e6\nlr_decay_tokens: 1000\n")
    args = parse_arguments(["--config", str(path), "--lr_wsd_tokens=1e5"])
    assert (args.train_tokens, args.lr_warmup_tokens, args.lr_decay_tokens) == (3 * 10**9, 2_500_000, 1000)
    assert args.lr_wsd_tokens == 100_000
    units = {"2.5B": 2_500_000_000, "1.1b": 1_100_000_000, "300m": 300 * 10**6, "7K": 7000, "0.3T": 3 * 10**11}
    for word, number in units.items():  # exact: 1.1 * 1e9 is no whole number in floating point
        assert parse_arguments([f"--train_tokens={word}"]).train_tokens == number
    for wrong in ("1.5", "1e-3", "1e999", "many", "", "B", "2.5BB", "1.5e-9B", "nanB", "-1B", "1KiB"):
        with pytest.raises(ConfigError, match=r"--train_tokens: found '.*'; expected a whole number of tokens"):
            parse_arguments([f"--train_tokens={wrong}"])


def test_several_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train_data: [0.5, data/a, 1e-1, data/007]\nvalid_data:\n- web=data/c\n- data/d\nsplit: 9,1\n")
    args = parse_arguments(["--config", str(path), "--save", "run"])
    assert args.train_data == ["0.5", "data/a", "1e-1", "data/007"]
    spec = parse_arguments(["--config", str(path), "--train_data", "2", "x", "1", "y"]).data
    assert (spec.train, spec.weights) == (("x", "y"), (2, 1)), "the command line wins"
    assert spec.valid == (("valid/web", "data/c"), ("valid/d", "data/d"))
    path.write_text("train_data: a b\nsave: run\n")
    args = parse_arguments(["--config", str(path)])
    assert args.data.train == ("a b",), "a plain string is one prefix"
    files = preflight_request(args, ["--config", str(path)], tmp_path).files
    assert {str(tmp_path / "a b.bin"), str(tmp_path / "a b.idx")} <= set(files)


def test_a_yaml_whose_paths_begin_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, here = tmp_path / "my base", tmp_path / "here"
    (base / "runs").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    path = base / "runs" / "run.yaml"
    path.write_text("deepspeed_config: runs/ds.json\ntrain_data: data\n")
    words = ["--config", "../my base/runs/run.yaml"]
    assert parse_arguments(words).deepspeed_config == "runs/ds.json", "nowhere: the file is reported later"
    (base / "data.idx").touch()
    with pytest.raises(ConfigError, match=r"--train_data: .* data.idx exists only in (.*)\. .*: cd '\1'\.$"):
        parse_arguments(words)
    (base / "runs" / "ds.json").touch()
    with pytest.raises(ConfigError, match=r"--deepspeed_config: .* runs/ds.json exists only in .*/my base\."):
        parse_arguments(words)
    assert parse_arguments([*words, "--deepspeed_config", "zero2_bf16", "--train_data=other"]).train_data == ["other"]
    (here / "runs").mkdir()
    for name in ("runs/ds.json", "data.idx"):
        (here / name).touch()
    assert parse_arguments(words).train_data == ["data"]


def test_json_as_yaml_names_the_flag_of_the_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for text in ('{"zero_optimization": {"stage": 2}}', '{"steps_per_print": 3}', '{// comment\n"bf16": {}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="A DeepSpeed JSON is the value of --deepspeed_config"):
            parse_arguments(["--config", str(path)])


@pytest.mark.parametrize(("text", "message"), [
    ("train_data: []", "train_data: found an empty list"),
    ("train_data: [a, [b]]", "train_data: found a list in the list"),
    ("train_data: {a: 1}", "train_data: found a mapping"),
    ("train_data: [a, --seed]", "train_data: found --seed"),
    ("seed: [1]", "seed: found a list; expected a single value"),
])
def test_wrong_lists_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"run.yaml:1: {message}"):
        parse_arguments(["--config", str(path)])


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_a_group_with_its_default(page: str) -> None:
    sections = dict(re.findall(r"^(\S.*):\n\n?((?:  .*\n|\n)*)", page, re.MULTILINE))
    assert list(sections) == ["help", *dict.fromkeys(flag.group.title for flag in FLAGS.values())]
    entries = re.findall(r"^  --(\w+)((?:.*\n)(?:   .*\n)*)", page, re.MULTILINE)
    names = [name for name, _ in entries if name not in ("help", "config")]
    hidden = [name for name, flag in FLAGS.items() if flag.help == argparse.SUPPRESS]
    assert "local_rank" in hidden  # DeepSpeed's launcher sets it
    titles = list(sections)[1:]  # flags of extensions follow in FLAGS, and stand in the sections that they name
    shown = [name for name in FLAGS if name not in hidden]
    assert names == sorted(shown, key=lambda name: titles.index(FLAGS[name].group.title))
    for name, text in entries[1:]:
        assert re.search(r"\((default: .+|required|.+: required)\)$", " ".join(text.split())), (name, text)


def test_help_fits_80_columns(page: str) -> None:
    assert max(map(len, page.splitlines())) <= 80


def test_of_several_files_the_later_one_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("save: a\nseed: 1\nmodel_overrides: {n_layer: 4, vocab_size: 8000}\ntrain_data: [x, y]\n")
    second.write_text("seed: 2\ntrain_data: z\n")
    args = parse_arguments(["--config", str(first), "--config", str(second), "--save", "b"], from_here=False)
    assert (args.save, args.seed, args.train_data, args.model_overrides) == ("b", 2, ["z"], "n_layer=4,vocab_size=8000")


@pytest.mark.parametrize("text", ["{n_layer: [1]}", "{a: 1, a: 2}", "{a: 'x,y'}"])
def test_a_wrong_mapping_of_overrides_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"seed: 1\nmodel_overrides: {text}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: model_overrides: found a nested value, a comma, or the same"):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])


def test_a_yaml_without_its_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(["run.yaml", "--seed", "1"])
    assert str(error.value) == "command line: 'run.yaml' is not the value of any flag. The settings of a run " \
        "have a flag: --config run.yaml."
