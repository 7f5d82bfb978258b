"""Layouts learned one layer of each kind, on toy models whose reloads count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8rl_workers.weights import load_tags
from fp8rl_workers.weights.load_layout import bits
from fp8rl_workers.weights.load_learn import LearnError, learn, storages_of

BF16 = torch.bfloat16
ROWS, COLUMNS, EXPERTS = 6, 5, 3


def zeros(*shape):
    return nn.Parameter(torch.zeros(*shape, dtype=BF16), requires_grad=False)


class Dense(nn.Module):
    """Rows of gate and up in one matrix, down transposed, and rows that no weight fills."""

    names = ("gate", "up", "down")

    def __init__(self):
        super().__init__()
        self.gate_up = zeros(2 * ROWS + 2, COLUMNS)
        self.down = zeros(ROWS, COLUMNS)

    def take(self, given):
        self.gate_up[:ROWS] = given["gate"]
        self.gate_up[ROWS : 2 * ROWS] = given["up"]
        self.down.copy_(given["down"])


class Swapped(Dense):
    """Alike in every name and size, but up comes first."""

    def take(self, given):
        super().take(given | {"gate": given["up"], "up": given["gate"]})


class Experts(nn.Module):
    """A stack of experts in one storage, each transposed behind a scale of its own."""

    names = tuple(f"{e}.{part}" for e in range(EXPERTS) for part in ("gate", "up"))

    def __init__(self):
        super().__init__()
        self.w13 = zeros(EXPERTS, 2 * ROWS, COLUMNS)

    def take(self, given):
        for e in range(EXPERTS):
            self.w13[e, :ROWS] = given[f"{e}.gate"]
            self.w13[e, ROWS:] = given[f"{e}.up"]


class Model(nn.Module):
    """Layers of several kinds; `reloads` counts what each part was reloaded."""

    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.norm = zeros(COLUMNS)
        self.reloads = [0] * len(kinds)

    def part_reload(self, prefix):
        if not prefix.startswith("layers."):
            return None
        index = int(prefix.split(".")[1])

        def reload(inputs):
            self.reloads[index] += 1
            self.layers[index].take({name.removeprefix(prefix): tensor for name, tensor in inputs})

        return self.layers[index], reload

    def reload(self, inputs):
        given = dict(inputs)
        if "norm" in given:
            self.norm.copy_(given["norm"])
        for index, layer in enumerate(self.layers):
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}
            if own:
                layer.take(own)

    def inputs(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for index, layer in enumerate(self.layers):
            for name in layer.names:
                yield f"layers.{index}.{name}", torch.randn(ROWS, COLUMNS, generator=generator).to(BF16)
        yield "norm", torch.randn(COLUMNS, generator=generator).to(BF16)


def learned(model):
    return learn(model, model.reload, model.inputs, whole=True, part_reload=model.part_reload)


def held(model):
    return [bits(flat).clone() for _, flat in storages_of(model)]


def written(layout, model, seed):
    copies = [flat.clone() for _, flat in storages_of(model)]
    for name, tensor in model.inputs(seed):
        layout.write(name, tensor, copies)
    return [bits(copy) for copy in copies]


def test_of_layers_that_are_alike_only_the_first_is_loaded_with_tags():
    model = Model([Dense, Experts, Experts, Experts])
    layout = learned(model)
    tags = 3  # ones, twos, and one digit: no part has more than 256 elements
    assert model.reloads == [tags, tags, 0, 0]
    written_by_plan = written(layout, model, 7)
    model.reload(model.inputs(7))
    assert all(torch.equal(a, b) for a, b in zip(written_by_plan, held(model), strict=True))


def test_experts_of_one_layer_become_one_block_each():
    layout = learned(Model([Experts]))
    half = ROWS * COLUMNS
    assert [(b.dst, b.rows * b.cols) for b in layout.blocks["layers.0.1.up"]] == [(3 * half, half)]


def test_a_layer_that_only_looks_like_its_kind_is_found_and_named():
    model = Model([Dense, Dense, Swapped, Dense])
    with pytest.raises(LearnError) as error:
        learned(model)
    assert set(error.value.reasons) == {"layers.2.gate", "layers.2.up"}
    assert "does not reproduce" in error.value.reasons["layers.2.gate"]
    assert torch.equal(model.layers[2].gate_up[:ROWS], dict(model.inputs())["layers.2.up"])


def test_exchanged_experts_are_no_longer_what_the_layout_predicts():
    model = Model([Experts])
    layout = learned(model)
    given = dict(model.inputs())
    given["layers.0.0.up"], given["layers.0.2.up"] = given["layers.0.2.up"], given["layers.0.0.up"]
    flats = [flat for _, flat in storages_of(model)]
    assert [name for name, tensor in given.items() if not layout.matches(name, tensor, flats)] == [
        "layers.0.0.up",
        "layers.0.2.up",
    ]


def test_without_memory_nothing_is_learned_and_the_real_weights_stay_loaded():
    model = Model([Dense])

    def starved(prefix):
        found = model.part_reload(prefix)

        def reload(_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB")

        return found and (found[0], reload)

    with pytest.raises(LearnError) as error:
        learn(model, model.reload, model.inputs, whole=True, part_reload=starved)
    assert error.value.reasons == {"*": "no memory to learn the layout with: CUDA out of memory"}
    assert torch.equal(model.layers[0].down, dict(model.inputs())["layers.0.down"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.permutations([Dense, Experts, Experts, Dense]))
def test_windows_and_chunks_of_any_size_find_the_same_blocks(window, chunk, kinds):
    whole = learned(Model(kinds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_tags, "WINDOW", window)
        patch.setattr(load_tags, "CHUNK", chunk)
        assert learned(Model(kinds)) == whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_into_rows_columns_and_slices_is_learned(data):
    """One matrix of the wire lands in pieces anywhere in a larger storage; the layout writes what the reload does."""
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    cut = data.draw(st.integers(0, rows))
    gap, turned = data.draw(st.integers(0, 5)), data.draw(st.booleans())
    model = nn.Module()
    model.held = zeros(rows * columns + gap + columns)

    def reload(inputs):
        weight = dict(inputs)["w"]
        upper, lower = weight[:cut].reshape(-1), weight[cut:].reshape(-1)
        first, second = (lower, upper) if turned else (upper, lower)
        model.held[: len(first)] = first
        start = len(first) + gap
        model.held[start : start + len(second)] = second

    def inputs(seed=0):
        generator = torch.Generator().manual_seed(seed)
        return [("w", torch.randn(rows, columns, generator=generator).to(BF16))]

    layout = learn(model, reload, inputs, whole=True)
    copies = [flat.clone() for _, flat in storages_of(model)]
    layout.write(*inputs(1)[0], copies)
    reload(inputs(1))
    assert torch.equal(bits(copies[0]), bits(model.held))
