"""Which part of a shared buffer belongs to which request (docs/design.md section 10)."""

from __future__ import annotations


class Regions:
    """Regions of slots, lowest place first; what is given back joins with its free neighbours.

    A request keeps one region from its first token to its last, as large as it can come to need: it is let in
    only where there is room for all of that, so memory cannot run out midway.

    Args:
        capacity: slots there are.
        unit: regions are multiples of it, and begin at some.
    """

    def __init__(self, capacity: int, unit: int = 1) -> None:
        self.capacity, self._unit = capacity, unit
        self._taken: dict[int, int] = {}  # size by begin, in order of begin

    def take(self, size: int) -> int | None:
        """Where a region of `size` slots begins; None where there is no room for one."""
        size, at = self.rounded(size), 0
        for begin, taken in self._taken.items():
            if begin - at >= size:
                break
            at = begin + taken
        return None if self.capacity - at < size else self._enter(at, size)

    def take_last(self, size: int) -> int | None:
        """Like `take`, in the last place that has room for it."""
        size, end = self.rounded(size), self.capacity // self._unit * self._unit
        for begin, taken in reversed(self._taken.items()):
            if end - begin - taken >= size:
                break
            end = begin
        return None if end < size else self._enter(end - size, size)

    def rounded(self, size: int) -> int:
        """What a region of `size` slots takes."""
        return -(-size // self._unit) * self._unit

    def give(self, begin: int) -> None:
        """Free the region that begins there."""
        del self._taken[begin]

    def grow(self, capacity: int) -> None:
        """Room up to `capacity`; never shrinks."""
        self.capacity = max(self.capacity, capacity)

    @property
    def free(self) -> int:
        """Slots that belong to nobody."""
        return self.capacity - sum(self._taken.values())

    @property
    def used(self) -> int:
        """One past the last region."""
        return max((begin + size for begin, size in self._taken.items()), default=0)

    def __len__(self) -> int:
        return len(self._taken)

    def _enter(self, begin: int, size: int) -> int:
        self._taken[begin] = size
        self._taken = dict(sorted(self._taken.items()))
        return begin
