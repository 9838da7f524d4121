"""A run that compiles nothing does not import torch's compiler."""

import json
import subprocess
import sys
from pathlib import Path

from tests.distributed.launch import ROOT
from tests.test_train import _environment, _flags

CODE = """
import json, sys
from pretrain.train import main
code = main(sys.argv[1:])
from deepspeed.runtime.zero.muon import original_muon
names = [name for name in ("torch._dynamo", "torch._inductor.compile_fx") if name in sys.modules]
print(json.dumps([code, names, hasattr(original_muon.zeropower_via_newtonschulz5, "__wrapped__")]))
"""


def test_training_imports_no_compiler(corpus: str, tmp_path: Path) -> None:
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=ROOT / "ds_configs" / "zero1_bf16.json")
    done = subprocess.run([sys.executable, "-c", CODE, *flags], env={**_environment(), "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    code, compiler, waits = json.loads(done.stdout.splitlines()[-1])
    assert (code, compiler, waits) == (0, [], True)
