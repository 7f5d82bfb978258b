"""One sync as received, and whether its bytes are those that were sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fp8rl_workers.errors import DigestError
from fp8rl_workers.weights.cast import dequantize
from fp8rl_workers.weights.digest import joined
from fp8rl_workers.weights.kernels import DigestPlan, digest_plan, whole
from fp8rl_workers.weights.offer import Offer, Seal, TensorEntry, members_of

Hold = Literal["codes", "bf16"]
"""What the engine holds of a quantized weight: the wire's codes and scales, or the BF16 values that they stand for."""


class Staging:
    """A buffer per bucket: this process's own, or, where `shared`, the sender's memory."""

    def __init__(
        self, offer: Offer, hold: Hold, buckets: Sequence[Tensor] | None = None, *, shared: bool = False
    ) -> None:
        """`buckets`: uint8, as large as the offer says; None makes new ones in host memory."""
        self.offer = offer
        self.hold = hold
        self.shared = shared
        self.buckets = (
            [torch.empty(size, dtype=torch.uint8) for size in offer.buckets] if buckets is None else list(buckets)
        )

    @property
    def place(self) -> tuple[int, ...]:
        """What a plan over these buckets depends on: the layout and the addresses."""
        return (id(self.offer.layout), *(bucket.data_ptr() for bucket in self.buckets))

    def tensor(self, entry: TensorEntry) -> Tensor:
        """View of one wire tensor."""
        data = self.buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
        return data.view(getattr(torch, entry.dtype)).reshape(entry.local_shape)

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """What the engine's loader takes, in wire order, by HF name: wire tensors (stacks one by one), or quantized weights as BF16."""
        parts: dict[str, dict[str, Tensor]] = {}
        for entry in self.offer.tensors:
            parts.setdefault(entry.weight, {})[entry.name.removeprefix(entry.weight)] = self.tensor(entry)
        for weight, tensors in parts.items():
            values = tensors
            if self.hold == "bf16" and len(tensors) > 1:
                values = {"": dequantize(tensors, self.offer.wire)}
            for e, name in enumerate(members_of(weight, tensors[""].shape)):
                yield from ((name + suffix, t[e] if "*" in weight else t) for suffix, t in values.items())


class Checker:
    """Digests of stagings; the plan over a shared one is kept, since its buckets come again."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._plan: DigestPlan | None = None

    def check(self, staging: Staging, seal: Seal) -> None:
        """Compare every wire tensor with what was sent.

        Raises:
            DigestError: names each tensor whose bytes are others.
        """
        if self._plan is None or self._place != staging.place:
            self._plan = digest_plan([[whole(staging.tensor(entry))] for entry in staging.offer.tensors])
            self._place = staging.place
        self._plan.run()
        found = joined(self._plan.finish())
        if not staging.shared:
            self.forget()
        differences = seal.differences(staging.offer, found)
        if differences:
            version = staging.offer.version
            raise DigestError(f"version {version}: {len(differences)} tensors differ: {'; '.join(differences)}")

    def forget(self) -> None:
        """Keep no buckets."""
        self._plan, self._place = None, ()
