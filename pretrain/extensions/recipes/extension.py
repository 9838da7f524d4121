"""Recipes: runs whose results are published, and a subcommand that repeats them."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "recipes", "Trains recipes, and compares their results with the published ones.",
    commands={"reproduce": Command("run", "train a recipe, and compare its result with the published one", ".main")})
