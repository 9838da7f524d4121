"""Configs of wrapped decoders with unusual sizes that divide as the model needs: 6 heads, 3 groups, 18 experts."""

import json
import re
from typing import Any

from pretrain.extensions.wrapped.tiny import tiny_copy
from pretrain.model.own_models import config_class_of

# a number whose key matches is 3/2 of that in the tiny copy of the defaults: 64 hidden units become 96, 4 heads 6
_LARGER = re.compile("hidden_size|n_embd|d_model|emb_dim|dim_model|embedding_dim|lru_width|.*embedding_size|"
                     "word_embed_proj_dim|.*embed_dim|.*intermediate_size|.*ffn_dim|ffn_hidden_size|n_inner|dff|d_inner|"
                     "dim_ff|feed_forward_size|mamba_d_ssm|attention_hidden_size|(.*_)?heads|n_head|n_head_kv|num_query_groups|"
                     "mamba_n_groups|mamba_ngroups|n_groups|.*num_experts|n_routed_experts|num_local_experts")


def unusual_config(model_type: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a small config.json whose numbers of heads, groups and experts have the factor 3."""
    copied = tiny_copy(config_class_of(model_type)(**defaults))
    values: dict[str, Any] = json.loads(copied.to_json_string(use_diff=False))
    return {**_larger(values), "model_type": model_type}


def _larger(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _larger(value) if isinstance(value, dict) else value * 3 // 2
            if type(value) is int and value > 1 and _LARGER.fullmatch(key) else value for key, value in values.items()}
