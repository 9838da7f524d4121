"""YAML with any text: it remains a comment or a value, whatever it looks like."""

import random

import pytest
import yaml

from pretrain.config.write_yaml import comment_line, yaml_entry

PARTS = ("a\nnotify_command: x", "a\r\nb: c", "\rx: y", "\x85b: c", "\u2028x: y", "\u2029", "\x0b\x0c", "'", '"', "# x",
         ": ", "- a", "{a: b}", "[x]", "&a", "*a", "!!python/object:os", "|", "> ", "%YAML", "---", "...",
         "\ud800\udcff", "\x00\x1b[31m", "\ufeff", "\ufffe", "", "null", "true", "1e3", "0x1", "~", " lead", "trail ",
         "\ttab", "x" * 3000, "\n", "\n\n a", "é\nb", "a\n...\nb: c")


@pytest.mark.parametrize("lists_on_one_line", [False, True])
def test_any_text_is_read_back(lists_on_one_line: bool) -> None:
    choose = random.Random(0)
    texts = [*PARTS, *("".join(choose.choices(PARTS, k=3)) for _ in range(200))]
    for text in texts:
        for value in (text, [text, "b"]):
            entry = yaml_entry("key", value, lists_on_one_line=lists_on_one_line, remark=text)
            read = yaml.safe_load(comment_line(text) + entry + yaml_entry("last", 1))
            assert read == {"key": value, "last": 1}, repr(text)
