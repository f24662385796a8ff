"""llama.cpp in a process of its own: two engines' thread pools in one process slow each other down."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection, path: str, context: int, threads: int) -> None:
    """Answer requests until the other side is gone; the first message out is the package's version, or an exception.

    Args:
        path: the GGUF file.
        context: tokens that prompt and answer may have together.

    A request is the JSON object of a completion; the reply its answer and the seconds.
    """
    try:
        import xllamacpp

        params: Any = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.verbosity = path, context, 1, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        server: Any = xllamacpp.Server(params)
    except Exception as error:  # whatever it meets is the caller's to report
        connection.send(error)
        return
    connection.send(str(xllamacpp.__version__))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        reply = server.handle_completions(request)
        connection.send((reply, time.perf_counter() - begin))
