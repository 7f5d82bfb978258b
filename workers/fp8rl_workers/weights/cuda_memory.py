"""GPU memory that processes of one machine share: an allocation of its own, known to others by a file descriptor.

It is made by CUDA's virtual memory management (cuMemCreate, cuMemMap), not by cudaMalloc with a cudaIpc handle: memory that is mapped
through such a handle is read at 0.6 to 0.85 of the card's bandwidth, this at all of it. It is none of the caching allocator's, so nothing
else ever lies in it. A mapping lives until the last tensor on it is gone, the memory until the last mapping is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA driver gives back.

    Raises:
        RuntimeError: its error, by name.
    """
    from cuda.bindings import driver

    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(code)
        _, words = driver.cuGetErrorString(code)
        raise RuntimeError(f"{name.decode()}: {words.decode()}")
    return values[0] if values else None


class Mapping:
    """An address range of this process: unmapped when nobody refers to it any more."""

    def __init__(self, handle: Any, size: int, granularity: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self.size, self.device, self.handle = size, device, handle
        self.pointer = check(driver.cuMemAddressReserve(size, granularity, 0, 0))
        check(driver.cuMemMap(self.pointer, size, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(self.pointer, size, [access], 1))
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (int(self.pointer), False),
            "version": 3,
        }

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the driver takes it back with the process
        from cuda.bindings import driver

        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            driver.cuMemUnmap(self.pointer, self.size)
            driver.cuMemAddressFree(self.pointer, self.size)
            driver.cuMemRelease(self.handle)


class CudaRegion:
    """Bytes of GPU memory, made here, or another process's by its `descriptor`."""

    def __init__(self, size: int, device: torch.device, descriptor: int | None = None) -> None:
        """Allocate or map.

        Raises:
            RuntimeError: CUDA's own words.
        """
        from cuda.bindings import driver

        index = torch.cuda.current_device() if device.index is None else device.index
        place = torch.device("cuda", index)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = kind
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = index
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with torch.cuda.device(place):
            torch.zeros(1, device=place)  # the context is made
            granularity = check(driver.cuMemGetAllocationGranularity(wanted, flag))
            whole = -(-size // granularity) * granularity
            if descriptor is None:
                handle = check(driver.cuMemCreate(whole, wanted, 0))
                self.descriptor = int(check(driver.cuMemExportToShareableHandle(handle, kind, 0)))
            else:
                handle = check(driver.cuMemImportFromShareableHandle(descriptor, kind))
                self.descriptor = descriptor
            memory = Mapping(handle, whole, granularity, place)
            self.tensor = torch.as_tensor(memory, device=place)[:size]
