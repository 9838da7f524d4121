"""Memory of one rank in closed form: model states, activations and the phases of a step, without importing torch.

Imports config, model, errors and memory's footprint, sizes and hardware; never the other folders of memory/.
"""
