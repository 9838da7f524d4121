"""Memory of a layout: estimated in closed form, simulated with a real engine, or measured in a real run.

Imports everything below it: monitor, engine, config, data, model, distributed; never checkpoint/ or the trainer.
"""
