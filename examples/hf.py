"""A Hugging Face architecture by name, small and random, built from its config: nothing is downloaded.

    model, inputs = hf("llama")                        # any `model_type` of transformers
    model, inputs = hf("bert", batch=4, seq=32)
    model, inputs = hf("mistral", num_hidden_layers=8) # anything else goes into the config

On the command line: `examples/hf.py:hf --set architecture=gpt2`.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn

# Replacement of each integer in a config, by the name of the attribute. Sizes that mean different things differ
# where the architectures allow it, so that two dims which happen to be equal do not look like one.
SIZES: dict[int, str] = {
    48: "hidden_size d_model n_embd embed_dim emb_dim dim d_embed attention_hidden_size encoder_hidden_size "
    "decoder_hidden_size word_embed_proj_dim output_hidden_size out_hidden_size pooler_output_size "
    "pooler_hidden_size embedding_dim",
    36: "embedding_size projection_dim projection_size image_text_hidden_size classifier_proj_size",
    4: "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads decoder_num_attention_heads num_conv_pos_embedding_groups linear_num_value_heads "
    "num_sliding_attention_heads attention_groups",
    2: "num_hidden_layers num_layers n_layer n_layers layers encoder_layers decoder_layers num_decoder_layers "
    "decoder_num_hidden_layers num_encoder_layers num_experts_per_tok num_experts_per_token moe_top_k moe_topk "
    "moe_k n_group l_layers x_layers r_layers linear_num_key_heads num_shared_experts",
    1: "topk_group first_k_dense_replace num_nextn_predict_layers first_k_dense_layers",
    6: "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim",
    16: "head_dim d_kv d_head kv_channels linear_key_head_dim linear_value_head_dim",
    80: "intermediate_size d_ff ffn_dim n_inner mlp_dim ffn_hidden_size d_inner encoder_ffn_dim decoder_ffn_dim "
    "decoder_intermediate_size ffn_intermediate_size",
    56: "moe_intermediate_size",
    72: "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    20: "kv_lora_rank num_mel_bins input_feat_per_channel",
    28: "q_lora_rank conv_channels",
    10: "qk_nope_head_dim",
    14: "v_head_dim max_source_positions",
    24: "conv_kernel_size_pos tdnn_channels entity_emb_size visual_feat_dim visual_embedding_dim",
    101: "vocab_size src_vocab_size tgt_vocab_size input_vocab_size char_vocab_size",
    8: "num_conv_pos_embeddings num_codevectors_per_group codevector_dim proj_codevector_dim groups_width",
    5: "sliding_window local_attention attention_window mamba_d_state state_size ssm_state_size "
    "num_qa_labels num_object_labels num_attr_labels",
    3: "mamba_dt_rank time_step_rank",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_target_positions",
    "context_length",
)
ZERO = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")

# Constraints of single architectures between their sizes, which the table above does not have.
SPECIAL: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 40},
    "bamba": {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_chunk_size": 5},
    "bit": {"embedding_size": 32, "num_groups": 4},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"attention_dropout": 0.0},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.3, "hidden_dim": 128},
    "esm": {"vocab_size": 101, "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_chunk_size": 5},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 8, "input_size": 32},
    "led": {"attention_window": 4},
    "levit": {"patch_size": 16},
    "llama": {"num_key_value_heads": 2},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 6, "n_groups": 2, "chunk_size": 5},
    "ministral": {"head_dim": 12},
    "mobilevit": {"hidden_sizes": [16, 24, 32]},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"d_latents": 64, "num_latents": 7, "num_blocks": 1, "num_self_attends_per_block": 2},
    "qwen3": {"num_key_value_heads": 2},
    "squeezebert": {"embedding_size": 48},
    "stablelm": {"hidden_size": 64},
    "swin": {"image_size": 96, "embed_dim": 24, "window_size": 3},
    "videomae": {"num_frames": 4},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
}

# Inputs of models that cannot do with their main input alone.
INPUTS: dict[str, str] = {
    "longt5": "input_ids attention_mask",
    "switch_transformers": "input_ids attention_mask",
    "lxmert": "input_ids visual_feats visual_pos",
    "vilt": "input_ids pixel_values",
}

MODEL_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModelForVideoClassification",
    "AutoModel",
    "AutoModelForPreTraining",
)


def hf(
    architecture: str = "llama",
    batch: int = 3,
    seq: int = 10,
    device: str = "cpu",
    train: bool = False,
    dropout: float | None = None,
    **overrides: Any,
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small random model of that `model_type`, and inputs for it.

    `dropout` replaces every dropout of the config; `overrides` go into the config.
    """
    config = small_config(architecture, seq, dropout, **overrides)
    with torch.device(device):
        model = model_class(config)(config).train(train)
        inputs = example_inputs(model, architecture, batch, seq)
    return model, inputs


def small_config(architecture: str, seq: int, dropout: float | None = None, **overrides: Any) -> Any:
    """The architecture's default config with every size made small; nested configs too."""
    from transformers import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no architecture {architecture!r}")
    config_class = CONFIG_MAPPING[architecture]
    return shrink(config_class, seq, dropout, **{**SPECIAL.get(architecture, {}), **overrides})


