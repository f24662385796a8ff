"""What is known of a GGUF file once it is parsed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GgufFacts:
    """What a GGUF file says of itself.

    Attributes:
        architecture: `general.architecture`.
        fields: metadata by key, arrays as lists.
        parameters: number of weights.
        reader: the parsed file.
    """

    architecture: str
    fields: dict[str, Any]
    parameters: int
    reader: Any = field(repr=False)
