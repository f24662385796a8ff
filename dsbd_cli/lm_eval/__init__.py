"""Tasks of the lm-evaluation-harness with our methods: the model `dsbd`.

    python -m dsbd_cli.lm_eval --model dsbd --model_args preset=smol,method=dsbd,width=4 --tasks ...

is `lm_eval` with that model known; the harness itself looks for models in its own list only. In Python, call `register`
and then `lm_eval.simple_evaluate(model="dsbd", ...)`.
"""

from __future__ import annotations

from dsbd_cli.errors import UserError


def register() -> None:
    """Make the model known to the harness; calling it again does nothing.

    Raises:
        UserError: the harness is not installed.
    """
    try:
        import lm_eval.models  # noqa: F401 - its own models, which it lists itself only while it knows none
        from lm_eval.api.registry import model_registry
    except ImportError:
        raise UserError("the harness is not installed: pip install 'dsbd-cli[eval]'") from None
    if "dsbd" not in model_registry:
        # By name: the class and torch are loaded when the model is asked for.
        model_registry.register("dsbd", target="dsbd_cli.lm_eval.model:DsbdLM")
