"""Small models of three zoos, and batches that they take: what `model_steps` trains for a step."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.sweep_constructors import shrink


class Case(NamedTuple):
    """A constructor, and from its module a batch of keyword arguments."""

    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module], dict[str, Any]]


DECODERS = (
    "apertus arcee bamba bitnet bloom codegen cohere cohere2 ctrl deepseek_v3 diffllama doge ernie4_5 exaone4 falcon "
    "falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite "
    "granitemoe helium jamba llama mamba mamba2 minimax mistral mixtral mpt nemotron olmo olmo2 olmoe openai-gpt opt "
    "persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe "
    "qwen3_next recurrent_gemma rwkv smollm3 stablelm starcoder2 xglm zamba2"
).split()
ENCODERS = (
    "albert bert camembert canine convbert deberta deberta-v2 distilbert electra esm fnet funnel ibert layoutlm "
    "megatron-bert mobilebert modernbert mpnet nystromformer rembert roberta roformer squeezebert xlm-roberta xlnet"
).split()
PAIRS = "bart blenderbot blenderbot-small led m2m_100 marian mbart mvp pegasus plbart t5 umt5 longt5".split()
IMAGES = (
    "beit bit convnext convnextv2 cvt data2vec-vision deit "
    "dinov2 efficientnet focalnet hiera ijepa levit mobilenet_v1 "
    "mobilenet_v2 mobilevit poolformer pvt regnet resnet segformer siglip_vision_model swiftformer swin swinv2 vit "
    "vit_mae vit_msn yolos clip_vision_model"
).split()
SOUNDS = "wav2vec2 hubert wavlm unispeech sew".split()

TORCHVISION = (
    "alexnet densenet121 efficientnet_b0 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_large regnet_y_400mf resnet18 "
    "resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 vgg11 vit_b_32 wide_resnet50_2 convnext_tiny swin_t "
    "fcn_resnet50 lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large r3d_18 mc3_18 r2plus1d_18 s3d mvit_v2_s "
    "swin_v2_t maxvit_t inception_v3 regnet_x_400mf efficientnet_v2_s resnet50"
).split()
IMAGES_A_BATCH = 8  # what a batch norm over two images does is mostly rounding
VIDEO = ("mc3_18", "mvit_v2_s", "r2plus1d_18", "r3d_18", "s3d")
SIDES = {"maxvit_t": 224, "inception_v3": 96, "mvit_v2_s": 224, "alexnet": 96, "s3d": 96}

TIMM = (
    "beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 convnext_atto "
    "crossvit_9_240 cspresnet50 davit_tiny deit_tiny_patch16_224 densenet121 dla34 edgenext_xx_small "
    "efficientformer_l1 efficientnet_lite0 efficientvit_b0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 "
    "focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hgnetv2_b0 "
    "hrnet_w18_small inception_next_atto lcnet_050 levit_128s mambaout_femto "
    "mixer_s32_224 mobilenetv3_small_050 mobilevit_xxs mobileone_s0 nf_resnet26 pit_ti_224 poolformer_s12 pvt_v2_b0 "
    "regnetx_002 repghostnet_050 repvit_m0_9 res2net50_14w_8s resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42 "
    "seresnet18 skresnet18 starnet_s1 swin_tiny_patch4_window7_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 "
    "twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_224 volo_d1_224 vovnet39a xcit_nano_12_p8_224"
).split()


def transformers_case(name: str) -> Case:
    """A small model of one architecture: with its language-modelling loss if it is a decoder, else the bare model."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def build() -> nn.Module:
        config = without_dropout(shrink(CONFIG_MAPPING[name]()))
        if name in DECODERS:
            return AutoModelForCausalLM.from_config(config)
        if name in IMAGES and name not in ("ijepa", "hiera", "vit_mae", "vit_msn", "yolos"):
            with contextlib.suppress(ValueError):
                return AutoModelForImageClassification.from_config(config)
        return AutoModel.from_config(config)

    def batch(model: nn.Module) -> dict[str, Any]:
        config: Any = model.config
        if name in SOUNDS:
            return {"input_values": torch.randn(2, 1600)}
        if name in IMAGES:
            side = getattr(config, "image_size", 64)
            side = side[0] if isinstance(side, (list, tuple)) else side
            side = max(side, 64) if not hasattr(config, "patch_size") or name in ("swin", "levit") else side
            return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)}
        ids = torch.randint(5, min(config.vocab_size if hasattr(config, "vocab_size") else 131, 131), (2, 16))
        if name in PAIRS:
            return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        if name in DECODERS:
            return {"input_ids": ids, "labels": ids, "use_cache": False}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Case(build, batch)


def without_dropout(config: Any) -> Any:
    """A step that draws nothing, so that eager and compiled have one result."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and any(part in key for part in ("drop", "pdrop", "noise", "mask_time_prob")):
            setattr(config, key, 0.0)
        elif type(value).__name__.endswith("Config"):
            without_dropout(value)
    return config


def silence(model: nn.Module) -> nn.Module:
    """The same for modules that have their rates as attributes."""
    for module in model.modules():
        for key in ("p", "drop_prob", "drop", "attn_drop", "dropout", "dropout_p", "layerdrop", "mask_ratio"):
            if isinstance(getattr(module, key, None), float) and isinstance(module, nn.Module):
                setattr(module, key, 0.0)
    return model


def torchvision_case(name: str) -> Case:
    models = importlib.import_module("torchvision.models")
    segments = name.startswith(("fcn", "lraspp", "deeplab"))
    side = SIDES.get(name, 64)

    def build() -> nn.Module:
        options: dict[str, Any] = {"num_classes": 10}
        if segments:
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "aux_logits": False}
        if name.startswith("vit"):
            options["image_size"] = side
        return models.get_model(name, weights=None, **options)

    def batch(model: nn.Module) -> dict[str, Any]:
        frames = (16,) if name in VIDEO else ()
        key = "input" if segments else "x"
        return {key: torch.randn(2 if frames else IMAGES_A_BATCH, 3, *frames, side, side)}

    return Case(build, batch)


def timm_case(name: str) -> Case:
    timm = importlib.import_module("timm")

    def build() -> nn.Module:
        with contextlib.suppress(TypeError, AssertionError):
            return timm.create_model(name, num_classes=10, img_size=112 if "patch14" in name else 64)
        return timm.create_model(name, num_classes=10)

    def batch(model: nn.Module) -> dict[str, Any]:
        fixed = [m.img_size for m in model.modules() if hasattr(m, "img_size")]
        side = fixed[0] if fixed else 64
        side = side[0] if isinstance(side, (list, tuple)) else side
        return {"x": torch.randn(IMAGES_A_BATCH, 3, side or 64, side or 64)}

    return Case(build, batch)


ZOOS: dict[str, tuple[list[str], Callable[[str], Case]]] = {
    "transformers": (DECODERS + ENCODERS + PAIRS + IMAGES + SOUNDS, transformers_case),
    "torchvision": (TORCHVISION, torchvision_case),
    "timm": (TIMM, timm_case),
}


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss; else the mean square of what it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    for cache in ("past_key_values", "cache_params"):
        if hasattr(output, "get") and output.get(cache, None) is not None:
            output = {k: v for k, v in output.items() if k != cache}
    tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    tensors = [x.float() if x.dtype.itemsize < 4 else x for x in tensors]
    return sum(((x - 0.5) ** 2).mean() for x in tensors if x.requires_grad)  # type: ignore[return-value]
