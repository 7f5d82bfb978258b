"""Loading in two phases: `prepare` beside the running engine, `commit` in one turn of its loop.

*Prepare* (the agent's thread) fills a shadow of the parameters' storage and takes digests: of the staging after it was
read, against the seal of the sender, so that a byte that changed on the wire or in the staging is found whenever it changed;
and of the shadow after it was compared with its source. *Commit* (the engine's thread) first checks the shadow's digest
again (`verify`), then copies shadow to parameters (`apply`); pointers stay. Until `apply` the parameters are untouched.

The first commit, and every commit of an engine whose layout could not be learned (`fallback` says what and why), goes
through vLLM's reload instead: there the staging itself is kept and its digests are checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from fp8rl_workers.errors import DigestError, InvalidModelError, NotYetError
from fp8rl_workers.weights.cast import dequantize
from fp8rl_workers.weights.digest import digest, to_hex
from fp8rl_workers.weights.load_layout import Layout, LearnError, Reload, Signature, learn, signature_of, storages_of
from fp8rl_workers.weights.offer import Offer, Seal, TensorEntry

Hold = Literal["codes", "bf16"]
"""What the engine holds of a quantized weight: the wire's codes and scales, or the BF16 values that they stand for."""


class Staging:
    """One sync as received: a buffer per bucket, in this process's own memory."""

    def __init__(self, offer: Offer, hold: Hold) -> None:
        self.offer = offer
        self.hold = hold
        self.buckets = [torch.empty(size, dtype=torch.uint8) for size in offer.buckets]

    def tensor(self, entry: TensorEntry) -> Tensor:
        """View of one wire tensor."""
        data = self.buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
        return data.view(getattr(torch, entry.dtype)).reshape(entry.local_shape)

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """What the engine's loader takes, in wire order: wire tensors, or quantized weights as BF16."""
        parts: dict[str, dict[str, Tensor]] = {}
        for entry in self.offer.tensors:
            parts.setdefault(entry.weight, {})[entry.name.removeprefix(entry.weight)] = self.tensor(entry)
        for weight, tensors in parts.items():
            if self.hold == "codes" or len(tensors) == 1:
                yield from ((weight + suffix, tensor) for suffix, tensor in tensors.items())
            else:
                yield weight, dequantize(tensors, self.offer.wire)

    def check(self, seal: Seal) -> None:
        """Compare every wire tensor with what was sent.

        Raises:
            DigestError: names each tensor whose bytes are others.
        """
        found = {entry.name: to_hex(digest(self.tensor(entry))) for entry in self.offer.tensors}
        differences = seal.differences(found)
        if differences:
            raise DigestError(
                f"version {self.offer.version}: {len(differences)} tensors differ: {'; '.join(differences)}"
            )


class Shadow:
    """A copy of the storages that a layout fills, written beside the running engine."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.live = [flat for _, flat in storages_of(model)]
        self.copies = [
            flat.clone() if index in layout.storages else flat.new_empty(0) for index, flat in enumerate(self.live)
        ]

    def write(self, inputs: Iterator[tuple[str, Tensor]]) -> None:
        """Write all inputs.

        Raises:
            DigestError: the memory does not hold what was just written.
        """
        for name, tensor in inputs:
            self.layout.write(name, tensor, self.copies)
            if not self.layout.matches(name, tensor, self.copies):
                raise DigestError(f"{name}: the shadow does not hold what was written to it")

    def digests(self) -> list[int]:
        """Digest of each storage's copy."""
        return [digest(self.copies[index]) for index in self.layout.storages]

    def apply(self) -> None:
        """Copy to the live parameters."""
        torch._foreach_copy_(
            [self.live[index] for index in self.layout.storages], [self.copies[index] for index in self.layout.storages]
        )


class Loader:
    """Both phases for one worker rank. `prepare` and the others come from two threads, never at once (`inference.agent`)."""

    def __init__(
        self, model: nn.Module, reload: Reload, *, whole: bool, mode: str, unlearnable: Callable[[], dict[str, str]]
    ) -> None:
        """Args:
        model: The engine's model on this rank.
        reload: vLLM's reload of it.
        whole: Whether this rank holds every tensor whole.
        mode: `weightSync.mode`; `reload` learns nothing.
        unlearnable: Parameters that kernels copy elsewhere, with the reason (empty where none).
        """
        self.model = model
        self.reload = reload
        self.whole = whole
        self.mode = mode
        self.unlearnable = unlearnable
        self.fallback: dict[str, str] = {}
        self.signature: Signature | None = None
        self.shadow: Shadow | None = None
        self._staging: Staging | None = None
        self._seal: Seal | None = None
        self._digests: list[int] = []

    @property
    def path(self) -> Literal["none", "plan", "reload"]:
        """How the next commit loads."""
        if self.signature is None:
            return "none"
        return "plan" if self.shadow is not None else "reload"

    def prepare(self, staging: Staging, seal: Seal) -> None:
        """Make one received sync ready to commit. Frees what was prepared before.

        Raises:
            DigestError: bytes are not as they were sent.
            InvalidModelError: tensors are others than the engine was started with: all differences.
        """
        self.forget()
        if self.signature is not None:
            check_signature(self.signature, signature_of(staging.inputs()))
        if self.shadow is not None:
            self.shadow.write(staging.inputs())
            self._digests = self.shadow.digests()
            staging.check(seal)
        else:
            staging.check(seal)
            self._staging = staging
        self._seal = seal

    def forget(self) -> None:
        """Drop what is prepared."""
        self._staging = self._seal = None

    def verify(self) -> None:
        """Check that what was prepared still stands, byte for byte.

        Raises:
            NotYetError: nothing is prepared.
            DigestError: a byte has changed since.
        """
        if self._seal is None:
            raise NotYetError("no version is prepared")
        if self._staging is not None:
            self._staging.check(self._seal)
        elif self.shadow is None or self.shadow.digests() != self._digests:
            raise DigestError(f"version {self._seal.version}: the shadow has changed since it was verified")

    def apply(self) -> None:
        """Load what was verified into the live parameters."""
        if self._staging is None:
            assert self.shadow is not None
            self.shadow.apply()
        elif self.signature is None:
            self._load_first(self._staging)
        else:
            self.reload(self._staging.inputs())
        self.forget()

    def _load_first(self, staging: Staging) -> None:
        """The first sync: load through vLLM, and learn where everything went."""
        if self.mode == "reload":
            self.fallback = {"*": "weightSync.mode is reload"}
        else:
            self.fallback = self.unlearnable()
        if self.fallback:
            self.reload(staging.inputs())
        else:
            try:
                layout = learn(self.model, self.reload, staging.inputs, whole=self.whole)
                self.shadow = Shadow(self.model, layout)
            except LearnError as error:
                self.fallback = error.reasons
        self.signature = signature_of(staging.inputs())


def check_signature(known: Signature, offered: Signature) -> None:
    """Refuse other tensors than the known ones.

    Raises:
        InvalidModelError: all missing and unknown names, and all other shapes and dtypes.
    """
    if known == offered:
        return
    old = {name: (dtype, shape) for name, dtype, shape in known}
    new = {name: (dtype, shape) for name, dtype, shape in offered}
    faults = [f"{name}: missing" for name in old if name not in new]
    faults += [f"{name}: not known" for name in new if name not in old]
    faults += [
        f"{name}: {new[name][0]} {list(new[name][1])}, the engine holds {old[name][0]} {list(old[name][1])}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    if faults:
        raise InvalidModelError(f"{len(faults)} offered tensors do not fit: {'; '.join(faults)}")
