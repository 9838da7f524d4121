"""Which tests a change needs."""

import pytest

from tests.lanes import ALWAYS, FOR_ALL, PAGES, changed_files, lane_of
from tests.support.launch import ROOT


@pytest.mark.parametrize("changed", [None, [], ["pretrain/callback.py"], ["pretrain/pages/data.md", "pyproject.toml"]])
def test_all_tests_run_where_the_change_or_its_reach_is_unknown(changed: list[str] | None) -> None:
    lane, arguments = lane_of(changed)
    assert lane.startswith("all tests:")
    assert arguments == []


def test_a_change_of_an_extension_runs_its_tests_and_what_must_always_hold() -> None:
    name = next(ROOT.glob("pretrain/extensions/*/extension.py")).parent.name
    lane, arguments = lane_of([f"pretrain/extensions/{name}/extension.py", f"tests/extensions/{name}/test_new.py",
                               "pretrain/pages/data.md"])
    assert name in lane
    assert set(arguments) == {*ALWAYS, *PAGES, f"tests/extensions/{name}"}


def test_a_change_of_the_core_leaves_out_extensions_that_do_not_import_it() -> None:
    _, arguments = lane_of(["pretrain/monitor/curve.py"])
    left_out = {argument.rpartition("/")[2] for argument in arguments}
    users = {path.parents[0].name for path in ROOT.glob("pretrain/extensions/*/*.py")
             if "from pretrain.monitor.curve import" in path.read_text()}
    assert users
    assert left_out
    assert not left_out & users
    assert all(argument.startswith("--ignore=tests/extensions/") for argument in arguments)


def test_the_files_and_folders_that_the_lanes_name_exist() -> None:
    assert [name for name in (*ALWAYS, *PAGES, *FOR_ALL) if not (ROOT / name).exists()] == []
    assert changed_files() is None or isinstance(changed_files(), list)
