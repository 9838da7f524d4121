"""Rules for the division of the layers into pipeline stages."""

from pretrain.config.resolve import ResolvedConfig
from pretrain.model.partition import layer_costs, layer_pattern, stage_bounds, stage_without_block


def partition_matches_layers(run: ResolvedConfig) -> None:
    """Reject "type:REGEX" if the class name of no layer matches."""
    pattern, names = layer_pattern(run.layout.partition_method), _class_names(run)
    if pattern is not None and not any(pattern.search(name) for name in names):
        raise run.error(_key(run), expected=f"a regular expression that matches some of the layers: {', '.join(names)}",
                        remedy='"type:block" gives each pipeline stage the same number of blocks')


def stages_have_blocks(run: ResolvedConfig) -> None:
    """Reject a partition with a pipeline stage without a block: DeepSpeed's optimizers need matrices on each stage."""
    stages = run.layout.pipeline_stages
    if stages == 1:
        return
    layers = layer_costs(run.model, run.layout.seq_length)
    bounds = stage_bounds(layers, num_stages=stages, method=run.layout.partition_method)
    empty = stage_without_block(layers, bounds)
    if empty is not None:
        own = [layer.class_name for layer in layers[bounds[empty]:bounds[empty + 1]]]
        raise run.error(_key(run), problem=f'"{run.layout.partition_method}" leaves stage {empty + 1} of {stages} '
                        f"without a block: it would hold only {', '.join(own) or 'no layer'}",
                        remedy='"flops" and "time" give each stage a block; or use fewer "stages"')


def _key(run: ResolvedConfig) -> str:
    return "pipeline.partition" if run.file.get("pipeline.partition") is not None else "pipeline.partition_method"


def _class_names(run: ResolvedConfig) -> list[str]:
    """Return the class names of the layers, each once."""
    return list(dict.fromkeys(layer.class_name for layer in layer_costs(run.model, run.layout.seq_length)))
