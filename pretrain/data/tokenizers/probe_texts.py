"""Texts with which an export checks that transformers tokenizes as training did."""

ORDINARY = (
    "", "a", " ", "The quick brown fox jumps over the lazy dog.", " leading space", "trailing space ", "two  spaces",
    "   three leading", "a\nb", "\n", "\n\n", "a\n\n\nb\n", "\ta\tb", "a \n b", "a\r\nb\r\n",
    "Hello, world! It's 9:30.",
    "def main() -> None:\n    for i in range(10):\n        print(f'{i:>3}')\n",
    "#include <stdio.h>\nint main(void) {\n\treturn 0; // done\n}\n", '{"key": [1, 2.5e-3, null], "b": "\\n"}',
    "<p class=\"x\">1 &lt; 2</p>", "https://example.org/a_b?c=d&e=%20#f", "x = 12345678901234567890 + 3.14159",
    "naïve café, Ünïcödé, straße, señor, œuvre, ţară, Żółć", "Привет, мир! Съешь ещё этих мягких булок.",
    "Καλημέρα κόσμε", "你好,世界。這是一個測試。", "こんにちは世界。カタカナ", "안녕하세요 세계",
    "مرحبا بالعالم", "שלום עולם",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "Xin chào thế giới", "Hello 👋 world 🎉", "½ + ¼ = ¾, x² → ∞, “quotes” — dash …",
    "ALL CAPS and CamelCase and snake_case", "I'm you're we've they'll he'd", "a,b;c:d.e!f?g(h)i[j]k{l}m",
)  # fmt: skip

RARE = (
    "  a  b  ", "\t\t", "\x0b\x0c", "a\x00b", "\x7f\x80\x9f", "\u2581", " \u2581a\u2581 ", "\u00a0a\u3000b", "\ufeffa",
    "\ufffd", "\ufffe\uffff", "\u200b\u200d\u2060", "\U0010ffff\ue000", "e\u0301 a\u0308\u0323", "\u304b\u3099",
    "\u1112\u1161\u11ab", "\ufb01\u0301", "\u212b\u0301", "\ufb2a\u05b0", "①②㎏ﬁﬂ",
    "\uff46\uff55\uff4c\uff4c\u3000\uff11",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽", "<s></s><unk><pad>", "<|endoftext|>", "a<|endoftext|>b", "<0x41><0x0A>",
    *(character * count for character in " a0-=\n#" for count in (3, 7, 16, 61)), "=== === ====  =\n" * 3,
    "0101010010001000" * 4, "abababa aaaa abab" * 3,
)  # fmt: skip
