"""Real models, constructed eagerly and deferred: some of each zoo; all of them in `make sweep`."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import sweep_constructors as sweep

NAMES = {
    "transformers": (
        "llama gpt2 bert t5 mixtral mamba vit wav2vec2 whisper clip qwen2_moe deepseek_v3 falcon bart swin gpt_neox "
        "albert deberta-v2 opt phi3 gemma2 rwkv xlnet convnextv2 detr mpt bloom blip siglip rt_detr"
    ).split(),
    "torchvision": "resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 efficientnet_b0 mnasnet0_5".split(),
    "timm": (
        "test_vit test_resnet test_convnext test_byobnet test_efficientnet test_vit2 test_vit3 test_nfnet test_mambaout"
    ).split(),
}


@pytest.fixture(scope="module", autouse=True)
def prepared():
    sweep.prepare()


def cases():
    return [pytest.param(zoo, name, id=f"{zoo}-{name}") for zoo, names in NAMES.items() for name in names]


@pytest.mark.parametrize("zoo, name", cases())
def test_models_match_eager(zoo, name):
    if importlib.util.find_spec(zoo) is None:
        pytest.skip(f"{zoo} is not installed")
    if zoo == "timm":
        import timm

        if name not in timm.list_models():
            pytest.skip(f"this timm has no {name}")
        build = lambda: timm.create_model(name)  # noqa: E731
    else:
        build = sweep.transformers_case(name) if zoo == "transformers" else dict(sweep.ZOOS[zoo]())[name]
    outcome = sweep.examine(zoo, name, build)
    assert outcome.verdict == "same", outcome


PARTS = 16


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("zoo", NAMES)
def test_every_architecture_matches_eager(zoo, part):
    pytest.importorskip(zoo)
    outcomes = [sweep.examine(zoo, name, build) for name, build in list(sweep.ZOOS[zoo]())[part::PARTS]]
    assert not [outcome for outcome in outcomes if outcome.verdict in ("differs", "fails")]
    assert any(outcome.verdict == "same" for outcome in outcomes)
