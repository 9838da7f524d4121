"""`ds-pretrain reproduce`: train a recipe of launch/recipes, and compare the result with the published one."""
