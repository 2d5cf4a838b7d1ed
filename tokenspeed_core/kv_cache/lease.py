"""The blocks that one sequence holds. A lease can be released only once."""

from __future__ import annotations

from dataclasses import dataclass, field

ABSENT = -1


class LeaseSpentError(RuntimeError):
    """A lease was used after its release. This is a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class BlockLease:
    """The block tables of one sequence, one per cache group; `ABSENT` marks an entry without a block.

    `capacity` is the number of tokens that the tables have room for. `num_hashed_tokens` is the number of tokens
    whose blocks are in the prefix index.
    """

    tables: list[list[int]]
    capacity: int = 0
    num_hashed_tokens: int = 0
    _is_spent: bool = field(default=False, repr=False)

    def blocks(self) -> list[int]:
        """Return all blocks, the last of each table first, so that the start of a prompt is evicted last."""
        self.check()
        return [block for table in self.tables for block in reversed(table) if block != ABSENT]

    def take(self) -> list[int]:
        """Spend the lease and return its blocks. Raises LeaseSpentError on the second call."""
        blocks = self.blocks()
        self._is_spent = True
        self.tables = []
        return blocks

    def check(self) -> None:
        """Raise LeaseSpentError if the lease is spent."""
        if self._is_spent:
            raise LeaseSpentError("a block lease was used after its release")
