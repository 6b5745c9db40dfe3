"""What a client is told in place of an answer: an object as in OpenAI's API, which names the field to blame."""

import json
import re
import traceback

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cbatch import CbatchError

_KINDS = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}


def describe_error(error: Exception) -> tuple[int, str]:
    """Returns the status and the object. A user's error begins with the field."""
    match error:
        case HTTPException():
            status, message = error.status_code, str(error.detail)
        case CbatchError():
            status, message = 400, str(error)
        case ClientDisconnect():  # nobody reads this
            status, message = 400, "the client has left before its body ended"
        case _:
            traceback.print_tb(error.__traceback__)  # without its message, which may have a client's text
            status, message = 500, f"the server has failed ({type(error).__name__})"
    kind = _KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    field = re.match(r"([^:=.[ ]+)[:=.[]", message) if status < 500 else None
    content = {"message": message, "type": kind, "param": field and field[1], "code": status}
    return status, json.dumps({"error": content})
