"""Offer and seal: what is said before and after the bytes, and what is refused."""

import json

import pytest
from offers import offer_of

from fp8rl_workers.errors import InvalidInputError, StaleError
from fp8rl_workers.weights.digest import joined
from fp8rl_workers.weights.offer import (
    LayoutReader,
    Offer,
    TensorEntry,
    Weight,
    layout_digest,
    make_seal,
    parse_offer,
    parse_seal,
    plan_layout,
    total_of,
    wire_parts,
)

WEIGHTS = [Weight("norm.weight", (64,), quantized=False), Weight("q_proj.weight", (256, 192), quantized=True)]


LAYOUT = plan_layout(WEIGHTS, "blockwise", 1 << 20)


def offer(**changes) -> Offer:
    fields = {"epoch": 2, "sync_id": 7, "version": 5, "attempt": 1, "step": 4}
    return offer_of(LAYOUT, **(fields | changes))


def read(found: Offer, job: str = "job", epoch: int = 2) -> Offer:
    return parse_offer(found.head.model_dump_json(), job, epoch, lambda _: found.layout)


def read_layout(text: str):
    return LayoutReader(lambda _: text)(layout_digest(text))


@pytest.mark.parametrize(
    ("wire", "parts"),
    [
        ("blockwise", [("w", (300, 160), "float8_e4m3fn"), ("w_scale_inv", (3, 2), "float32")]),
        ("mxfp8", [("w", (300, 160), "float8_e4m3fn"), ("w_scale", (300, 5), "uint8")]),
        ("channel", [("w", (300, 160), "float8_e4m3fn"), ("w_scale", (300, 1), "bfloat16")]),
        ("bf16", [("w", (300, 160), "bfloat16")]),
    ],
)
def test_wire_names_shapes_and_dtypes_are_those_of_the_cast(wire, parts):
    import torch

    from fp8rl_workers.weights.cast import quantize

    assert wire_parts(Weight("w", (300, 160), quantized=True), wire) == parts
    cast = quantize("w", torch.ones(300, 160, dtype=torch.bfloat16), wire)
    assert parts == [(f"w{s}", tuple(t.shape), str(t.dtype).removeprefix("torch.")) for s, t in cast.items()]


def test_a_stack_keeps_its_leading_dimension_and_an_ignored_weight_travels_as_bf16():
    assert wire_parts(Weight("e", (8, 256, 130), quantized=True), "blockwise")[1] == (
        "e_scale_inv",
        (8, 2, 2),
        "float32",
    )
    assert wire_parts(Weight("e", (8, 256), quantized=False), "blockwise") == [("e", (8, 256), "bfloat16")]


def test_layout_follows_from_shapes_alone():
    found = offer()
    assert [(e.name, e.weight, e.bucket, e.offset, e.nbytes) for e in found.tensors] == [
        ("norm.weight", "norm.weight", 0, 0, 128),
        ("q_proj.weight", "q_proj.weight", 0, 256, 49152),
        ("q_proj.weight_scale_inv", "q_proj.weight", 0, 49408, 16),
    ]
    assert found.buckets == [49664]
    assert found.wire_bytes == 49664
    assert [[e.name for e in bucket] for bucket in found.by_bucket()] == [[e.name for e in found.tensors]]


def test_an_offer_survives_its_own_json():
    assert read(offer()) == offer()
    assert read_layout(LAYOUT.model_dump_json()) == LAYOUT


def test_an_offer_of_another_job_or_epoch_is_refused():
    with pytest.raises(StaleError, match="offer: belongs to job job, not to other"):
        read(offer(), job="other")
    with pytest.raises(StaleError, match="offer: belongs to epoch 2, this process is in epoch 3"):
        read(offer(), epoch=3)


