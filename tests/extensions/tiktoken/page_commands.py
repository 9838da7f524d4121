"""Commands of the page that tests/test_quickstart.py does not run, and why."""

NOT_RUN_BECAUSE = {
    "needs the network; tests/extensions/tiktoken/test_tiktoken.py prepares with a file": (
        "ds-pretrain prepare runs/quickstart/corpus/valid.jsonl --tokenizer o200k_base --out data/o200k",),
    "takes minutes: tests/extensions/tiktoken/test_measure_encoding.py": (
        "python -m tests.extensions.tiktoken.measure_encoding tinyshakespeare.txt tutor.ja.utf-8 tutor.ru.utf-8",),
}
