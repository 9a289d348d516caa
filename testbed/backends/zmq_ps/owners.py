"""Which server merges which key, so that all ranks find the same by themselves."""

from __future__ import annotations


class Owners:
    """Each new key goes to the server that has the fewest bytes of its channel so far.

    Not every payload can be cut, and small ones need not be (`nouns.CUT_BYTES`): their whole keys
    are shared out, by the bytes of the uncompressed message:
    those are equal on all ranks, those of payloads need not be. All ranks run the requests of a
    channel in one order and those of several channels in any, so each channel counts by itself,
    from another server on. A server has at most one key's bytes per channel more than another.

    Args:
        num_servers: at least 1.

    Example:
        >>> owners = Owners(2)
        >>> [owners.owner(0, key, size) for key, size in (("a", 9), ("b", 4), ("c", 4), ("a", 9))]
        [0, 1, 1, 0]
    """

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._owners: dict[tuple[int, str], int] = {}
        self._loads: dict[int, list[int]] = {}

    def owner(self, channel: int, key: str, num_bytes: int) -> int:
        """The server of a key on a channel, always the same; called as requests start.

        Args:
            channel: of the request.
            key: its name.
            num_bytes: of the message, equal on all ranks; counts when the key is new.
        """
        name = (channel, key)
        if name not in self._owners:
            loads = self._loads.setdefault(channel, [0] * self._num_servers)
            turns = [(channel + turn) % self._num_servers for turn in range(self._num_servers)]
            server = min(turns, key=lambda s: loads[s])
            loads[server] += max(1, num_bytes)
            self._owners[name] = server
        return self._owners[name]
