"""Flags of a foreign run.json that name commands and addresses: see tests/foreign_files/commands.py."""

PLACES = ("notify_command", "metrics_address")
