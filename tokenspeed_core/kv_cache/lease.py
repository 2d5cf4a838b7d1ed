"""The blocks that one sequence holds. A lease can be released only once."""

from __future__ import annotations

from dataclasses import dataclass, field

ABSENT = -1


class LeaseSpentError(RuntimeError):
    """A lease was used after its release. This is a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class BlockLease:
    """The block tables of one sequence, one per cache group; `ABSENT` marks an entry without a block.

    `spare` are the blocks of each group's last page that the table does not use yet, the next one last. `capacity` is
    the number of tokens that fit into the tables' blocks. `num_hashed_tokens` is the number of tokens in blocks that the
    prefix index lists.
    """

    tables: list[list[int]]
    spare: list[list[int]] = field(default_factory=list)
    capacity: int = 0
    num_hashed_tokens: int = 0
    _is_spent: bool = field(default=False, repr=False)

    def spend(self) -> None:
        """Mark the lease as released. Raises LeaseSpentError on the second call."""
        self.check()
        self._is_spent = True
        self.tables = []
        self.spare = []

    @property
    def num_entries(self) -> int:
        """Entries of all tables."""
        return len(self.tables) * len(self.tables[0]) if self.tables else 0

    def take(self) -> BlockLease:
        """Return a lease of the same blocks; this one is spent. Raises LeaseSpentError if it is already."""
        self.check()
        taken = BlockLease(self.tables, self.spare, self.capacity, self.num_hashed_tokens)
        self.spend()
        return taken

    def check(self) -> None:
        """Raise LeaseSpentError if the lease is spent."""
        if self._is_spent:
            raise LeaseSpentError("a block lease was used after its release")
