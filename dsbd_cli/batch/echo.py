"""The output of a batch as a process sees it whose team's first writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.batch.shard import Shard
from dsbd_cli.batch.store import Store


class Echo(Store):
    """Looks at nothing and writes nothing: what is done it is told."""

    def __init__(self, path: Path, total: int, shard: Shard, tell: Callable[[str], None]) -> None:
        self.path, self.total, self.shard, self.tell = path, total, shard, tell
        self._files, self._whole, self._parts = [], [], {}

    def is_of(self, facts: Mapping[str, Any], seed_given: bool) -> bool:
        return False

    @property
    def models(self) -> dict[str, str | None]:
        return {}

    def claim(self, facts: dict[str, Any], seed_given: bool) -> int:
        return int(facts["seed"])

    def add(self, index: int, record: Mapping[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass
