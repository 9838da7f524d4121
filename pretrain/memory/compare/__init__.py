"""Comparison of layouts (`ds-pretrain compare`): candidates, their estimates, the recommended one, tables.

Imports all other folders and modules of memory/, and cli, config, distributed, model, paths and errors.
"""
