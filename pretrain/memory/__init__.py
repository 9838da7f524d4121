"""Memory of a layout: estimated by formulas, simulated with an engine on tensors without data, or measured in a run.

Imports cli, config, data, distributed, engine, model, monitor, paths and errors; never checkpoint/ or the
trainer.
"""
