"""What docstrings and comments name exists: files, folders and modules of this project, functions, classes, members.

Code of other programs, which comments name too, is in `_FILES_OF_OTHERS` and `_NAMES_OF_OTHERS` where a name without
a folder, or with a folder that this project has as well, does not show whose it is.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.launch import ROOT

# a file with or without folders, or a folder; no URL, and no pattern such as {name}.py or *.py
_PATH = re.compile(r"(?<![\w./~{}*<>$:-])"
                   r"((?:[\w-]+/)*[\w-]+\.(?:py|md|ya?ml|toml|sh)|(?:[\w-]+/)+)(?![\w*{}<>/-]|\.\w)")
_CODE = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`")
_MODULE = re.compile(r"(?<![\w./])((?:pretrain|tests|tools)(?:\.[A-Za-z_]\w*)+)")
_STANDS_FOR_ANY = re.compile(r"[A-Z]{2}|\bW/")  # NAME.py, stepFIRST-LAST/

_FILES_OF_OTHERS = """
    configs/ installed/ models/ runs/ swap_tensor/ train_configs/ zero/ pretrain/shipped_files/
    bf16_optimizer.py builder.py lr_schedules.py monitor/csv_monitor.py monitor/monitor.py optimizer_utils.py
    partition_parameters.py partitioned_param_coordinator.py stage3.py stage_1_and_2.py utils.py version.py
    activations.py configuration_qwen2_moe.py configuration_utils.py conversion_mapping.py optimization.py run_clm.py
    tokenization_qwen.py enum.py filesystem.py json.py
    alibi.py convert_bloom_original_checkpoint_to_pytorch.py fused_bias_gelu.py gpt2_dataset.py gpt_dataset.py loss.py
    pretrain_gpt.py tools/ckpts/convert_neox_to_hf.py tools/hf2megads_weight_converter.py training.py pythia-70m.yml
"""
_FOLDERS_OF_OTHERS = ("deepspeed", "megatron")  # names of packages, and folders of the code that reads their files
_NAMES_OF_OTHERS = """
    OpBuilder.jit_load PipelineEngine._exec_reduce_tied_grads __avg_scatter_grads _constant_buffered_norm2
    _create_zero_param_parallel_group _hp_mapping _load_checkpoint _muon_pending_momentum _partition_param
    deepspeed_load_checkpoint initialize_optimizer_states set_norm_for_param_grad_in_gpu
    Encoding.encode_to_numpy encode_ordinary_batch faulthandler.dump_traceback_later sentencepiece_model_pb2 warn_only
"""


@cache
def _files() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    return tuple(name for name in listed if (ROOT / name).is_file())


@cache
def _sources() -> dict[str, tuple[str, ast.Module]]:
    """Return the text and the syntax tree of each Python file, by its path."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in _files() if name.endswith(".py")}
    return {name: (text, ast.parse(text)) for name, text in texts.items()}


@cache
def _paths() -> frozenset[str]:
    """Return the files, and the folders with a slash at the end, each with all, some or none of its outer folders."""
    found = set()
    for path in map(Path, _files()):
        for each, end in ((path, ""), *((folder, "/") for folder in path.parents)):
            found |= {"/".join(each.parts[start:]) + end for start in range(len(each.parts))}
    return frozenset(found)


@cache
def _texts() -> tuple[tuple[str, str], ...]:
    """Return (file and line, text) of each docstring and comment that may name something."""
    found = []
    for name, (text, tree) in _sources().items():
        for node in ast.walk(tree):
            value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(value, str):
                found.append((f"{name}:{node.lineno}", value))
        comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
        if any(pattern.search(line) for line in comments for pattern in (_PATH, _CODE, _MODULE)):
            found += [(f"{name}:{token.start[0]}", token.string)
                      for token in tokenize.generate_tokens(io.StringIO(text).readline)
                      if token.type == tokenize.COMMENT]
    return tuple(found)


def _named(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield (file and line, name) for each match."""
    return ((where, match[1]) for where, text in _texts() for match in pattern.finditer(text))


def _words(tree: ast.AST) -> set[str]:
    """Return the names in code: definitions, variables, attributes, arguments, imports, and words of short strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value.rpartition(".")[2])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            found.update(re.findall(r"\w+", node.value))
    return found


def _members() -> dict[str, set[str]]:
    """Return the names in each class that inherits from no other."""
    classes = [node for _, tree in _sources().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    inherit = {each.name for each in classes if each.bases}
    found: dict[str, set[str]] = defaultdict(set)
    for each in classes:
        if each.name not in inherit:
            found[each.name] |= _words(each)
    return found


def test_files_and_folders_that_texts_name_exist() -> None:
    folders = {path.rstrip("/") for path in _paths() if path.endswith("/")}

    def is_of_others(path: str) -> bool:
        first, slash, rest = path.partition("/")
        return (path in _FILES_OF_OTHERS.split() or first in _FOLDERS_OF_OTHERS
                or bool(slash and rest and first not in folders) or bool(_STANDS_FOR_ANY.search(path)))

    missing = [f"{where}: {path}" for where, path in _named(_PATH) if path not in _paths() and not is_of_others(path)]
    assert missing == []


def test_modules_that_texts_name_exist() -> None:
    def exists(name: str) -> bool:
        path = name.replace(".", "/")
        module = f"{path.rpartition('/')[0]}.py"
        return bool({name, f"{path}.py", f"{path}/"} & _paths()) or (
            module in _sources() and path.rpartition("/")[2] in _words(_sources()[module][1]))

    assert [f"{where}: {name}" for where, name in _named(_MODULE) if not exists(name)] == []


def test_functions_and_classes_that_texts_name_in_backquotes_exist() -> None:
    """A member of a class must be in that class; any other name must be used in the code, or be a module or folder."""
    used = {word for _, tree in _sources().values() for word in _words(tree)} | {Path(name).stem for name in _files()}
    members = _members()

    def exists(name: str) -> bool:
        *outer, last = name.split(".")
        if outer and outer[-1] in members:
            return last in members[outer[-1]]
        return last in used or name in _paths() or f"{name}/" in _paths()

    missing = [f"{where}: {name}" for where, name in _named(_CODE) if not exists(name)]
    assert [line for line in missing if line.rpartition(" ")[2] not in _NAMES_OF_OTHERS.split()] == []
