"""Loading in two phases: `prepare` beside the running engine, `commit` in one turn of its loop.

*Prepare* (the agent's thread) makes a shadow of the parameters' storage and takes digests. Where the wire is shared and what it
brings is what the engine holds, the sender's staging *is* the shadow: it is digested against the seal, and that is all. Else the
shadow is a copy of the storages: it is written from the staging and compared with it, and the staging is digested after it was
read, so that a byte that changed on the wire or in the staging is found whenever it changed. *Commit* (the engine's thread)
first checks that what was prepared still stands (`verify`), then copies shadow to parameters by one launch (`apply`); pointers
stay. Until `apply` the parameters are untouched.

`verify` digests again in host memory. In a GPU's memory it relies on the digest of `prepare`: the engine stands still
meanwhile, and a second pass would cost as much as half the copy.

The first commit, and every commit of an engine whose layout could not be learned (`fallback` says what and why), goes
through vLLM's reload instead: there the staging itself is kept and its digests are checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from fp8rl_workers.errors import DigestError, InvalidModelError, NotYetError
from fp8rl_workers.weights.kernels import CopyPlan, copy_plan, digest_plan, whole
from fp8rl_workers.weights.load_layout import Layout, Signature
from fp8rl_workers.weights.load_learn import LearnError, PartReload, Reload, learn, signature_of, storages_of
from fp8rl_workers.weights.load_staging import Checker, Hold, Staging
from fp8rl_workers.weights.offer import Seal

__all__ = ["Hold", "Loader", "Shadow", "Staging", "check_signature"]


class Shadow:
    """A copy of the storages that a layout fills, written beside the running engine."""

    def __init__(self, live: list[Tensor], layout: Layout) -> None:
        self.layout = layout
        self.copies = [
            flat.clone() if index in layout.storages else flat.new_empty(0) for index, flat in enumerate(live)
        ]
        filled = [self.copies[i] for i in layout.storages]
        self._plan = copy_plan(
            [(copy.view(1, -1), live[i].view(1, -1)) for copy, i in zip(filled, layout.storages, strict=True)]
        )
        self._check = digest_plan([[whole(copy)] for copy in filled])

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
        self._check.run()
        return self._check.finish()

    def apply(self) -> None:
        """Copy to the live parameters."""
        self._plan.run()


class Direct:
    """The copy from a shared staging straight to the live parameters, planned once for its buckets."""

    def __init__(self, live: list[Tensor], layout: Layout, staging: Staging) -> None:
        self.place = staging.place
        self._plan: CopyPlan = copy_plan(
            [pair for name, tensor in staging.inputs() for pair in layout.pairs(name, tensor, live)]
        )

    @staticmethod
    def possible(live: list[Tensor], layout: Layout, staging: Staging) -> bool:
        """Whether the staging holds what the engine holds, on its device, in its dtypes."""
        return (
            staging.shared
            and staging.hold == "codes"
            and all(
                source.dtype == target.dtype and source.device == target.device
                for name, tensor in staging.inputs()
                for source, target in layout.pairs(name, tensor, live)
            )
        )

    def apply(self) -> None:
        """Copy to the live parameters."""
        self._plan.run()


class Loader:
    """Both phases for one worker rank. `prepare` and the others come from two threads, never at once (`inference.agent`)."""

    def __init__(
        self,
        model: nn.Module,
        reload: Reload,
        *,
        whole: bool,
        mode: str,
        unlearnable: Callable[[], dict[str, str]],
        part_reload: PartReload | None = None,
    ) -> None:
        """Args:
        model: The engine's model on this rank.
        reload: vLLM's reload of it.
        whole: Whether this rank holds every tensor whole.
        mode: `weightSync.mode`; `reload` learns nothing.
        unlearnable: Parameters that kernels copy elsewhere, with the reason (empty where none).
        part_reload: See `load_learn.learn`.
        """
        self.model = model
        self.reload = reload
        self.part_reload = part_reload
        self.whole = whole
        self.mode = mode
        self.unlearnable = unlearnable
        self.fallback: dict[str, str] = {}
        self.signature: Signature | None = None
        self.layout: Layout | None = None
        self._live: list[Tensor] = []
        self._checker = Checker()
        self.shadow: Shadow | None = None
        self._direct: Direct | None = None
        self._seen: tuple[int, ...] = ()
        self._staging: Staging | None = None
        self._ready: Shadow | Direct | None = None
        self._seal: Seal | None = None
        self._digests: list[int] = []

    @property
    def path(self) -> Literal["none", "plan", "reload"]:
        """How the next commit loads."""
        if self.signature is None:
            return "none"
        return "plan" if self.layout is not None else "reload"

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def prepare(self, staging: Staging, seal: Seal) -> None:
        """Make one received sync ready to commit. Frees what was prepared before.

        Raises:
            DigestError: bytes are not as they were sent.
            InvalidModelError: tensors are others than the engine was started with: all differences.
        """
        self.forget()
        self._check_tensors(staging)
        ready = self._ready_for(staging)
        if isinstance(ready, Shadow):
            ready.write(staging.inputs())
            self._digests = ready.digests()
        self._checker.check(staging, seal)
        self._staging = None if isinstance(ready, Shadow) else staging
        self._ready = ready
        self._seal = seal

    def forget(self) -> None:
        """Drop what is prepared."""
        self._staging = self._seal = self._ready = None

    def leave(self) -> None:
        """Drop everything that refers to the memory of an epoch."""
        self.forget()
        self._checker.forget()
        self._direct, self._seen = None, ()

    def verify(self) -> None:
        """Check that what was prepared still stands, byte for byte (see the module's text for a GPU's memory).

        Raises:
            NotYetError: nothing is prepared.
            DigestError: a byte has changed since.
        """
        if self._seal is None:
            raise NotYetError("no version is prepared")
        if self._staging is not None:
            if self._ready is None or self._staging.buckets[0].device.type == "cpu":
                self._checker.check(self._staging, self._seal)
        elif isinstance(self._ready, Shadow) and self._ready.digests() != self._digests:
            raise DigestError(f"version {self._seal.version}: the shadow has changed since it was verified")

    def apply(self) -> None:
        """Load what was verified into the live parameters."""
        if self._ready is not None:
            self._ready.apply()
        elif self._staging is not None and self.signature is None:
            self._load_first(self._staging)
        elif self._staging is not None:
            self.reload(self._staging.inputs())
        self.forget()

    def _check_tensors(self, staging: Staging) -> None:
        """Refuse other tensors than the known ones; a layout that was looked at is not looked at again."""
        if self.signature is None or self._seen == staging.place:
            return
        check_signature(self.signature, signature_of(staging.inputs()))
        self._seen = staging.place if staging.shared else ()

    def _ready_for(self, staging: Staging) -> Shadow | Direct | None:
        """What the commit will copy from; None: it reloads."""
        if self.layout is None:
            return None
        if self._direct is not None and self._direct.place == staging.place:
            return self._direct
        if Direct.possible(self._live, self.layout, staging):
            self._direct, self.shadow = Direct(self._live, self.layout, staging), None
            return self._direct
        if self.shadow is None:
            self.shadow = Shadow(self._live, self.layout)
        return self.shadow

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
                self.layout = learn(
                    self.model, self.reload, staging.inputs, whole=self.whole, part_reload=self.part_reload
                )
                self._live = [flat for _, flat in storages_of(self.model)]
                if not Direct.possible(self._live, self.layout, staging):
                    self.shadow = Shadow(self._live, self.layout)
            except LearnError as error:
                self.fallback = error.reasons
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what learning took for a while
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
