"""Folder that tools/chaos.py puts on PYTHONPATH of the ranks, so that Python imports hooks/sitecustomize.py."""
