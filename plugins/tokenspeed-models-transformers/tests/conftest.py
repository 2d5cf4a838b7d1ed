"""Makes the helpers of these tests importable, and keeps transformers quiet."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils import logging

sys.path.append(str(Path(__file__).parent))
logging.disable_progress_bar()
logging.set_verbosity_error()
