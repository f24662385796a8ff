"""The process that runs untrusted SQL. A script of its own, standard library only; started by `sql_runner`.

Reads one JSON request a line ({"db", "sql", "seconds", "max_bytes"}), answers with one JSON line
({"status", "rows" | "message"}). What contains a hostile statement:
- the database is opened read-only and immutable: no write, no lock, no journal beside it;
- an authorizer allows reading and functions only: no ATTACH, PRAGMA, write, transaction, no functions
  that touch files or load code;
- the kernel limits address space, file size (0), core dumps; a timer set before each statement ends
  the process even inside one long C call, which SQLite's own interrupt does not.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import sqlite3
import sys
import time

ALLOWED = {20, 21, 31, 33}  # SQLITE_READ, SQLITE_SELECT, SQLITE_FUNCTION, SQLITE_RECURSIVE
FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "fileio"}
GRACE_S = 0.5  # between SQLite's interrupt and the end of the process


def limit(memory_mb: int) -> None:
    """Bound what this process may take from the machine; what the platform lacks is left out."""
    with contextlib.suppress(ImportError):
        import resource

        for name, value in (("RLIMIT_AS", memory_mb << 20), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (value, value))


def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action not in ALLOWED or (action == 31 and (second or "").lower() in FORBIDDEN_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def connect(path: str) -> sqlite3.Connection:
    uri = pathlib.Path(path).absolute().as_uri() + "?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    # Old data holds bytes that are not UTF-8: dropped, for gold and prediction alike, as the official scorer.
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="ignore")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.set_authorizer(authorize)
    return connection


def size(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes)) else 8


def run(request: dict, connections: dict) -> dict:
    path, deadline = request["db"], time.monotonic() + request["seconds"]
    try:
        if path not in connections:
            connections[path] = connect(path)
        connection = connections[path]
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        cursor = connection.execute(request["sql"])
        if cursor.description is None:
            return {"status": "error", "message": "not a query"}
        rows, room = [], request["max_bytes"]
        for row in cursor:
            room -= 16 + sum(size(value) + 8 for value in row)
            if room < 0:
                cursor.close()
                return {"status": "too_large", "message": f"more than {request['max_bytes']} bytes of rows"}
            rows.append([{"hex": v.hex()} if isinstance(v, bytes) else v for v in row])
        return {"status": "rows", "rows": rows}
    except MemoryError:
        return {"status": "too_large", "message": "out of memory"}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        text = str(error)
        if time.monotonic() > deadline and "interrupt" in text:
            return {"status": "timeout", "message": f"more than {request['seconds']} s"}
        large = "too big" in text or "out of memory" in text
        return {"status": "too_large" if large else "error", "message": text}


def main() -> None:
    limit(int(sys.argv[1]))
    connections: dict = {}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        with contextlib.suppress(AttributeError):
            signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_S)  # SIGALRM ends the process
        answer = run(request, connections)
        payload = json.dumps(answer).encode()
        with contextlib.suppress(AttributeError):
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(payload + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
