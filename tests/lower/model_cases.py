"""Small models from three zoos, with their batches, for `model_steps`."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.sweep_constructors import shrink


class Case(NamedTuple):
    """A constructor, and a function from its module to a batch of keyword arguments."""

    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module], dict[str, Any]]


DECODERS = (
    "llama mixtral mamba2 gpt2 deepseek_v3 qwen3_moe gemma3_text bloom falcon_mamba granitemoe qwen3_next opt mpt "
    "gpt_neox phi3 olmoe minimax qwen2_moe bamba glm4 gptj ctrl cohere2 stablelm mamba nemotron exaone4 smollm3 "
    "doge diffllama zamba2 gpt_oss openai-gpt xglm codegen gpt_bigcode gpt_neo apertus arcee bitnet cohere ernie4_5 "
    "gemma gemma2 glm granite helium mistral olmo olmo2 persimmon phi qwen2 qwen3 starcoder2 recurrent_gemma rwkv "
    "falcon_h1 falcon jamba"
).split()
ENCODERS = (
    "bert modernbert deberta-v2 fnet canine xlnet distilbert nystromformer roformer mpnet albert electra mobilebert "
    "convbert roberta camembert deberta ibert layoutlm megatron-bert rembert xlm-roberta esm squeezebert"
).split()
PAIRS = "t5 bart led m2m_100 longt5 pegasus marian umt5 mbart blenderbot blenderbot-small mvp plbart".split()
IMAGES = (
    "vit swin convnext dinov2 segformer beit clip_vision_model siglip_vision_model mobilenet_v2 deit levit "
    "mobilevit data2vec-vision ijepa vit_mae vit_msn mobilenet_v1 convnextv2 pvt swinv2 efficientnet poolformer "
    "swiftformer yolos focalnet resnet hiera"
).split()
SOUNDS = "whisper wav2vec2 speech_to_text audio-spectrogram-transformer hubert sew wavlm unispeech".split()
OTHERS = "clip patchtst decision_transformer".split()  # text together with images, series, games
BARE = ("ijepa", "hiera", "vit_mae", "vit_msn", "yolos")  # without a classifier, or with one that has another loss

# Fields that must agree with those that `shrink` sets, which it cannot know.
AGREEING: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "led": {"attention_window": [8, 8]},
    "nemotron": {"num_key_value_heads": 2},
    "olmoe": {"num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 2},
    "qwen3_next": {
        "num_experts_per_tok": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_experts_per_tok": 2},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 16},
    "squeezebert": {"embedding_size": 32},
    "esm": {"vocab_size": 33, "token_dropout": False, "pad_token_id": 1, "mask_token_id": 32},
    "whisper": {
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
    },
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "audio-spectrogram-transformer": {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "patchtst": {"context_length": 32, "prediction_length": 8, "num_input_channels": 3, "patch_length": 8},
}
# Architectures with stages, whose sizes are lists: only these fields are changed.
STAGED: dict[str, dict[str, Any]] = {
    "convnext": {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 64], "image_size": 64},
    "convnextv2": {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 64], "image_size": 64},
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32},
    "pvt": {"image_size": 64, "hidden_sizes": [16, 32, 40, 48], "depths": [1, 1, 1, 1]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 64, "hidden_dim": 320},
    "levit": {"image_size": 64, "hidden_sizes": [32, 48, 64], "depths": [1, 1, 1], "num_attention_heads": [2, 3, 4]},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64], "decoder_hidden_size": 32},
    "focalnet": {"embed_dim": 16, "depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 128], "image_size": 64},
    "hiera": {"image_size": [64, 64], "depths": [1, 1, 2, 1], "embed_dim": 16},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "poolformer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "swiftformer": {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64], "image_size": 64},
}

TORCHVISION = (
    "alexnet vit_b_32 squeezenet1_1 resnet18 convnext_tiny densenet121 mc3_18 shufflenet_v2_x0_5 regnet_x_400mf "
    "resnext50_32x4d vgg11 fcn_resnet50 wide_resnet50_2 r3d_18 mnasnet0_5 mobilenet_v2 regnet_y_400mf r2plus1d_18 "
    "mobilenet_v3_large efficientnet_b0 resnet50 efficientnet_v2_s swin_t deeplabv3_mobilenet_v3_large "
    "lraspp_mobilenet_v3_large googlenet swin_v2_t s3d mvit_v2_s inception_v3 maxvit_t swin3d_t mvit_v1_b raft_small "
    "squeezenet1_0 regnet_y_800mf"
).split()
IMAGES_A_BATCH = 8  # a batch norm over two images is mostly rounding
VIDEO = ("mc3_18", "mvit_v1_b", "mvit_v2_s", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t")
SIDES = {"inception_v3": 139, "alexnet": 96, "raft_small": 128, "googlenet": 128, "s3d": 96}
# Layers with as many output as input channels, each of its own shape.
LEFT_OUT = {
    "googlenet": ("inception4b", "inception4c"),
    "inception_v3": ("Mixed_5d", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7c"),
    "s3d": ("features.9", "features.10", "features.14"),
}

TIMM = (
    "resnet10t vit_tiny_patch16_224 convnext_atto deit_tiny_patch16_224 mixer_s32_224 convmixer_768_32 "
    "eva02_tiny_patch14_224 beit_base_patch16_224 convit_tiny fasternet_t0 cait_xxs24_224 visformer_tiny "
    "tnt_s_legacy_patch16_224 resnetv2_18 pit_ti_224 poolformer_s12 xcit_nano_12_p8_224 mambaout_femto "
    "inception_next_atto lcnet_050 starnet_s1 volo_d1_224 resnest14d seresnet18 nf_resnet26 efficientvit_b0 "
    "levit_128s tiny_vit_5m_224 regnetx_002 focalnet_tiny_srf mobilenetv3_small_050 skresnet18 efficientnet_lite0 "
    "botnet26t_256 mobilevit_xxs pvt_v2_b0 coat_tiny fastvit_t8 edgenext_xx_small res2net50_14w_8s ghostnet_050 "
    "cspresnet50 dla34 mobileone_s0 repghostnet_050 repvit_m0_9 rexnet_100 selecsls42 gcvit_xxtiny davit_tiny "
    "twins_svt_small swin_tiny_patch4_window7_224 hgnetv2_b0"
).split()
# concatenates its layers' results: none can be left out
JOINED = ("edgenext_xx_small", "res2net50_14w_8s", "hgnetv2_b0")


def transformers_case(name: str, dropout: float = 0.0) -> Case:
    """A small model of one architecture: with its language-modelling loss for a decoder, otherwise the bare model."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def build() -> nn.Module:
        config = CONFIG_MAPPING[name](**STAGED.get(name, {}))
        if name not in STAGED:
            shrink(config)
        for key, value in AGREEING.get(name, {}).items():
            setattr(config, key, value)
        set_dropout(config, dropout)
        if name in DECODERS:
            return AutoModelForCausalLM.from_config(config)
        if name in IMAGES and name not in BARE:
            with contextlib.suppress(ValueError, TypeError):
                return AutoModelForImageClassification.from_config(config)
        return AutoModel.from_config(config)

    return Case(build, lambda model: transformers_batch(name, model.config))


