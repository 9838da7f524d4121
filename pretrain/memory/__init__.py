"""How much memory a layout takes: estimated in closed form, simulated with a real engine, measured in real runs."""
