"""Examination of machines, and measurements of clusters: two subcommands, and when to use them."""

from pretrain.extension import Command, Extension

_BEFORE = "before a run"

EXTENSION = Extension(
    "health", "Examines machines and hosts, and measures devices, links, clocks and disks of a cluster.",
    commands={"doctor": Command(_BEFORE, "examine this machine or all hosts: versions, GPUs, disks", ".doctor"),
              "check-cluster": Command(_BEFORE, "measure all hosts of a job, and report faults and outliers",
                                       ".check_command", runs_on_ranks=True)},
    advice={"cuda": "`ds-pretrain doctor` examines the driver and the GPUs",
            "device": "`ds-pretrain check-cluster` tests the devices of all hosts",
            "network": "`ds-pretrain check-cluster` measures all links"})
