"""Worker extension of the tests (vLLM's `--worker-extension-cls`): damages memory of the running engine."""

from __future__ import annotations


class Faults:
    """Methods that the dev route `/collective_rpc` can call on the worker."""

    def flip_shadow(self) -> None:
        """One bit of what is prepared."""
        import torch

        shadow = self.weight_transfer_engine.loader.shadow
        copy = shadow.copies[shadow.layout.storages[0]]
        copy.view(torch.uint8)[17] ^= 1

    def flip_next_staging(self) -> None:
        """One bit of the next staging, after it was received and before it is read."""
        loader = self.weight_transfer_engine.loader
        plain = loader.prepare

        def prepare(staging, seal):
            loader.prepare = plain
            staging.buckets[0][100] ^= 1
            plain(staging, seal)

        loader.prepare = prepare
