"""The JSON of a request's body."""

import json
from math import isfinite
from typing import Any

from .problems import Problem


def decoded(content: bytes) -> Any:
    """Parses JSON in UTF-8. Raises Problem if it is invalid."""

    def constant(name: str) -> float:
        raise ValueError(f"{name} is no number of JSON")

    try:
        found = json.loads(content.decode("utf-8"), parse_constant=constant, parse_float=_finite)
        if b"\\ud" in content.lower():  # the escape of a surrogate
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise Problem(400, "the body is not valid Unicode: send text without lone surrogates") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise Problem(400, f"the body is not JSON ({reason}): send a JSON object in UTF-8")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value
