"""Hash chains: digests of token prefixes, which identify the content of KV blocks."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from tokenspeed_core.api.step import I32


class HashChain:
    """The digests of a sequence's prefixes; digest i covers the first `(i + 1) * granularity` tokens.

    The root is salted with the tenant and the adapter. Digests are 16 bytes of BLAKE2b, so that a prompt cannot be
    made to collide with another tenant's.
    """

    __slots__ = ("_digests", "_root", "granularity")

    def __init__(self, granularity: int, salt: str, adapter_id: int) -> None:
        self.granularity = granularity
        root = f"{adapter_id}/{salt}".encode()
        self._root = blake2b(root, digest_size=16, person=b"root").digest()
        self._digests: list[bytes] = []

    def fork(self) -> HashChain:
        """Return an independent copy: the sequences of one request share only the prompt."""
        chain = HashChain.__new__(HashChain)
        chain.granularity = self.granularity
        chain._root = self._root
        chain._digests = list(self._digests)
        return chain

    def extend(self, tokens: I32) -> None:
        """Hash the full blocks of `tokens` that are not hashed yet. `tokens` starts at the sequence's first token."""
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
        """Return the digest of the first `num_tokens` tokens, a multiple of the granularity."""
        return self._digests[num_tokens // self.granularity - 1]

    @property
    def num_tokens(self) -> int:
        """Tokens that the chain covers."""
        return len(self._digests) * self.granularity