def transformers_batch(name: str, config: Any) -> dict[str, Any]:
    vocabulary = getattr(config, "vocab_size", 131)
    ids = torch.randint(5, min(vocabulary if isinstance(vocabulary, int) else 131, 131), (2, 16))
    if name == "whisper":
        features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "decoder_input_ids": ids}
    if name == "speech_to_text":
        return {"input_features": torch.randn(2, 32, config.input_feat_per_channel), "decoder_input_ids": ids}
    if name == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}
    if name == "patchtst":
        return {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}
    if name == "decision_transformer":
        steps = {"states": config.state_dim, "actions": config.act_dim, "rewards": 1, "returns_to_go": 1}
        times = torch.arange(8).expand(2, 8)
        return {**{k: torch.randn(2, 8, n) for k, n in steps.items()}, "timesteps": times}
    if name in SOUNDS:
        return {"input_values": torch.randn(2, 1600)}
    if name in IMAGES:
        side = getattr(config, "image_size", 64)
        side = side[0] if isinstance(side, (list, tuple)) else side
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), max(side, 32), max(side, 32))}
    if name == "led":  # checks whether a token attends globally: without a mask it creates one of ones
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    if name in PAIRS:
        # The mask is explicit, since LongT5 does not create one when traced.
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids.flip(1)}
    if name in DECODERS:
        return {"input_ids": ids, "labels": ids, "use_cache": False}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def set_dropout(config: Any, rate: float) -> None:
    """Set all dropout rates. With 0 a step draws nothing, so eager and compiled results are comparable."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and "layerdrop" not in key and "drop" in key:
            setattr(config, key, rate)
        elif isinstance(value, float) and any(part in key for part in ("layerdrop", "noise", "mask_time_prob")):
            setattr(config, key, 0.0)
        elif type(value).__name__.endswith("Config"):
            set_dropout(value, rate)


def silence(model: nn.Module) -> nn.Module:
    """Disable dropout in modules that have their rates as attributes."""
    for module in model.modules():
        for key in ("p", "drop_prob", "drop", "attn_drop", "dropout", "dropout_p", "layerdrop", "mask_ratio"):
            if isinstance(getattr(module, key, None), float) and isinstance(module, nn.Module):
                setattr(module, key, 0.0)
    return model


def thin(model: nn.Module) -> nn.Module:
    """Remove each layer that is like the one before it from its list: stages keep their shapes and lose depth."""
    for module in list(model.modules()):
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            layers = list(module)
            for place in reversed(range(1, len(layers))):
                if _alike(layers[place - 1], layers[place]):
                    del module[place]
    return model


def _alike(a: nn.Module, b: nn.Module) -> bool:
    def sketch(layer: nn.Module) -> list[Any]:
        return [
            (name, type(m), {k: v for k, v in vars(m).items() if isinstance(v, (int, str, tuple, list))}, *shapes(m))
            for name, m in layer.named_modules()
        ]

    def shapes(layer: nn.Module) -> list[torch.Size]:
        return [weight.shape for weight in layer.parameters()]

    return sketch(a) == sketch(b) and bool(shapes(a))


def torchvision_small(name: str) -> nn.Module | None:
    """Architectures with sizes as constructor arguments, whose layers all have different shapes."""
    models = importlib.import_module("torchvision.models")
    if name == "densenet121":
        return models.DenseNet(16, (2, 3, 2, 2), 32, num_classes=10)
    if name == "maxvit_t":
        return models.MaxVit((64, 64), 16, 2, [16, 32, 48, 64], [1, 1, 1, 1], 16, 0.0, num_classes=10)
    if name in ("swin_t", "swin_v2_t"):
        swin = importlib.import_module("torchvision.models.swin_transformer")
        new = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if "v2" in name else {}
        return swin.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10, **new)
    if name == "swin3d_t":
        return models.video.SwinTransformer3d([2, 4, 4], 24, [2, 2], [2, 4], [4, 4, 4], num_classes=10)
    if name.startswith("mvit"):
        block = importlib.import_module("torchvision.models.video.mvit").MSBlockConfig
        sizes = [(1, 24, 48, [1, 1, 1]), (2, 48, 48, [1, 2, 2]), (2, 48, 96, [1, 1, 1]), (4, 96, 96, [1, 2, 2])]
        blocks = [block(n, i, o, [3, 3, 3], [3, 3, 3], stride, [1, 2, 2]) for n, i, o, stride in sizes]
        new = dict.fromkeys(("residual_pool", "rel_pos_embed", "proj_after_attn"), name == "mvit_v2_s")
        return models.video.MViT(
            (64, 64), 16, blocks, residual_with_cls_embed=name != "mvit_v2_s", num_classes=10, **new
        )
    return None


def torchvision_case(name: str) -> Case:
    models = importlib.import_module("torchvision.models")
    segments = name.startswith(("fcn", "lraspp", "deeplab"))
    side = SIDES.get(name, 64)

    def build() -> nn.Module:
        small = torchvision_small(name)
        if small is not None:
            return small
        if name == "raft_small":
            return models.optical_flow.raft_small(weights=None)
        options: dict[str, Any] = {"num_classes": 10}
        if segments:
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "aux_logits": False}
        if name.startswith("vit"):
            options["image_size"] = side
        model = models.get_model(name, weights=None, **options)
        for layer in LEFT_OUT.get(name, ()):
            model.set_submodule(layer, nn.Identity())
        if name == "s3d":
            model.avgpool = nn.AvgPool3d((2, 3, 3))  # images of 96 pixels a side, not 224
        return thin(model)

    def batch(model: nn.Module) -> dict[str, Any]:
        if name == "raft_small":
            pair = torch.randn(2, 2, 3, side, side)
            return {"image1": pair[0], "image2": pair[1], "num_flow_updates": 2}
        frames = (16,) if name in VIDEO else ()
        shape = (2 if frames else IMAGES_A_BATCH, 3, *frames, side, side)
        return {"input" if name.startswith("lraspp") else "x": torch.randn(shape)}

    return Case(build, batch)


def timm_case(name: str) -> Case:
    timm = importlib.import_module("timm")

    def build() -> nn.Module:
        with contextlib.suppress(TypeError, AssertionError):
            return finish(timm.create_model(name, num_classes=10, img_size=112 if "patch14" in name else 64))
        return finish(timm.create_model(name, num_classes=10))

    def finish(model: nn.Module) -> nn.Module:
        return model if name in JOINED else thin(model)

    def batch(model: nn.Module) -> dict[str, Any]:
        fixed = [m.img_size for m in model.modules() if hasattr(m, "img_size")]
        side = fixed[0] if fixed else 64
        side = side[0] if isinstance(side, (list, tuple)) else side
        return {"x": torch.randn(IMAGES_A_BATCH, 3, side or 64, side or 64)}

    return Case(build, batch)


def in_turn(*kinds: list[str]) -> list[str]:
    """The first of each kind, then the second of each, so that the first few include every kind."""
    return [name for row in itertools.zip_longest(*kinds) for name in row if name]


ZOOS: dict[str, tuple[list[str], Callable[[str], Case]]] = {
    "transformers": (in_turn(DECODERS, ENCODERS, PAIRS, IMAGES, SOUNDS, OTHERS), transformers_case),
    "torchvision": (TORCHVISION, torchvision_case),
    "timm": (TIMM, timm_case),
}


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss; otherwise the mean squared distance of its output from a fixed pattern. (Not from a
    constant: after a layer norm, that would not depend on the weights before it.)"""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    for cache in ("past_key_values", "cache_params"):
        if hasattr(output, "get") and output.get(cache, None) is not None:
            output = {k: v for k, v in output.items() if k != cache}
    tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(_misfit(x) for x in tensors if x.requires_grad)  # type: ignore[return-value]


def _misfit(x: torch.Tensor) -> torch.Tensor:
    x = x.float() if x.dtype.itemsize < 4 else x
    pattern = torch.arange(x.numel(), device=x.device).to(x.dtype).cos().view(x.shape)
    return ((x - pattern) ** 2).mean()
