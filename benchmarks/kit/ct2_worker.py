"""CTranslate2 in a process of its own: two engines' thread pools in one process slow each other down.

(Seen on two cores: with a generator in the process, torch's small bfloat16 products took up to twice as long.)
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection, folder: str, device: str, index: int, wanted: str, threads: int) -> None:
    """Answer requests until the other side is gone; the first message out is the computing type, or an exception.

    Args:
        folder: the converted model.
        wanted: computing type; float32 where the package does not offer it (bfloat16 on CPUs).

    A request is (seed, options of `generate_batch`, tokens); the reply (token ids, seconds).
    """
    try:
        import ctranslate2

        known = ctranslate2.get_supported_compute_types(device)
        generator: Any = ctranslate2.Generator(
            folder,
            device=device,
            device_index=index,
            compute_type=wanted if wanted in known else "float32",
            intra_threads=threads,
        )
    except Exception as error:  # whatever it meets is the caller's to report
        connection.send(error)
        return
    connection.send(str(generator.compute_type))
    while True:
        try:
            seed, options, tokens = connection.recv()
        except EOFError:
            return
        ctranslate2.set_random_seed(seed)
        begin = time.perf_counter()
        (result,) = generator.generate_batch([tokens], **options)
        seconds = time.perf_counter() - begin
        connection.send(([int(token) for token in result.sequences_ids[0]], seconds))
