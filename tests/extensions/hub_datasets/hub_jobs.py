"""A program that prepares data as jobs from its standard input ask, each in a process of its own that may kill itself.

The processes are forked after all imports, with the HF_ENDPOINT and HF_HOME of this program.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class Jobs:
    """The running program."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, source: str, out: Path | str, *, kill_in: int | None = None, kill_in_parts: bool = False,
            **options: Any) -> str:
        """Prepare a dataset. Return "" after it was finished, "killed", or the error.

        kill_in: number of the data file in which the process is killed; kill_in_parts: only within a long value.
        options: env (a dict), overwrite, skip_errors, shard, and others of DatasetName and ReadSettings.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"name": source, "out": str(out), "kill_in": kill_in, "kill_in_parts": kill_in_parts, **options}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return str(json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def hub_jobs(endpoint: str, home: Path) -> Iterator[Jobs]:
    """Start the program."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("HF_") and "proxy" not in name.lower()}
    environment = {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.extensions.hub_datasets.hub_jobs"]
    with subprocess.Popen(program, env=environment, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        yield Jobs(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import pretrain.data.prepare.prepare  # noqa: F401
    import pretrain.data.text_inputs.reader as reader

    reader.CHUNK_BYTES = 1 << 16  # several batches of each file
    for line in sys.stdin:
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiver)
            try:
                os.write(sender, _prepare(**json.loads(line)).encode())
            except BaseException as error:
                os.write(sender, repr(error).encode())
            os._exit(0)
        os.close(sender)
        with open(receiver, encoding="utf-8") as file:
            result = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps("killed" if status == -signal.SIGKILL else result), flush=True)


def _prepare(name: str, out: str, kill_in: int | None, kill_in_parts: bool, env: dict[str, str] | None = None,
             jsonl_key: str = "text", skip_errors: bool = False, overwrite: bool = False,
             shard: tuple[int, int] | None = None, **words: str) -> str:
    import pretrain.data.prepare.partial_output as partial_output
    from pretrain.data.prepare.prepare import PrepareSettings, prepare
    from pretrain.data.prepare.shards import Shard
    from pretrain.data.text_inputs.chunk import ReadSettings
    from pretrain.errors import ConfigError
    from pretrain.extensions.hub_datasets.hub_dataset import DatasetName

    os.environ.update(env or {})
    partial_output._LARGEST_COST = float("inf")
    save = partial_output.PartialOutput.save

    def save_and_die(output: partial_output.PartialOutput, state: dict[str, Any]) -> None:
        save(output, state)
        if kill_in is not None and state.get("input") == kill_in and state["position"][0] and (
                state["position"][2] or not kill_in_parts):
            os.kill(os.getpid(), signal.SIGKILL)

    partial_output.PartialOutput.save = save_and_die  # type: ignore[method-assign]
    settings = PrepareSettings(ReadSettings(jsonl_key=jsonl_key, skip_errors=skip_errors))
    try:
        prepare(DatasetName(name, **words), tokenizer="bytes", out=out, settings=settings, workers=1,
                overwrite=overwrite, seconds_between_states=0, shard=Shard(*shard) if shard else None)
    except ConfigError as error:
        return str(error)
    assert "torch" not in sys.modules
    return ""


if __name__ == "__main__":
    main()
