"""Measurements: this project beside what people would use instead, and beside what the machine can do."""
