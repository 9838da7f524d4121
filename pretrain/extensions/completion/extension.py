"""Completion of command lines in bash and zsh: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "completion", "Prints a script with which bash or zsh completes subcommands, flags and values.",
    commands={"completion": Command("files and machine", "print a script that completes command lines in bash or zsh",
                                    ".main")})
