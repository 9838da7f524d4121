"""A run without --compile_blocks does not import torch's compiler."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.launch import ROOT
from tests.test_train import _environment, _flags

CODE = """
import json, sys
from pretrain.train import main
code = main(sys.argv[1:])
print(json.dumps([code, [name for name in ("torch._dynamo", "torch._inductor.compile_fx") if name in sys.modules]]))
"""


def test_training_imports_no_compiler(corpus: str, tmp_path: Path) -> None:
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=ROOT / "ds_configs" / "zero1_bf16.json")
    done = subprocess.run([sys.executable, "-c", CODE, *flags], env={**_environment(), "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