def entry(**changes) -> dict:
    return {"name": "w", "weight": "w", "shape": [16, 16], "dtype": "float8_e4m3fn", "bucket": 0, "offset": 0,
            "nbytes": 256} | changes  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([entry(nbytes=255)], r"w: nbytes 255, but \[16, 16\] of float8_e4m3fn is 256"),
        ([entry(offset=128)], "w: offset 128 is no multiple of 256"),
        ([entry(bucket=1)], "w: bucket 1 of 1"),
        ([entry(offset=768, dtype="bfloat16", nbytes=512)], "w: ends at 1280 in bucket 0 of 1024 bytes"),
        ([entry(slice=[[0, 17], [0, 16]])], r"w: slice \[\(0, 17\), \(0, 16\)\] is not inside shape \[16, 16\]"),
        ([entry(slice=[[0, 8]])], "is not inside shape"),
        ([entry(), entry(name="x", offset=0)], "x: starts at 0 of bucket 0, before w ends at 256"),
        ([entry(), entry(offset=256)], "w: offered twice"),
        ([entry(dtype="int4")], "tensors.0.dtype: Input should be"),
        ([entry(extra=1)], "tensors.0.extra: Extra inputs"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(tensors, message):
    with pytest.raises(InvalidInputError, match=message):
        read_layout(json.dumps({"tensors": tensors, "buckets": [1024]}))


def test_a_layout_is_fetched_once_and_only_that_of_its_digest():
    asked, text = [], LAYOUT.model_dump_json()
    reader = LayoutReader(lambda digest: asked.append(digest) or text)
    assert reader(layout_digest(text)) is reader(layout_digest(text))
    assert asked == [layout_digest(text)]
    with pytest.raises(InvalidInputError, match="layout: the text under 00 digests to"):
        reader("00")


def test_what_is_no_offer_is_refused_in_one_line():
    for text in (b"\x80", "{", "{}", "[]"):
        with pytest.raises(InvalidInputError, match=r"^offer: ") as caught:
            parse_offer(text, "job", 2, lambda _: LAYOUT)
        assert "\n" not in str(caught.value)


def test_all_faults_come_at_once_up_to_five():
    many = [entry(name=f"w{i}", offset=256 * i, nbytes=255) for i in range(4)] * 2
    with pytest.raises(InvalidInputError, match=r"w0: .*w1: .*\(and \d+ more\)"):
        read_layout(json.dumps({"tensors": many, "buckets": [4096]}))


def test_pieces_of_one_tensor_may_come_from_several_senders():
    half = entry(slice=[[0, 8], [0, 16]], nbytes=128)
    other = entry(slice=[[8, 16], [0, 16]], nbytes=128, offset=256, sender=1)
    found = read_layout(json.dumps({"tensors": [half, other], "buckets": [512]}))
    assert [e.local_shape for e in found.tensors] == [[8, 16], [8, 16]]


DIGESTS = [1, 2, 0xFFFF_FFFF_FFFF_FFFF]
TEXT = "0000000000000001" + "0000000000000002" + "ffffffffffffffff"


def test_a_seal_follows_its_offer_and_binds_all_digests_to_the_layout():
    seal = make_seal(offer(), DIGESTS)
    assert (seal.job_uid, seal.epoch, seal.sync_id, seal.version) == ("job", 2, 7, 5)
    assert seal.digests == TEXT
    assert seal.total == total_of(offer().head.layout, TEXT)
    assert parse_seal(seal.model_dump_json(), offer()) == seal


def test_the_total_tells_digests_that_changed_places_and_other_layouts():
    totals = {total_of("a", "12"), total_of("a", "21"), total_of("b", "12")}
    assert len(totals) == 3
    assert all(len(total) == 32 for total in totals)


def test_differences_name_each_tensor_that_is_not_as_sealed():
    seal = make_seal(offer(), DIGESTS)
    assert seal.differences(offer(), TEXT) == []
    assert seal.differences(offer(), joined([9, 2, 3])) == [
        "norm.weight: digest 0000000000000009, sealed 0000000000000001",
        "q_proj.weight_scale_inv: digest 0000000000000003, sealed ffffffffffffffff",
    ]


def test_a_seal_of_another_sync_or_with_other_tensors_or_a_wrong_total_is_refused():
    seal = make_seal(offer(), DIGESTS)
    with pytest.raises(StaleError, match="seal: is of sync 7, version 5; the offer is of sync 8, version 5"):
        parse_seal(seal.model_dump_json(), offer(sync_id=8))
    with pytest.raises(StaleError, match="seal: belongs to epoch 2"):
        parse_seal(seal.model_dump_json(), offer(epoch=3))
    with pytest.raises(InvalidInputError, match="seal: total '0' is not that of its layout and digests"):
        parse_seal(seal.model_copy(update={"total": "0"}).model_dump_json(), offer())
    text = seal.model_copy(update={"digests": TEXT[16:]}).model_dump_json()
    with pytest.raises(InvalidInputError, match="seal: 32 digits for 3 tensors of 16 each"):
        parse_seal(text, offer())


def test_a_seal_needs_every_digest():
    with pytest.raises(ValueError, match="digests: 1 for 3 tensors"):
        make_seal(offer(), [1])


def test_records_of_the_path_need_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, fp8rl_workers.weights.offer, fp8rl_workers.weights.specs, fp8rl_workers.weights.bucket\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_entry_knows_its_local_shape():
    assert TensorEntry(**entry()).local_shape == [16, 16]
