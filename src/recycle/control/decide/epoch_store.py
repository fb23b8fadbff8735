"""`EpochStore`: the entries by which the members of an epoch make their process groups; each goes to those who ask for it."""

from collections import defaultdict
from collections.abc import Callable

from recycle.control.decide.messages import StoreEntry, StoreRequest

# A key that ends so stands for all entries that begin with the rest of it, one for each member.
OF_ALL = "*"


class EpochStore:
    """The entries of one epoch of so many members, and who waits for which. A connection is named by its number.

    `send` is called with a connection and an entry that it has asked for.
    """

    def __init__(self, num_members: int, send: Callable[[int, StoreEntry], None]) -> None:
        self._num_members, self._send = num_members, send
        self._entries: dict[str, StoreEntry] = {}
        self._nums: dict[str, int] = defaultdict(int)
        self._waiting: dict[str, list[int]] = defaultdict(list)

    def take(self, connection: int | None, message: StoreEntry | StoreRequest) -> None:
        """Act on a member's entry, or on its request for entries, which are sent now or when they come."""
        if isinstance(message, StoreEntry):
            self._put(message)
        elif connection is not None:
            for key in message.keys:
                self._request(connection, message.epoch, key)

    def _put(self, entry: StoreEntry) -> None:
        if entry.key not in self._entries:
            folder = f"{entry.key.rpartition('/')[0]}/{OF_ALL}"
            self._nums[folder] += 1
            if self._nums[folder] == self._num_members:
                self._answer(StoreEntry(entry.epoch, folder, ""))
        self._entries[entry.key] = entry
        self._answer(entry)

    def _answer(self, entry: StoreEntry) -> None:
        for connection in self._waiting.pop(entry.key, ()):
            self._send(connection, entry)

    def _request(self, connection: int, epoch: int, key: str) -> None:
        if key in self._entries:
            self._send(connection, self._entries[key])
        elif key.endswith(f"/{OF_ALL}") and self._nums[key] == self._num_members:
            self._send(connection, StoreEntry(epoch, key, ""))
        else:
            self._waiting[key].append(connection)
