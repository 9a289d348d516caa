"""In which order gradients leave: the same on every rank, whatever order they become ready in.

A ring matches messages by position, so a rank must not send what the others do not expect. The
gradients therefore leave in one agreed order; each as soon as it and all before it are ready.
"""

from __future__ import annotations

from collections.abc import Sequence


class InOrderRelease:
    """Releases items in a fixed order.

    Example:
        >>> release = InOrderRelease([5, 3, 4])
        >>> release.ready(3), release.ready(5), release.ready(4)
        ([], [5, 3], [4])
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._ready: set[int] = set()
        self._next = 0

    def ready(self, item: int) -> list[int]:
        """The item is ready; returns what may leave now, in order.

        Raises:
            ValueError: the item was ready before.
        """
        if item in self._ready:
            raise ValueError(f"item {item} is ready for the second time")
        self._ready.add(item)
        start = self._next
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
        return list(self._order[start : self._next])
