"""Samples of a fixed length from token files: orders, blends and packing, each a pure function of an index."""
