"""Imports of a run that uses no flag of an extension."""

import json
import subprocess
import sys
from pathlib import Path

from pretrain.active_extensions import BUILT_IN_EXTENSIONS, extensions
from tests.support.cases import config, flags

# on rank 0, after two steps, without the declarations of extensions; this number only goes down
MOST_IMPORTED = 250


def test_a_run_without_flags_of_extensions_imports_their_declarations_only(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    words = [f"--{key}={value}" for key, value in {
        **flags(corpus, layers=1, hidden=32, steps=2), "deepspeed_config": "ds.json", "save": "run",
        "flight_steps": 0}.items()]
    code = ("import sys; from pretrain.train import main; code = main(sys.argv[1:]); "
            "print('MODULES', *(name for name in sys.modules if name.startswith('pretrain')))")
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    imported = done.stdout.split("MODULES")[1].split()
    names = {f"{BUILT_IN_EXTENSIONS}.{each.name}" for each in extensions()}
    declarations = names | {f"{name}.extension" for name in names}
    assert len({*imported} - declarations) <= MOST_IMPORTED
    in_each_run = {each.name for each in extensions() if not each.flags}
    parts = [name.split(".")[2:] for name in imported if name.startswith(f"{BUILT_IN_EXTENSIONS}.")
             and name.split(".")[2] not in in_each_run]
    # the module of a callback that waits for requests is imported, too
    assert {tuple(part[1:]) for part in parts} <= {(), ("extension",), ("receivers",), ("profiler",)}
