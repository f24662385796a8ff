"""Runs untrusted SQL on a database in a contained process that can really be stopped (`sql_worker`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

WORKER = Path(__file__).with_name("sql_worker.py")
KILL_AFTER_S = 2.0  # beyond the worker's own limits

Status = Literal["rows", "error", "timeout", "too_large"]


@dataclass(frozen=True)
class QueryResult:
    """`rows` = list of tuples of None, int, float, str, bytes (only with status "rows"); else a message."""

    status: Status
    rows: list[tuple[Any, ...]] | None = None
    message: str = ""


class SqlRunner:
    """One persistent worker, started anew whenever a statement had to be killed.

    Args:
        seconds: time limit of one statement.
        max_bytes: size limit of one result.
        memory_mb: address space of the worker.
    """

    def __init__(self, seconds: float = 5.0, max_bytes: int = 32 << 20, memory_mb: int = 512) -> None:
        self.seconds, self.max_bytes, self.memory_mb = seconds, max_bytes, memory_mb
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, database: Path, sql: str) -> QueryResult:
        """Run one statement; whatever it does, this returns near the time limit and the next call works."""
        request = {
            "db": str(database), "sql": sql, "seconds": self.seconds, "max_bytes": self.max_bytes,
        }  # fmt: skip
        with self._lock:
            worker = self._alive()
            killed = threading.Event()

            def kill() -> None:
                killed.set()
                worker.kill()

            timer = threading.Timer(self.seconds + KILL_AFTER_S, kill)
            timer.daemon = True
            timer.start()
            try:
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
            except OSError:
                line = b""
            finally:
                timer.cancel()
            if not line.endswith(b"\n"):
                return self._post_mortem(killed.is_set())
        answer = json.loads(line)
        rows = answer.get("rows")
        return QueryResult(
            answer["status"],
            None if rows is None else [tuple(_value(value) for value in row) for row in rows],
            answer.get("message", ""),
        )

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __enter__(self) -> SqlRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self.close()
            # -I: no environment, no user site; the worker sees the standard library only. A session of its
            # own keeps the terminal's Ctrl-C away from it.
            command = [sys.executable, "-I", str(WORKER), str(self.memory_mb)]
            pipe = subprocess.PIPE
            self._worker = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
        return self._worker

    def _post_mortem(self, killed: bool) -> QueryResult:
        assert self._worker is not None
        code = self._worker.wait()
        self.close()
        if killed or code == -14:  # SIGALRM: the worker's own timer
            return QueryResult("timeout", message=f"more than {self.seconds} s")
        return QueryResult("too_large", message=f"the statement ended its process (exit {code})")


def _value(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
