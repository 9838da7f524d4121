"""Memory of one rank by formulas: model states, activations and the phases of a step. Imports no torch.

Imports config, model, errors and memory/footprint.py; never the other folders of memory/.
"""
