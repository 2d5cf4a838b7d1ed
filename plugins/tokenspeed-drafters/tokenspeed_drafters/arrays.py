"""The arrays of the drafter contract."""

from __future__ import annotations

from typing import Any

import numpy as np

I32 = np.ndarray[Any, np.dtype[np.int32]]
