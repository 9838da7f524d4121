"""Profiles of steps, and timelines of pipelines."""
