"""Layers of the model: blocks, embeddings and head."""
