"""`ds-pretrain completion`: prints a script that completes command lines in bash or zsh."""
