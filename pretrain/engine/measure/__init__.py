"""Measurements inside a training step."""
