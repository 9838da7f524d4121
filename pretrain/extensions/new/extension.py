"""Writes the settings of a run on one's own data: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "new", "Writes the YAML and the DeepSpeed JSON of a run on your own data, and lists the next commands.",
    commands={"new": Command("run", "write settings for your own data, and list the next commands", ".main")},
    advice={"no run": "`ds-pretrain new run.yaml` writes this file",
            "prepared": "ds-pretrain new run.yaml --data {out}",
            "model of a size": "`ds-pretrain new run.yaml --model {model}` writes the settings of a Llama with this "
                               "number of parameters"})
