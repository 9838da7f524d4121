"""Translate the settings of another training program into run.yaml, ds_config.json and config.json.

    ds-pretrain translate pythia-70m.yml --output runs/pythia-70m
    ds-pretrain translate --output runs/gpt -- --num-layers 24 --hidden-size 1024 ...
"""

import sys

from pretrain.cli import Parser, path_text, whole_number
from pretrain.extensions.translate.gpt_neox import translate_neox
from pretrain.extensions.translate.megatron import translate_megatron
from pretrain.extensions.translate.output import report, write_files
from pretrain.extensions.translate.read_input import read_settings
from pretrain.extensions.translate.result import MODEL, Result
from pretrain.extensions.translate.settings import Settings
from pretrain.extensions.translate.tables import PROGRAMS
from pretrain.extensions.translate.torchtitan import translate_torchtitan
from pretrain.extensions.translate.trainer import translate_trainer
from pretrain.extensions.translate.verdicts import check_names, complete_rows
from pretrain.model.config import model_config_from
from pretrain.terminal import print_rows

_MOST = 10**15


def main(argv: list[str] | None = None) -> None:
    """Write the files, and print the table. Raises ConfigError."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, others = _divided(words)
    flags = _parser().parse_args(own)
    settings = read_settings(flags.files, others, flags.program)
    result = translate(settings, vocab_size=flags.vocab_size, dataset_tokens=flags.dataset_tokens)
    write_files(settings, result, flags.output, overwrite=flags.overwrite)
    *rows, following = report(settings, result, flags.output)
    print_rows(rows, indent=6)
    print(following)


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first --."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1:]


def _parser() -> Parser:
    parser = Parser(usage="ds-pretrain translate [FILE ...] --output FOLDER [flags] [-- WORDS]", description=(
        "Translate settings of GPT-NeoX (YAML), Megatron-LM and Megatron-DeepSpeed (arguments), transformers.Trainer "
        "(a command line or TrainingArguments as JSON or YAML) or torchtitan (TOML) into run.yaml, ds_config.json and "
        "config.json, and list what became of each setting. WORDS are a command line of the other program."))
    parser.add_argument("files", nargs="*", type=path_text, metavar="FILE",
                        help="YAML, TOML or JSON of the other program, or a shell script with its command line")
    parser.add_argument("--output", type=path_text, required=True, metavar="FOLDER", help="folder to write into")
    parser.add_argument("--from", dest="program", choices=tuple(PROGRAMS),
                        help="the other program (default: recognized by its settings)")
    parser.add_argument("--vocab_size", type=whole_number(1, 2**24), metavar="N",
                        help="tokens of the tokenizer, before padding, where the input does not say it")
    parser.add_argument("--dataset_tokens", type=whole_number(1, _MOST), metavar="N",
                        help="tokens of the training data, for a length in epochs")
    parser.add_argument("--overwrite", action="store_true", help="replace the files in FOLDER")
    return parser


def translate(settings: Settings, *, vocab_size: int | None = None, dataset_tokens: int | None = None) -> Result:
    """Return the translation. Raises ConfigError for unknown settings, and for models that nothing here computes."""
    check_names(settings)
    result = Result()
    if settings.program == "neox":
        translate_neox(settings, result, vocab_size=vocab_size)
    elif settings.program == "megatron":
        translate_megatron(settings, result, vocab_size=vocab_size)
    elif settings.program == "trainer":
        translate_trainer(settings, result, dataset_tokens=dataset_tokens)
    else:
        translate_torchtitan(settings, result)
    complete_rows(settings, result)
    if result.model:
        model_config_from(result.model, MODEL, result.run.get("model_overrides"))
    return result
