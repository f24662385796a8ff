"""What all tests of decoding share."""

from __future__ import annotations

import importlib.util
import os

from tests.decoding.interpreter import quicken

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    quicken()
