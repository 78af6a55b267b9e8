"""The KV cache of the lean forward: one pool of rooms, each for one sequence.

    pool[layer, key or value, room, head, position, :]   float32

All rooms lie side by side, so that sequences in neighbouring rooms can be attended to in one batched product without copying
anything. That asks for a fixed stride, and so for room for the longest sequence in every room; it costs address space, not memory:
the pool is one anonymous mapping, a page of it is there once it has been written to, and closing a sequence gives its pages back.

Rules:

1. A sequence gets the lowest free room, so that rooms in use lie close together.
2. What was never written reads as zero and what an earlier sequence left is finite, so a masked position adds exactly nothing.
3. Lengths are rounded up to :data:`ROUND` wherever a kernel sees them: sums over them are then cut into the same pieces whatever
   the padding, and padding does not change a result.
4. The budget counts capacities that were asked for, not the mapping. Whoever opens sequences keeps within it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from trio_sse.backends.transformers.sampling import Sampler

__all__ = ["ROUND", "CachePool", "LeanCache", "rounded", "settle"]

ROUND = 32


def rounded(length: int) -> int:
    """``length`` rounded up to what kernels see."""
    return -(-length // ROUND) * ROUND


def settle(device: torch.device) -> None:
    """Waits until the device has done what it was given, so that memory is given back that nobody uses any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class LeanCache:
    """One sequence: its room, how many tokens are in it, and its sampler."""

    __slots__ = ("capacity", "closed", "length", "room", "sampler")

    def __init__(self, room: int, capacity: int, sampler: Sampler) -> None:
        self.room = room
        self.capacity = capacity
        self.length = 0
        self.sampler = sampler
        self.closed = False


class CachePool:
    """``rooms`` rooms for up to ``capacity`` tokens each.

    Attributes:
      flat: per layer, all rows of one head and position: what new keys and values are written to, by row number.
      keys, values: per layer, (rooms × heads, positions, head_dim).
    """

    def __init__(self, layers: int, rooms: int, heads: int, capacity: int, head_dim: int, device: torch.device) -> None:
        self.rooms, self.heads, self.capacity = rooms, heads, rounded(capacity)
        self.token_bytes = layers * 2 * heads * head_dim * 4
        shape = (layers, 2, rooms, heads, self.capacity, head_dim)
        self._memory, self.tensor = _zeros(shape, device)
        self.flat = [layer.view(-1, head_dim) for layer in self.tensor]
        self.keys = [layer[0].flatten(0, 1) for layer in self.tensor]
        self.values = [layer[1].flatten(0, 1) for layer in self.tensor]
        self._room_bytes = heads * self.capacity * head_dim * 4
        self._free = list(range(rooms))

    def take(self) -> int:
        """The lowest free room."""
        if not self._free:
            raise RuntimeError("the cache pool has no free room")
        room = min(self._free)
        self._free.remove(room)
        return room

    def give_back(self, room: int, length: int) -> None:
        """Frees a room in which ``length`` tokens were written, and its memory with it."""
        self._free.append(room)
        if self._memory is not None and length:
            for begin in range(room * self._room_bytes, len(self._memory), self.rooms * self._room_bytes):
                _release(self._memory, begin, self._room_bytes)

    def rows(self, room: int, begin: int, count: int) -> Tensor:
        """The row numbers in ``flat`` for ``count`` positions from ``begin``: (count, 2 × heads), keys first."""
        part = torch.arange(2)[:, None] * self.rooms + room
        head = (part * self.heads + torch.arange(self.heads)).flatten() * self.capacity
        return torch.arange(begin, begin + count)[:, None] + head


def _zeros(shape: tuple[int, ...], device: torch.device) -> tuple[mmap.mmap | None, Tensor]:
    """Zeros that take no memory until they are written to, where the system can do that."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return None, torch.zeros(shape, dtype=torch.float32, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(shape) * 4, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A sequence's first token touches every head of every layer. With pages of 2 MiB that would fill the whole room.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(shape)


def _release(memory: mmap.mmap, begin: int, size: int) -> None:
    """Gives whole pages inside the range back to the system; they read as zero from then on."""
    advise: Callable[[int, int, int], None] | None = getattr(memory, "madvise", None)
    option = getattr(mmap, "MADV_DONTNEED", None)
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and option is not None and last > first:
        advise(option, first, last - first)
