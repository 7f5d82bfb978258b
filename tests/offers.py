"""Offers for the tests of both ends."""

from __future__ import annotations

from typing import Any

from fp8rl_workers.weights.group import Group
from fp8rl_workers.weights.offer import Offer, OfferHead, WireLayout, layout_digest


def offer_of(layout: WireLayout, **head: Any) -> Offer:
    """An offer with this layout; what `head` does not say is the first sync of job `job`."""
    fields = {"job_uid": "job", "epoch": 1, "sync_id": 1, "version": 1, "attempt": 0, "step": 1}
    fields |= {"wire": "blockwise", "scale_format": "pow2", "layout": layout_digest(layout.model_dump_json())}
    return Offer(OfferHead(**(fields | head)), layout)


def put(group: Group, n: int, offer: Offer) -> None:
    """Offer it to all ranks, as a trainer does."""
    group.put_layout(offer.head.layout, offer.layout.model_dump_json())
    group.put_offer(n, offer.head.model_dump_json())
