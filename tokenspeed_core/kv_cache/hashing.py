"""The chain of hashes that names the content of blocks, computed once per request and extended."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from tokenspeed_core.api.step import I32


class HashChain:
    """Digest i names the tokens `[0, (i + 1) * granularity)` of a sequence, its tenant and its adapter.

    Digests are 16 bytes of BLAKE2b, so that no prompt can be made to collide with another tenant's.
    """

    __slots__ = ("_digests", "_root", "granularity")

    def __init__(self, granularity: int, salt: str, adapter_id: int) -> None:
        """Start an empty chain; its root is salted."""
        self.granularity = granularity
        self._root = blake2b(
            f"{adapter_id}/{salt}".encode(), digest_size=16, person=b"root"
        ).digest()
        self._digests: list[bytes] = []

    def fork(self) -> HashChain:
        """Return a copy that extends by itself (the sequences of one request part after the prompt)."""
        chain = HashChain.__new__(HashChain)
        chain.granularity, chain._root, chain._digests = (
            self.granularity,
            self._root,
            list(self._digests),
        )
        return chain

    def extend(self, tokens: I32) -> None:
        """Hash the whole blocks of `tokens` (the sequence from its start) that are not hashed yet."""
        size, digests = self.granularity, self._digests
        end = len(tokens) // size
        if end <= len(digests):
            return
        data = np.ascontiguousarray(tokens[len(digests) * size : end * size]).tobytes()
        last = digests[-1] if digests else self._root
        for start in range(0, len(data), 4 * size):
            last = blake2b(last + data[start : start + 4 * size], digest_size=16).digest()
            digests.append(last)

    def at(self, num_tokens: int) -> bytes:
        """Return the digest of the first `num_tokens` tokens, a multiple of the granularity and hashed."""
        return self._digests[num_tokens // self.granularity - 1]

    @property
    def num_tokens(self) -> int:
        """Tokens that the chain covers."""
        return len(self._digests) * self.granularity
