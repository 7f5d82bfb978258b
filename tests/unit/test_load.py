"""The two phases of loading, on a small module instead of an engine."""

from __future__ import annotations

import pytest
import torch
from offers import offer_of
from torch import nn

from fp8rl_workers.errors import DigestError, InvalidModelError, NotYetError
from fp8rl_workers.weights.cast import dequantize, quantize
from fp8rl_workers.weights.digest import digest
from fp8rl_workers.weights.load import Loader, Staging, check_signature
from fp8rl_workers.weights.offer import Offer, Weight, make_seal, plan_layout

WEIGHTS = [Weight("a.weight", (128, 128), quantized=True), Weight("norm.weight", (128,), quantized=False)]


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(128, 128, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(128, dtype=torch.bfloat16), requires_grad=False)
        self.reloads = 0

    def reload(self, inputs):
        given = dict(inputs)
        self.a.copy_(given["a.weight"])
        self.norm.copy_(given["norm.weight"])
        self.reloads += 1


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {w.name: torch.randn(w.shape, generator=generator).to(torch.bfloat16) for w in WEIGHTS}


def received(seed, version=1, wire="blockwise", weights=WEIGHTS):
    """A staging as it stands after the last bucket, and its seal."""
    offer = offer_of(plan_layout(weights, wire, 1 << 14), sync_id=version, version=version, step=version, wire=wire)
    staging = Staging(offer, "bf16")
    parts = {}
    for weight in weights:
        cast = quantize(weight.name, values(seed)[weight.name], wire if weight.quantized else "bf16")
        parts |= {weight.name + suffix: part for suffix, part in cast.items()}
    for entry in offer.tensors:
        staging.tensor(entry).copy_(parts[entry.name])
    return staging, make_seal(offer, [digest(parts[entry.name]) for entry in offer.tensors])


def loader_of(model, mode="auto", unlearnable=dict):
    return Loader(model, model.reload, whole=True, mode=mode, unlearnable=unlearnable)


def held(seed):
    """What an engine that holds BF16 must have of these weights."""
    return dequantize(quantize("a.weight", values(seed)["a.weight"], "blockwise"), "blockwise")


def load(loader, seed, version):
    loader.prepare(*received(seed, version))
    loader.verify()
    loader.apply()


def test_the_first_commit_reloads_and_learns_and_later_ones_copy():
    model = Tiny()
    loader = loader_of(model)
    assert loader.path == "none"
    load(loader, 1, 1)
    reloads = model.reloads
    assert (loader.path, loader.fallback) == ("plan", {})
    pointers = [p.data_ptr() for p in model.parameters()]
    load(loader, 2, 2)
    assert model.reloads == reloads
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(model.a, held(2))
    assert torch.equal(model.norm, values(2)["norm.weight"])


def test_prepare_leaves_the_parameters_alone():
    model = Tiny()
    loader = loader_of(model)
    load(loader, 1, 1)
    loader.prepare(*received(2, 2))
    assert torch.equal(model.a, held(1))


def test_a_byte_flipped_before_or_in_the_staging_is_refused_and_named():
    model = Tiny()
    loader = loader_of(model)
    for version in (1, 2):
        staging, seal = received(version, version)
        staging.tensor(staging.offer.tensors[0]).view(torch.uint8)[5, 5] ^= 1
        with pytest.raises(DigestError, match=r"a\.weight: digest"):
            loader.prepare(staging, seal)
        with pytest.raises(NotYetError):
            loader.verify()
        load(loader, 1, 1)
    assert torch.equal(model.a, held(1))


def test_a_byte_flipped_in_the_staging_after_prepare_is_refused_at_the_first_commit():
    loader = loader_of(Tiny())
    staging, seal = received(1)
    loader.prepare(staging, seal)
    staging.buckets[-1][0] ^= 1
    with pytest.raises(DigestError):
        loader.verify()


def test_a_byte_flipped_in_the_shadow_is_refused_and_the_parameters_stay():
    model = Tiny()
    loader = loader_of(model)
    load(loader, 1, 1)
    loader.prepare(*received(2, 2))
    assert loader.shadow is not None
    loader.shadow.copies[loader.shadow.layout.storages[0]].view(torch.uint8)[3] ^= 1
    with pytest.raises(DigestError, match="shadow has changed"):
        loader.verify()
    assert torch.equal(model.a, held(1))


def test_mode_reload_learns_nothing_and_says_so():
    model = Tiny()
    loader = loader_of(model, mode="reload")
    for version in (1, 2, 3):
        load(loader, version, version)
    assert (loader.path, model.reloads) == ("reload", 3)
    assert loader.fallback == {"*": "weightSync.mode is reload"}
    assert torch.equal(model.a, held(3))


def test_what_cannot_be_learned_is_reloaded_for_good_with_its_reason():
    class Packed(Tiny):
        def reload(self, inputs):
            super().reload(inputs)
            self.a.mul_(2)

    model = Packed()
    loader = loader_of(model)
    for version in (1, 2):
        load(loader, version, version)
    assert loader.path == "reload"
    assert list(loader.fallback) == ["a.weight"]
    assert torch.equal(model.a, held(2) * 2)


def test_parameters_that_a_kernel_copies_are_never_laid_out():
    loader = loader_of(Tiny(), unlearnable=lambda: {"a": "the kernel keeps a copy"})
    load(loader, 1, 1)
    assert (loader.path, loader.fallback) == ("reload", {"a": "the kernel keeps a copy"})


def test_all_tensors_that_do_not_fit_are_named_at_once():
    loader = loader_of(Tiny())
    load(loader, 1, 1)
    other = [Weight("a.weight", (256, 128), quantized=True), Weight("b.weight", (4, 4), quantized=False)]
    offer = Offer(received(1)[0].offer.head, plan_layout(other, "blockwise", 1 << 20))
    with pytest.raises(InvalidModelError) as error:
        loader.prepare(Staging(offer, "bf16"), received(1)[1])
    text = str(error.value)
    assert "norm.weight: missing" in text
    assert "b.weight: not known" in text
    assert "a.weight: bfloat16 [256, 128], the engine holds bfloat16 [128, 128]" in text


def test_the_order_of_tensors_is_no_difference():
    one, two, other = ("a", "bfloat16", (1,)), ("b", "bfloat16", (2,)), ("b", "bfloat16", (3,))
    assert check_signature((one, two), (two, one)) is None
    with pytest.raises(InvalidModelError, match=r"^1 offered tensors do not fit: b: bfloat16 \[3\]"):
        check_signature((one, two), (other, one))


def test_an_engine_that_holds_codes_takes_wire_tensors_as_they_are():
    staging, _ = received(1)
    codes = Staging(staging.offer, "codes")
    assert [name for name, _ in codes.inputs()] == ["a.weight", "a.weight_scale_inv", "norm.weight"]
    assert [name for name, _ in staging.inputs()] == ["a.weight", "norm.weight"]
