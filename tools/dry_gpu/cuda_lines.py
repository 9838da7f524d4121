"""List the statements of pretrain/ that only CUDA executes, and that no run of dry-gpu has reached.

    DRY_GPU_LINES=FOLDER pytest -m slow tests/dry_gpu; python tools/dry_gpu/cuda_lines.py FOLDER

site/sitecustomize.py records the lines of each process in a file of FOLDER. A statement counts if it names torch.cuda,
NVIDIA's tools, pinned memory or the device "cuda", or stands in a branch that such a condition decides.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(r"torch\.cuda\b|nvcc|nvidia|nvml|open_gpu|version\.(cuda|hip)|pin_memory")
ON_CUDA = re.compile(r"[=]= 'cuda'|[!]= 'cpu'|cuda\.is_available|if not on_cpu")
ON_CPU = re.compile(r"[!]= 'cuda'|[=]= 'cpu'|not torch\.cuda\.is|not has_nvcc")
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


def header(node: ast.stmt) -> str:
    """Return the source of a statement without the statements in it, and without texts; "" for a docstring."""
    copy = ast.parse(ast.unparse(node)).body[0]
    for name in BLOCKS:
        if hasattr(copy, name):
            setattr(copy, name, [ast.Pass()] if name == "body" else [])
    for each in ast.walk(copy):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value not in ("cpu", "cuda"):
            each.value = ""
    return "" if isinstance(copy, ast.Expr) and isinstance(copy.value, ast.Constant) else ast.unparse(copy)


def statements(block: list[ast.stmt], only_cuda: bool) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements of a block that only CUDA executes, with their headers."""
    for node in block:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from statements(node.body, only_cuda=False)
            continue
        text = header(node)
        if text and (only_cuda or WORDS.search(text)) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, text
        for name in BLOCKS:
            parts = getattr(node, name, [])
            if name in ("handlers", "cases"):
                parts = [each for part in parts for each in part.body]
            branch = ON_CUDA if name == "body" else ON_CPU
            yield from statements(parts, only_cuda or (isinstance(node, ast.If) and bool(branch.search(text))))
        if isinstance(node, ast.If) and ON_CPU.search(text) and isinstance(node.body[-1], (ast.Return, ast.Raise)):
            only_cuda = True  # the rest of this block


def lines_of(node: ast.stmt) -> range:
    """Return the lines of a statement before the statements in it."""
    inner = [part.lineno for block in BLOCKS for part in getattr(node, block, []) if hasattr(part, "lineno")]
    return range(node.lineno, max(min([*inner, (node.end_lineno or node.lineno) + 1]), node.lineno + 1))


def main() -> None:
    """Print the statements that no recorded line belongs to, and the number of the others."""
    reached = {line for file in Path(sys.argv[1]).iterdir() for line in file.read_text().splitlines()}
    total, missed = 0, []
    for path in sorted((ROOT / "pretrain").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node, text in statements(ast.parse(path.read_text()).body, only_cuda=False):
            total += 1
            if not any(f"{name}:{line}" in reached for line in lines_of(node)):
                missed.append(f"  {name}:{node.lineno} {text.splitlines()[0][:90]}")
    print(f"{total - len(missed)} of {total} statements that only CUDA executes were reached; the others:", *missed,
          sep="\n")


if __name__ == "__main__":
    main()
