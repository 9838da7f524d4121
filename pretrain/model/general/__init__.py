"""The general family: models that are built from transformers' own modules, for every `model_type` without a family.

| module | what it has |
| --- | --- |
| own_models.py | model classes of the user's own code (--model_code) |
| skeleton.py | `create_skeleton(config)`: transformers' model without memory for parameters; `Runner`: its `forward` |
| parts.py | `find_parts(model)` -> `Parts`: paths of embedding, decoder layers, head ...; or `UnknownPartsError` |
| described_layers.py | `describe(model, parts)`: the layers with parameters, buffers, windows, active parameters |
| decoder.py | `Decoder`: a skeleton with its parts and described layers; `decoder_from(values)`, `decoder_of(config)` |
| read.py | `general_config(values, where, overrides)`: a config.json -> `ModelConfig` with `described` layers |
| carried.py | arguments of decoder layers that depend on the tokens: how they travel with the hidden states |
| modules.py | the torch modules of the layers |
| specs.py | `general_specs`: the layers as specs of a pipeline, for `layer_specs.build_specs` |

`layer_specs.as_module(general_config(values, where))` is the plain module. The names of a described layer's parameters
in transformers' model are `Layer.their_names`; `model/init.py` fills in the initial weights.
"""
