"""One rank of test_pipelines.py: train with each partition method, and report the pipeline stages."""

from dataclasses import replace
from typing import Any

from deepspeed.utils import groups

from pretrain.engine.attachments import attachments
from pretrain.engine.build import build_engine
from pretrain.engine.layer_times import layer_times_record, plan_as_built
from pretrain.memory.estimate.rank import parameters_of, pipeline_stage_bounds, pipeline_stage_layers
from tests.distributed.workers.worker import Case, end, plan_of, steps
from tests.support.cases_loop import each_case


def run(case: Case) -> dict[str, Any]:
    """Train. Return losses, the engine's stages, the estimate's, and what run.json would record of the times.

    "recorded": overrides of a record that the engine of a first build has made; the second build is then reported.
    """
    plan = plan_of(case)
    engine = build_engine(plan)
    measured = layer_times_record(plan_as_built(plan, engine))
    if "recorded" in case:
        assert measured is not None
        end(engine)
        groups.mpu = None
        engine = build_engine(plan, recorded_layer_times={**measured, **case["recorded"]})
    layout = replace(plan.layout, layer_times=attachments(engine).layer_times)
    shape = plan.model
    sizes = [parameter.numel() for parameter in engine.module.parameters()]
    rows: dict[str, Any] = steps(engine, plan, 0, plan.train_steps)
    parameters = parameters_of(pipeline_stage_layers(shape, layout, engine.stage_id))
    result = {**rows, "parts": engine.module.parts, "estimated": pipeline_stage_bounds(shape, layout),
              "same_size": plan.layout.tensor_parallel_size > 1 or sum(sizes) == sum(each.size for each in parameters),
              "times": list(attachments(engine).layer_times), "measured": measured}
    end(engine)
    return result


if __name__ == "__main__":
    each_case(run)
