"""Instruments for the developers of this package, which need a checkout, and programs for users of a checkout."""
