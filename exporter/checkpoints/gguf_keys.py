"""The metadata of a GGUF file that changes a model's numbers: what is read, and what is refused by name if it is
not."""

from collections.abc import Mapping
from typing import Any

from runtime.errors import InputError

from .json_config import shown

# Keys of an architecture, without its name, that ``gguf_config`` reads.
READ = frozenset(
    (
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "expert_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
    )
)
# Keys that change nothing here: how a file was made, norms that these architectures do not have, parameters of rotary
# scaling of types that are refused, and of experts, which are refused too.
UNUSED = frozenset(
    (
        "tensor_data_layout",
        "attention.layer_norm_epsilon",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_used_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "expert_feed_forward_length",
    )
)
# Values that change nothing, of keys that are refused with any other. The factors of yarn apply to every type of
# scaling.
NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.output_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "use_parallel_residual": False,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
}
# The same of tokenizers.
TOKENIZER_READ = frozenset(
    (
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "bos_token_id",
        "eos_token_id",
        "eot_token_id",
        "eom_token_id",
        "unknown_token_id",
        "padding_token_id",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
        "remove_extra_whitespaces",
        "precompiled_charsmap",
        "fim_pad_token_id",
        "fim_rep_token_id",
        "fim_sep_token_id",
        "fim_pre_token_id",
        "fim_suf_token_id",
        "fim_mid_token_id",
        "prefix_token_id",
        "suffix_token_id",
        "middle_token_id",
    )
)
# Those of pairs of texts, and of encoders.
TOKENIZER_UNUSED = frozenset(
    (
        "token_type_count",
        "add_sep_token",
        "seperator_token_id",
        "mask_token_id",
        "cls_token_id",
        "normalizer.lowercase",
        "normalizer.strip_accents",
    )
)


def require_known(fields: Mapping[str, Any], architecture: str, source: str) -> None:
    """Raises InputError for a key of the architecture, or of the tokenizer, that is not known to change nothing."""
    kinds: list[tuple[str, frozenset[str], Mapping[str, object]]] = [
        (f"{architecture}.", READ | UNUSED, NEUTRAL),
        ("tokenizer.ggml.", TOKENIZER_READ | TOKENIZER_UNUSED, {}),
    ]
    for beginning, known, neutral in kinds:
        for key, value in fields.items():
            name = key.removeprefix(beginning)
            nothing = neutral.get(name)
            if name != key and name not in known and (type(value), value) != (type(nothing), nothing):
                raise InputError(
                    f"'{source}' has {key} {shown(value)}, which is not supported: name another file, or take the key "
                    "out of this one if you know that the model does not need it (gguf-new-metadata --remove-metadata "
                    f"{key})"
                )
