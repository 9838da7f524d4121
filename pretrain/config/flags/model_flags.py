"""Flags of the model, its initial weights and its data."""

from dataclasses import dataclass
from typing import ClassVar

from pretrain.config.flags.flag import flag


@dataclass(frozen=True)
class ModelArguments:
    title: ClassVar[str] = "model and run folder"

    deepspeed_config: str = flag("", "DeepSpeed JSON file; comments and \"auto\" values are allowed", metavar="FILE",
                                 unset="required")
    model: str = flag("", "preset such as gpt2, a transformers config.json, a folder that holds one, or a repository "
                          "of the Hub (org/name)", metavar="NAME",
                      unset="without --init_from: required")
    model_overrides: str | None = flag(None, "changes to the config.json, under its own keys: "
                                             "n_layer=4,vocab_size=8000", metavar="CHANGES")
    init_from: str | None = flag(None, "start at step 0 from these weights: a transformers folder with safetensors, a "
                                       "repository of the Hub (org/name), a run folder or a global_stepN folder",
                                 metavar="SOURCE", unset="random weights")
    save: str = flag("", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl", metavar="RUN",
                     unset="required")


@dataclass(frozen=True)
class DataArguments:
    title: ClassVar[str] = "data"

    train_data: list[str] | str = flag(  # noqa: RUF009
        "", "prefix of the .bin/.idx pair to train on; several prefixes are blended: WEIGHT PREFIX WEIGHT PREFIX ..., "
        "or prefixes alone, in proportion to their tokens", metavar="PREFIX", unset="required")
    valid_data: list[str] | None = flag(  # noqa: RUF009
        None, "prefix of a separate validation pair; several sets, [NAME=]PREFIX ..., are evaluated and logged by name",
        metavar="PREFIX", unset="a part of --train_data, as --split says")
    test_data: list[str] | None = flag(  # noqa: RUF009
        None, "the same for test pairs, evaluated once at the end", metavar="PREFIX",
        unset="a part of --train_data, as --split says")
    blend_schedule: list[str] | None = flag(  # noqa: RUF009
        None, "other weights of a blend from numbers of consumed tokens on, such as 0:0.9,0.1 10e9:0.5,0.5",
        metavar="FROM_TOKENS:W1,W2,...")
    split: str = flag("969,30,1", "proportions of train, valid and test documents in --train_data",
                      metavar="TRAIN,VALID,TEST")
    sample_order: str = flag("shuffled", "order of the samples: shuffled, or that of megatron or neox, to continue a "
                                         "run of Megatron-LM or GPT-NeoX", metavar="NAME")
    packing: str = flag("none", "none: documents follow one another without padding; best_fit: only documents that "
                                "are longer than a sample are divided, and the others are packed with little padding",
                        metavar="NAME")
    first_sample: int = flag(0, "sample with which a run begins at step 0: the number of samples that it consumed "
                                "before it was moved here")
    order_samples: int | None = flag(None, "total number of samples for which Megatron-LM or GPT-NeoX made the order; "
                                           "only with --sample_order megatron or neox",
                                     unset="--first_sample and the samples of --train_steps")
    tokenizer: str | None = flag(None, "SentencePiece .model file, a folder with it or with tokenizer.json, a "
                                       "repository (org/name), a preset's name such as gpt2, or the word bytes; "
                                       "checked against data and model, and used by tools/generate.py",
                                 metavar="PATH")
    seq_length: int = flag(1024, "tokens in a sample")
    seq_length_schedule: str | None = flag(None, "begin with shorter sequences: 0:256,1e9:512,4e9:1024 means 256 "
                                                 "tokens from the start, 512 after 1e9 tokens, ...; a sample is "
                                                 "divided, so that no token is lost", metavar="TOKENS:LENGTH,...",
                                           unset="always --seq_length")
    eod_mask_loss: bool = flag(False, "ignore the prediction that follows an end-of-document token in the loss")
    document_attention: bool = flag(False, "attention sees only the tokens of the same document, and positions begin "
                                           "at 0 with each document, also when a sample contains several documents")


@dataclass(frozen=True)
class InitArguments:
    title: ClassVar[str] = "initial weights and dropout"
    description: ClassVar[str] = "Settings of the training only: an exported config.json does not change."

    init_method: str = flag("config", "initial values of matrices: config (as the config.json says), normal, "
                                      "scaled_normal, small_init, wang_init, xavier_normal or xavier_uniform",
                            metavar="NAME")
    output_init_method: str = flag("config", "the same for the projections into the residual stream", metavar="NAME")
    init_std: float | None = flag(None, "standard deviation of config, normal and scaled_normal",
                                  unset="initializer_range of the config.json")
    mup_base_width: int | None = flag(None, "muP: hidden size of the smaller model whose learning rate and "
                                            "standard deviation were tuned", unset="without muP")
    embedding_dropout: float | None = flag(None, "dropout of the embeddings", unset="that of the config.json")
    attention_dropout: float | None = flag(None, "dropout of the attention probabilities",
                                           unset="that of the config.json")
    residual_dropout: float | None = flag(None, "dropout of the outputs of attention and MLP",
                                          unset="that of the config.json")
