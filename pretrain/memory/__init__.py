"""Memory of a layout: estimated by formulas, compared with other layouts, and measured in a step of a run.

Imports cli, config, data, distributed, engine, model, paths and errors; never checkpoint/ or the trainer.
"""
