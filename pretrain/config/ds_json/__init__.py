"""DeepSpeed JSON files: reading, legal keys, and keys without an effect."""
