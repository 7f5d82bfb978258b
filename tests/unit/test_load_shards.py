"""What a rank of a sharded engine lays out: only its own columns, rows and experts, and all ranks together everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8rl_workers.weights.load_layout import bits
from fp8rl_workers.weights.load_learn import learn, storages_of

BF16 = torch.bfloat16
EXPERTS, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 4, 8, 16, 8, 2, 4
SHAPES = {
    "q": (HEADS * HEAD, WIDTH),
    "k": (KV_HEADS * HEAD, WIDTH),
    "v": (KV_HEADS * HEAD, WIDTH),
    "o": (WIDTH, HEADS * HEAD),
    "gate": (INNER, WIDTH),
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
    "norm": (WIDTH,),
} | {f"experts.{e}": (INNER, WIDTH) for e in range(EXPERTS)}


def zeros(*shape):
    return nn.Parameter(torch.zeros(*shape, dtype=BF16), requires_grad=False)


class Rank(nn.Module):
    """One rank of a layer as vLLM shards it: column, row and expert parallel; with more ranks than kv heads these are repeated."""

    def __init__(self, rank, world, *, expert_parallel):
        super().__init__()
        self.rank, self.world, self.expert_parallel = rank, world, expert_parallel
        kv = max(1, KV_HEADS // world)
        self.qkv = zeros((HEADS // world + 2 * kv) * HEAD, WIDTH)
        self.o = zeros(WIDTH, HEADS * HEAD // world)
        self.gate_up = zeros(2 * INNER // world, WIDTH)
        self.down = zeros(WIDTH, INNER // world)
        self.norm = zeros(WIDTH)
        own = (EXPERTS // world, INNER) if expert_parallel else (EXPERTS, INNER // world)
        self.w1 = zeros(*own, WIDTH)

    def shard(self, weight, dim):
        return weight.chunk(self.world, dim)[self.rank]

    def kv(self, weight):
        parts = min(self.world, KV_HEADS)
        return weight.chunk(parts)[self.rank * parts // self.world]

    def reload(self, inputs):
        given = dict(inputs)
        self.qkv.copy_(torch.cat([self.shard(given["q"], 0), self.kv(given["k"]), self.kv(given["v"])]))
        self.o.copy_(self.shard(given["o"], 1))
        self.gate_up.copy_(torch.cat([self.shard(given["gate"], 0), self.shard(given["up"], 0)]))
        self.down.copy_(self.shard(given["down"], 1))
        self.norm.copy_(given["norm"])
        experts = torch.stack([given[f"experts.{e}"] for e in range(EXPERTS)])
        self.w1.copy_(self.shard(experts, 0 if self.expert_parallel else 1))


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(BF16)) for name, shape in SHAPES.items()]


def planned(rank):
    return learn(rank, rank.reload, inputs, whole=False)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_writes_what_its_reload_stores(world, expert_parallel):
    for number in range(world):
        rank = Rank(number, world, expert_parallel=expert_parallel)
        layout = planned(rank)
        copies = [flat.clone() for _, flat in storages_of(rank)]
        for name, tensor in inputs(5):
            layout.write(name, tensor, copies)
        rank.reload(inputs(5))
        for copy, (_, flat) in zip(copies, storages_of(rank), strict=True):
            assert torch.equal(bits(copy), bits(flat))


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_together_hold_every_element_and_each_only_its_share(world, expert_parallel):
    times = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in SHAPES.items()}
    for number in range(world):
        rank = Rank(number, world, expert_parallel=expert_parallel)
        layout = planned(rank)
        targets = [torch.zeros(flat.numel(), dtype=torch.int32) for _, flat in storages_of(rank)]
        for name, count in times.items():
            for source, _ in layout.pairs(name, count, targets):
                source.add_(1)
    repeated = {"k", "v"} if world > KV_HEADS else set()
    for name, count in times.items():
        wanted = world if name == "norm" else world // KV_HEADS if name in repeated else 1
        assert torch.equal(count, torch.full_like(count, wanted)), name


def test_a_rank_of_expert_parallelism_lays_out_no_other_experts():
    layout = planned(Rank(1, 2, expert_parallel=True))
    assert [bool(layout.blocks[f"experts.{e}"]) for e in range(EXPERTS)] == [False, False, True, True]


def test_a_row_parallel_shard_is_one_strided_block():
    (block,) = planned(Rank(1, 4, expert_parallel=False)).blocks["down"]
    assert (block.src, block.rows, block.cols, block.src_stride, block.dst_stride) == (4, WIDTH, 4, INNER, 4)
