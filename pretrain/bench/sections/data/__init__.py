"""Section `--what data`: preparation and reading of training data, next to other implementations."""
