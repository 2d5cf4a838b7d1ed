"""A sequence's hold on blocks: linear, that is, used up when taken."""

from __future__ import annotations

from dataclasses import dataclass, field

ABSENT = -1


class LeaseSpentError(RuntimeError):
    """A lease was used after it had been taken: our own mistake."""


@dataclass(slots=True, eq=False)
class BlockLease:
    """The blocks of one sequence: per cache group a table of blocks, `ABSENT` where none is held.

    `capacity` is the number of tokens that the tables have room for; `num_named` the tokens whose blocks
    are already known to the prefix index.
    """

    tables: list[list[int]]
    capacity: int = 0
    num_named: int = 0
    _is_spent: bool = field(default=False, repr=False)

    def blocks(self) -> list[int]:
        """Return all blocks held, last ones first, so that eviction keeps the beginnings of prompts longest."""
        self.check()
        return [block for table in self.tables for block in reversed(table) if block != ABSENT]

    def take(self) -> list[int]:
        """Use the lease up and return its blocks. Raises LeaseSpentError the second time."""
        blocks = self.blocks()
        self._is_spent = True
        self.tables = []
        return blocks

    def check(self) -> None:
        """Raise LeaseSpentError if the lease was taken."""
        if self._is_spent:
            raise LeaseSpentError("a block lease was used after it was released")
