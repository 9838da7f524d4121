"""Datasets of the Hugging Face Hub as inputs: the flags --dataset, --dataset_config ..."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "hub_datasets", "Prepares datasets of the Hugging Face Hub, and folders in its format.",
    extends=dict.fromkeys(("prepare", "tokenizer"), "flags:add_flags"), datasets={"--dataset": "flags:named_dataset"})
