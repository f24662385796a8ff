"""Keeping transformers' own bars and warnings off the user's stderr; errors still raise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers(*, downloads: bool = False) -> Iterator[None]:
    """Silence transformers while loading.

    Args:
        downloads: leave the hub client's download bars on.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fixed = (
        constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    )  # by the environment: to set it again only warns
    if downloads and not fixed:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if fixed else "default")
                logging.enable_progress_bar()
        if not fixed:
            (enable_progress_bars if bars else disable_progress_bars)()
