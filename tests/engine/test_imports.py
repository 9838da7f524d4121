"""A run without --compile_blocks imports neither torch's compiler nor transformers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from tests.test_train import _environment, _flags

# Modules that take 0.1 s or more: torch's compiler, packages that DeepSpeed or torch may import with it, transformers.
CODE = """
import json, sys
from pretrain.train import main
code = main(sys.argv[1:])
slow = ("torch._dynamo", "torch._inductor.compile_fx", "torch.onnx", "sympy", "triton", "transformers", "tokenizers",
        "huggingface_hub", "datasets", "pandas", "scipy", "PIL", "IPython")
print(json.dumps([code, [name for name in slow if name in sys.modules]]))
"""


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_training_imports_no_compiler_and_no_transformers(corpus: str, tmp_path: Path, optimizer: str) -> None:
    """On a CPU, Muon is not compiled either."""
    text = (ROOT / "ds_configs" / "zero1_bf16.json").read_text()
    params = '"type": "Muon",\n    "params": { "lr": "auto" }'
    text = text if optimizer == "AdamW" else re.sub(r'"type": "AdamW",\s*"params": \{.*\}', params, text)
    assert f'"{optimizer}"' in text
    (tmp_path / "ds.json").write_text(text)
    flags = _flags(corpus, tmp_path / "run", "--train_steps", "2", config=tmp_path / "ds.json")
    done = subprocess.run([sys.executable, "-c", CODE, *flags], env={**_environment(), "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
