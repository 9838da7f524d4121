"""Samples of a fixed length from token files: orders, splits, blends and packing, each a pure function of an index."""
