"""Command lines of the subcommand, and files that it reads: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import NAME, NO_FOLDER, UNREADABLE

TOOLS = {"generate": ["{world}/done"]}
LEGAL = {"any text is valid, also of `generate`": (
    "generate --prompt=", "generate --prompt=~/x", "generate --stop=~/x", "generate --jsonl_key=~/x")}
PATHS = [(("generate",), "PATH REST", NO_FOLDER, NAME),
         (("generate",), "RIGHT --tokenizer PATH", UNREADABLE, "--tokenizer"),
         (("generate",), "RIGHT --prompt_file PATH", UNREADABLE, NAME)]
_HF = {"broken_hf/config.json": b"{}", "broken_hf/model.safetensors": b""}
_PROMPTS = "{world}/done --prompt_file {world}/%s --jsonl_key=text"
LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    ("generate", "RIGHT --step 7", "--step 7: ", {}),
    ("generate", f"RIGHT --prompt '{'w1 ' * 2000}'", "--prompt: the prompt has 2,000 tokens", {}),
    ("generate", f"RIGHT --prompt=a --prompt '{'w1 ' * 2000}'", "--prompt (number 2)", {}),
    ("generate", "RIGHT --prompt=a --prompt_file={world}/text.txt", "--prompt_file: --prompt is given", {}),
    ("generate", "RIGHT --interactive --prompt=a", "--prompt: it has no effect", {}),
    ("generate", "RIGHT --interactive --json", "--json: it has no effect", {}),
    ("generate", "RIGHT --temperature=0 --num_samples=2", "--num_samples", {}),
    ("generate", "RIGHT --devices=2", "--devices: found 2", {}),
    ("generate", "{world}/broken_hf", "broken_hf: ", {"broken_hf/config.json": b"{}"}),
    ("generate", "{world}/broken_hf", "broken_hf/config.json", {**_HF, "broken_hf/config.json": b"{"}),
    ("generate", "{world}/broken_hf --step=1", "--step", _HF),
    ("generate", "{world}/broken_hf", "--tokenizer {world}/broken_hf", _HF),
    *(("generate", "{world}/done", "run.json", {"done/run.json": text})  # it does not read the steps
      for text in (b"[5]", b"[{}]", b'[{"flags": 5}]', b"[]", b"{}")),
    *(("generate", _PROMPTS % file, file, {file: raw}) for file, raw in (
        ("in.txt", b"\xff\xfe\x00"), ("in.txt", b""), ("in.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"))),
    *(("generate", _PROMPTS % "in.jsonl", "in.jsonl:1", {"in.jsonl": raw}) for raw in (
        b"text", b'{"txt": "a"}', b'{"text": 5}', b'["a"]', b"[" * 10**5, b'{"text": "\\ud800"}', b"9" * 5000))]
STORED = {"generate": ("generate {run}", ("checkpoints/global_step3/manifest.json",))}
