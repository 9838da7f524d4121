"""Long JSON lines are read in parts with the same result as json.loads, and in little memory."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.text_inputs import json_lines
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import Skipped
from pretrain.data.text_inputs.json_lines import LongLine, text_of_json_line, text_parts
from pretrain.errors import ConfigError
from tests.data.text_inputs.reading import read_texts, write

MANY = settings(max_examples=300, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
STRINGS = st.text(st.sampled_from('ab "\\\n\t/é中😀\x7f\x01'), max_size=40)
# without subnormal numbers: libraries that are compiled with -ffast-math let the processor round them to 0
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | STRINGS,
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=3),
                      max_leaves=12)


def read_in_parts(line: bytes, *, block: int, key: str = "text") -> str:
    """Return the text of a line that arrives in blocks of `block` bytes."""
    blocks = iter([line[at : at + block] for at in range(0, len(line), block)] + [b"\nnext"])
    whole = LongLine(next(blocks), lambda: next(blocks, b""), "a:1")
    text = "".join(text_parts(whole, key))
    assert whole.skip_to_end() == b"next"
    assert whole.size == len(line) + 1
    return text


@MANY
@given(values=st.dictionaries(STRINGS, VALUES, max_size=3), text=STRINGS, ascii=st.booleans(), part=st.integers(12, 60),
       block=st.integers(1, 60), indent=st.sampled_from(["", " ", "\t "]))
def test_any_object_gives_the_text_that_json_loads_gives(values: dict[str, object], text: str, ascii: bool, part: int,
                                                         block: int, indent: str) -> None:
    values = {**values, "text": text, "z": [values]}
    separators = (f"{indent},{indent}", f"{indent}:{indent}")
    line = json.dumps(values, ensure_ascii=ascii, separators=separators).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "PART_BYTES", part)
        assert read_in_parts(line, block=block) == text_of_json_line(line, "a:1", "text") == text


@MANY
@given(line=st.binary(max_size=60) | st.text(st.sampled_from('{}[]:,"\\u0dE8n1-. text😀'), max_size=40).map(str.encode)
       | st.from_regex(rb'\{"text": ?"(\\u[dD][0-9a-f]{3}|\\[nt"\\x]|[a-z "])*"(, ?"b": [0-9.e+\-]{1,4})?[},]',
                       fullmatch=True),
       part=st.integers(12, 30), block=st.integers(1, 30))
def test_any_line_is_rejected_where_json_loads_rejects_it(line: bytes, part: int, block: int) -> None:
    line = line.replace(b"\n", b" ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "PART_BYTES", part)
        try:
            expected = text_of_json_line(line, "a:1", "text")
        except ConfigError:
            with pytest.raises(ConfigError, match=r"^a:1: "):
                read_in_parts(line, block=block)
        else:
            if line.count(b'"text"') < 2:
                assert read_in_parts(line, block=block) == expected


@pytest.mark.parametrize(("line", "problem"), [
    ('{"text": "a b', "it is not valid JSON: Unterminated string at byte 11 of the line"),
    ('{"text": "a"} x', "Extra data at byte 15"),
    ('{"text": "a" "b": 1}', "Expecting ',' delimiter at byte 14"),
    ('{"text": "a", }', "Expecting property name enclosed in double quotes at byte 15"),
    ('{"text": "a\\q"}', "Invalid \\escape at byte 12"),
    ('{"text": "a\tb"}', "Invalid control character at byte 12"),
    ('{"text": nul}', "Expecting value at byte 10"),
    ('{"a": [1, 2, x], "text": ""}', "Expecting value at byte 14"),
    ('{"text": "a", "text": "b"}', "A second text at the key at byte 23"),
    ('{"text": "\\ud83d x"}', "a:1: there is a lone surrogate U+D83D"),
    ('{"text": null, "b": 1}', "the value of 'text' is null. Correct or remove this line, or name the key"),
    ('{"txet": "a"}', "the JSON object has no key 'text'. Did you mean \"txet\"?"),
    ('["text"]', "found another value; expected one JSON object per line"),
    ('{"a": ' + "[" * 600, "More than 500 levels"),
    ('{"' + "k" * 100_000 + '": 1}', "Key is too long"),
])  # fmt: skip
def test_messages_name_the_byte(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_in_parts(line.encode(), block=1000)


def test_a_nested_key_and_a_key_with_a_dot() -> None:
    nested = b'{"meta": {"text": "inner", "more": [{"text": 1}]}, "text": "outer"}'
    assert read_in_parts(nested, block=7, key="meta.text") == "inner"
    both = b'{"meta.text": "plain", "meta": {"text": "inner"}}'
    for line in (nested, both):
        assert read_in_parts(line, block=7, key="meta.text") == text_of_json_line(line, "a:1", "meta.text")


def test_a_bad_long_line_is_one_skipped_document(tmp_path: Path) -> None:
    long = b'{"text": "' + b"words " * 100
    path = write(tmp_path / "a.jsonl", b'{"text": "1"}\n' + long + b'\xff"}\n' + long + b'"} {\n{"text": "4"}\n')
    found = read_texts(path, ReadSettings(skip_errors=True), chunk_bytes=8, long_bytes=32)
    assert (found[0], found[3]) == ("1", "4")
    assert [one.where for one in found[1:3] if isinstance(one, Skipped)] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(ConfigError, match="0xFF is not valid UTF-8 at byte 611 of the line"):
        read_texts(path, chunk_bytes=8, long_bytes=32)


READ = r"""
import re, sys
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import read_pieces
from pretrain.data.text_inputs.find import find_inputs
settings = ReadSettings()
found = find_inputs(sys.argv[1:], settings).files
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
before = peak()
size = sum(len(piece.text) for piece in read_pieces(found, settings))
print(size, peak() - before)
"""


@pytest.mark.parametrize("kind", ["spaces", "escapes", "numbers", "text"])
def test_a_line_of_30_mb_takes_little_memory(tmp_path: Path, kind: str) -> None:
    """json.loads takes more than 1 GB for a line of 30 MB with a list of numbers."""
    content = {"spaces": b"some words ", "escapes": rb"\u4e2d\u56fd", "numbers": b"0.25, ", "text": b"text "}[kind]
    repeats = 30_000_000 // len(content)
    path = tmp_path / "a"
    with path.open("wb") as file:
        if kind != "text":
            file.write(b'{"list": [' if kind == "numbers" else b'{"text": "')
        for _ in range(100):
            file.write(content * (repeats // 100))
        if kind != "text":
            file.write(b'0], "text": "a"}\n' if kind == "numbers" else b'"}\n')
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    size, peak_kib = map(int, done.stdout.split())
    print(f"{kind}: peak {peak_kib / 1024:.0f} MiB")
    characters = {"numbers": 1, "escapes": 2 * (repeats // 100 * 100)}
    assert size == characters.get(kind, repeats // 100 * 100 * len(content))
    assert peak_kib < 64 * 1024