def shrink(config_class: Any, seq: int, dropout: float | None, **overrides: Any) -> Any:
    """A small config of that class. Where layers are of several kinds, one of each is kept."""
    default = config_class()
    values: dict[str, Any] = {}
    for field in fields(config_class):
        value = getattr(default, field.name, None)
        nested = field.name in getattr(default, "sub_configs", {})
        if nested and hasattr(value, "to_dict"):
            values[field.name] = shrink(type(value), seq, dropout, **overrides.pop(field.name, {}))
        elif (field.default is not None and field.default is not MISSING) or field.name == "layer_types":
            values[field.name] = small(field.name, value, default, seq, dropout)
    values.update(overrides)
    if isinstance(values.get("layer_types"), list) and "layer_types" not in overrides:
        kinds = list(dict.fromkeys(values["layer_types"]))
        layers = overrides.get("num_hidden_layers", max(2, len(kinds)))
        values["num_hidden_layers"] = layers
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return config_class(**values)


def small(name: str, value: Any, config: Any, seq: int, dropout: float | None) -> Any:
    """The small value of one attribute."""
    if dropout is not None and ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
        return dropout
    if name in ZERO:
        return 0.0
    if name in ("use_cache", "apply_spec_augment"):
        return False
    if name.endswith("_token_id") and isinstance(value, int):
        return value if value < 5 else 1
    if name in KV_HEADS and isinstance(value, int):
        return 4 if value == getattr(config, "num_attention_heads", None) else min(value, 2)
    if name in POSITIONS and isinstance(value, int):
        return max(67, seq + 3)
    if name == "patch_size" and isinstance(value, int):
        return min(value, 8)
    if name == "image_size":
        patch = getattr(config, "patch_size", 0)
        side = 32 if isinstance(patch, int) and patch >= 8 else 64
        return side if isinstance(value, int) else type(value)([side] * len(value))
    if name in ("conv_dim", "conv_stride", "conv_kernel") and isinstance(value, (list, tuple)):
        return {"conv_dim": [20, 20, 20], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3]}[name]
    if isinstance(value, (list, tuple)):
        return small_list(name, value)
    if name in SIZE_OF and isinstance(value, int) and not isinstance(value, bool) and value > SIZE_OF[name]:
        return SIZE_OF[name]
    return value


def small_list(name: str, value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """Sizes of the stages of a hierarchical (vision) model: the same stages, narrower and shallower."""
    if not value or not all(isinstance(item, int) for item in value):
        return value
    if name in ("depths", "num_blocks", "layers"):
        return type(value)([min(value[0], 2), *(1 for _ in value[1:])])
    if name in ("hidden_sizes", "embed_dim", "encoder_hidden_sizes", "embed_dims", "neck_hidden_sizes"):
        return type(value)(item // 8 if item % 8 == 0 else item for item in value)
    return value


def model_class(config: Any) -> Any:
    """The class with a head for the architecture's own task, if it has one."""
    import transformers

    for name in ("AutoModel",) if two_towers(config) else MODEL_CLASSES:
        classes = getattr(transformers, name)._model_mapping
        if type(config) in classes:
            found = classes[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model class for {config.model_type!r} that this example knows")


def two_towers(config: Any) -> bool:
    return hasattr(config, "text_config") and hasattr(config, "vision_config")


def example_inputs(model: Any, architecture: str, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """The model's main input, and what else it cannot do without."""
    names = [model.main_input_name]
    if architecture in INPUTS:
        names = INPUTS[architecture].split()
    elif two_towers(model.config):
        names = ["input_ids", "pixel_values"]
    if model.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        names.append("decoder_input_ids")
    return {name: example_input(name, model.config, batch, seq) for name in names}


def example_input(name: str, config: Any, batch: int, seq: int) -> torch.Tensor:
    if name in ("input_ids", "decoder_input_ids"):
        vocab = getattr(config.get_text_config(), "vocab_size", 64)
        return torch.randint(5, vocab, (batch, seq if name == "input_ids" else seq - 1))
    shapes = {
        "pixel_values": image_shape,
        "input_features": feature_shape,
        "input_values": audio_shape,
        "attention_mask": lambda config: (seq,),
        "past_values": lambda config: (config.context_length, config.num_input_channels),
        "visual_feats": lambda config: (7, config.visual_feat_dim),
        "visual_pos": lambda config: (7, config.visual_pos_dim),
    }
    if name not in shapes:
        raise ValueError(f"this example does not know how to make the input {name!r} of {config.model_type!r}")
    sizes: Any = shapes[name]
    shape = (batch, *sizes(config))
    return torch.ones(shape, dtype=torch.int64) if name == "attention_mask" else torch.randn(shape)


def image_shape(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 64)
    height, width = (side, side) if isinstance(side, int) else side
    frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()
    return (*frames, getattr(vision, "num_channels", 3), height, width)


def feature_shape(config: Any) -> tuple[int, ...]:
    """Spectrograms: most take time last."""
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        if hasattr(config, name):
            return (30, getattr(config, name))
    return (config.num_mel_bins, 2 * config.max_source_positions)


def audio_shape(config: Any) -> tuple[int, ...]:
    """Samples, or the frames of a spectrogram."""
    return (config.max_length, config.num_mel_bins) if hasattr(config, "max_length") else (400,)
