"""The architectures that autopar is measured on: names for `examples/hf.py`."""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Every op of these has a rule in the table, and all standard dims are found by structure.
STANDARD = _names(
    "gpt2 llama mistral qwen3 gemma2 phi3 bert deberta-v2 t5 bart vit swin resnet convnext whisper wav2vec2 clip"
)

# Others, of all kinds.
DECODERS = _names(
    "apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl dbrx deepseek_v2 deepseek_v3 diffllama doge "
    "ernie4_5 exaone4 falcon falcon_h1 falcon_mamba gemma gemma3_text glm glm4 glm4_moe gpt_bigcode gpt_neo gpt_neox "
    "gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense imagegpt jamba "
    "jetmoe lfm2 mamba mamba2 minimax ministral mixtral modernbert-decoder moshi mpt nanochat nemotron nemotron_h "
    "olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phimoe qwen2 qwen2_moe qwen3_moe qwen3_next "
    "recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm xlstm"
)
ENCODERS = _names(
    "albert big_bird camembert canine convbert data2vec-text deberta distilbert electra ernie esm eurobert flaubert "
    "fnet funnel ibert layoutlm layoutlmv3 lilt longformer luke markuplm megatron-bert mobilebert modernbert mpnet "
    "mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert roformer splinter squeezebert tapas "
    "xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso"
)
ENCODER_DECODERS = _names(
    "bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus "
    "pegasus_x plbart pop2piano prophetnet switch_transformers t5gemma trocr umt5"
)
IMAGES = _names(
    "beit bit convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit dpt efficientnet focalnet "
    "glpn hiera ijepa levit mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 poolformer pvt pvt_v2 regnet segformer "
    "swiftformer swin2sr swinv2 timesformer videomae vit_mae vit_msn vitdet vivit yolos"
)
AUDIO = _names(
    "audio-spectrogram-transformer data2vec-audio hubert sew sew-d speech_to_text speecht5 unispeech unispeech-sat "
    "wav2vec2-bert wav2vec2-conformer wavlm"
)
SEVERAL_MODALITIES = _names(
    "altclip blip chinese_clip clipseg flava git groupvit lxmert metaclip_2 owlv2 owlvit siglip vilt visual_bert"
)
TIME_SERIES = _names("patchtsmixer patchtst")

EVERY = (
    *STANDARD,
    *DECODERS,
    *ENCODERS,
    *ENCODER_DECODERS,
    *IMAGES,
    *AUDIO,
    *SEVERAL_MODALITIES,
    *TIME_SERIES,
)

# Those that autopar refuses to trace, rightly: a trace would be wrong, or cannot exist.
DATA = "its forward depends on the data in a tensor: "
BACKWARD = "the backward of its own torch.autograd.Function would be lost: "
REFUSED = {
    "dbrx": DATA + "loops over the experts that were chosen",
    "fsmt": DATA + "asks whether any token is padding",
    "ibert": DATA + "asserts that a range is not NaN (training only)",
    "jetmoe": DATA + "the number of tokens of each expert becomes a size",
    "led": DATA + "asks whether any token has global attention",
    "longformer": DATA + "asks whether any token has global attention",
    "rwkv": "changes its parameters in place, the first time it runs in eval mode",
    "sew-d": BACKWARD + "XDropout draws random numbers (training only)",
    "vilt": DATA + "the size of the image is read off a mask",
    "wav2vec2-conformer": "its first call of a longer input makes a buffer longer",
    "xmod": DATA + "the tokens of each language are selected",
    "yoso": BACKWARD + "YosoCumulation is given a dict",
}

# Those that fail in half precision by themselves.
REFUSED_IN_HALF = {
    "fnet": "torch has no Fourier transform in half precision",
    "mra": "multiplies float32 by weights in half precision",
}
