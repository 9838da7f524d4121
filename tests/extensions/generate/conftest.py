"""Programs that the tests run in this process."""

import pytest

from tests.extensions.generate.generation import GenerateTool


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> GenerateTool:
    return GenerateTool(capsys, monkeypatch)
