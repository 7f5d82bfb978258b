"""Learning where wire tensors land, on small modules that fuse, slice, transpose, transform and pack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8rl_workers.weights.load_learn import LearnError, learn, storages_of


class Fused(nn.Module):
    """Holds q and k in one matrix, a transposed matrix, and a buffer that no input reaches."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 4, dtype=dtype), requires_grad=False)
        stored = torch.zeros(3, 5, dtype=dtype)
        self.turned = nn.Parameter(stored.t(), requires_grad=False)
        self.register_buffer("table", torch.arange(7, dtype=torch.float32))

    def reload(self, inputs):
        given = dict(inputs)
        self.qk[:4].copy_(given["q"])
        self.qk[4:].copy_(given["k"])
        self.turned.copy_(given["t"].t())


def fused_inputs(seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 4), "k": (2, 4), "t": (3, 5)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_learned_layout_writes_what_the_reload_stores_bit_for_bit(dtype):
    model = Fused(dtype)
    layout = learn(model, model.reload, lambda: fused_inputs(0, dtype), whole=True)
    other = fused_inputs(1, dtype)
    copies = [flat.clone() for _, flat in storages_of(model)]
    for name, tensor in other:
        layout.write(name, tensor, copies)
        assert layout.matches(name, tensor, copies)
    model.reload(other)
    for copy, (_, flat) in zip(copies, storages_of(model), strict=True):
        assert torch.equal(copy.view(torch.uint8), flat.view(torch.uint8))


def test_learning_leaves_the_real_inputs_loaded_and_untouched_storage_alone():
    model = Fused()
    learn(model, model.reload, fused_inputs, whole=True)
    assert torch.equal(model.qk[4:], dict(fused_inputs())["k"])
    assert torch.equal(model.table, torch.arange(7, dtype=torch.float32))


def test_whole_tensors_become_one_block_each():
    model = Fused()
    layout = learn(model, model.reload, fused_inputs, whole=True)
    (block,) = layout.blocks["k"]
    assert (block.src, block.dst, block.rows, block.cols) == (0, 16, 1, 8)
    assert len(layout.storages) == 2


def test_a_column_shard_becomes_one_strided_block():
    class Shard(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16), requires_grad=False)

        def reload(self, inputs):
            self.w.copy_(dict(inputs)["w"][:, 3:6])

    model = Shard()
    weight = torch.randn(8, 6).to(torch.bfloat16)
    layout = learn(model, model.reload, lambda: [("w", weight)], whole=False)
    (block,) = layout.blocks["w"]
    assert (block.src, block.rows, block.cols, block.src_stride, block.dst_stride) == (3, 8, 3, 6, 3)


def test_positions_beyond_one_digit_are_told_apart():
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16), requires_grad=False)
    weight = torch.randn(70_000).to(torch.bfloat16)

    def reload(inputs):
        model.weight.copy_(dict(inputs)["w"].roll(1))

    layout = learn(model, reload, lambda: [("w", weight)], whole=True)
    assert sorted((b.src, b.dst, b.cols) for b in layout.blocks["w"]) == [(0, 1, 69_999), (69_999, 0, 1)]


def test_a_repacked_storage_is_named_with_its_runs():
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros(4000, dtype=torch.bfloat16), requires_grad=False)
    weight = torch.randn(4000).to(torch.bfloat16)

    def reload(inputs):
        model.weight.copy_(dict(inputs)["w"].flip(0))

    with pytest.raises(LearnError) as error:
        learn(model, reload, lambda: [("w", weight)], whole=True)
    assert error.value.reasons == {"weight": "its 4000 elements come in 4000 runs or more: the engine repacks it"}
    assert torch.equal(model.weight, weight.flip(0))


def test_a_transformed_tensor_is_named_with_its_reason_and_stays_loaded():
    class Shifted(Fused):
        def reload(self, inputs):
            super().reload(inputs)
            self.qk[:4] += 1

    model = Shifted()
    with pytest.raises(LearnError) as error:
        learn(model, model.reload, fused_inputs, whole=True)
    assert error.value.reasons == {"q": "16 of 16 elements reach no parameter unchanged: the engine transforms it"}
    assert torch.equal(model.qk[4:], dict(fused_inputs())["k"])


def test_a_tensor_that_is_scaled_by_its_own_values_is_not_trusted():
    """Tags of one value come through a normalisation unchanged only by accident; the negatives show it."""

    class Absolute(Fused):
        def reload(self, inputs):
            super().reload(inputs)
            self.qk.abs_()

    model = Absolute()
    with pytest.raises(LearnError) as error:
        learn(model, model.reload, fused_inputs, whole=True)
    assert set(error.value.reasons) == {"q", "k"}
    assert "does not reproduce" in error.value.reasons["q"]


def test_a_storage_that_depends_on_the_weights_without_holding_them_is_not_trusted():
    class Summed(Fused):
        def reload(self, inputs):
            super().reload(inputs)
            self.table[3] = self.qk.float().sum()

    model = Summed()
    with pytest.raises(LearnError) as error:
        learn(model, model.reload, fused_inputs, whole=True)
    assert set(error.value.reasons) == {"table"}
