"""Buckets: where each part lands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_workers.weights.bucket import ALIGNMENT, Part, Slot, align, plan_buckets


def test_parts_are_laid_down_in_order_at_multiples_of_256():
    layout = plan_buckets([Part("a", 100), Part("b", 256), Part("c", 300)], 4096)
    assert layout.slots == (Slot("a", 0, 0, 100), Slot("b", 0, 256, 256), Slot("c", 0, 512, 300))
    assert layout.buckets == (1024,)


def test_a_part_that_does_not_fit_starts_the_next_bucket():
    layout = plan_buckets([Part("a", 600), Part("b", 600)], 1024)
    assert [(slot.bucket, slot.offset) for slot in layout.slots] == [(0, 0), (1, 0)]
    assert layout.buckets == (768, 768)


def test_codes_and_scales_of_a_weight_share_a_bucket():
    parts = [Part("a", 512), Part("w", 512, "w"), Part("w_scale", 4, "w")]
    layout = plan_buckets(parts, 1024)
    assert [(slot.name, slot.bucket) for slot in layout.slots] == [("a", 0), ("w", 1), ("w_scale", 1)]


def test_a_weight_larger_than_a_bucket_gets_its_own():
    layout = plan_buckets([Part("a", 10), Part("big", 5000), Part("b", 10)], 1024)
    assert [slot.bucket for slot in layout.slots] == [0, 1, 2]
    assert layout.buckets == (256, 5120, 256)


def test_by_bucket_gives_what_to_pack_and_unpack():
    layout = plan_buckets([Part("a", 600), Part("b", 600), Part("c", 10)], 1024)
    assert [[slot.name for slot in slots] for slots in layout.by_bucket()] == [["a"], ["b", "c"]]


def test_nothing_to_send_is_no_bucket():
    assert plan_buckets([], 1024).buckets == ()


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_not_positive_are_refused(size):
    with pytest.raises(ValueError, match=rf"bucketBytes: {size} is not positive"):
        plan_buckets([Part("a", 1)], size)
    with pytest.raises(ValueError, match="a: a part of 1 has no bytes"):
        plan_buckets([Part("a", size)], 1024)


@given(sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3)), max_size=40), limit=st.integers(256, 4096))
def test_slots_never_overlap_and_only_a_lone_group_exceeds_the_limit(sizes, limit):
    parts = [Part(str(i), size, f"g{group}" if group else "") for i, (size, group) in enumerate(sizes)]
    layout = plan_buckets(parts, limit)
    assert [slot.name for slot in layout.slots] == [part.name for part in parts]
    for bucket, slots in enumerate(layout.by_bucket()):
        end = 0
        for slot in slots:
            assert slot.offset == end
            assert slot.offset % ALIGNMENT == 0
            end = align(slot.offset + slot.nbytes)
        assert layout.buckets[bucket] == end
        groups = {parts[int(slot.name)].group or slot.name for slot in slots}
        assert end <= limit or len(groups) == 1
