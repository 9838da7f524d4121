"""The process that follows a run imports no module of the folder in which it was started."""

from pathlib import Path

from tests.test_child import hostile, modules, train_in  # noqa: F401 (fixtures)


def test_a_run_in_a_hostile_folder_sends_its_messages(hostile: Path, corpus: str, tmp_path: Path) -> None:  # noqa: F811
    train_in(hostile, corpus, tmp_path, notify_command=f"cat >> {tmp_path}/told")
    assert "finished" in (tmp_path / "told").read_text()
