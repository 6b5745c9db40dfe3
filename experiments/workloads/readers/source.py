"""Text files, plain or compressed, and the JSON objects of their lines; errors name file and line."""

import gzip
import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from cbatch import WorkloadError
from cbatch.validation import shorten


def read_text(path: str, key: str = "workload.path") -> str:
    """Returns the text of a UTF-8 file; one whose name ends in .gz or .xz is decompressed. key: for messages.

    Raises:
        WorkloadError: the file is missing, unreadable, empty, not text, or not compressed although its name says so.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise WorkloadError(f"{key}={path!r}: give the path of a file")
    file = Path(path).expanduser()
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    try:
        with open_file(file, "rt", encoding="utf-8-sig") as opened:
            text = str(opened.read())
    except FileNotFoundError:
        raise WorkloadError(f"{key}={path}: no such file; a relative path begins in the current folder") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "give UTF-8 text, compressed only if the name ends in .gz or .xz, or copy the file again"
        raise WorkloadError(f"{key}={path}: cannot be read ({reason}); {remedy}") from None
    if not text.strip():
        raise WorkloadError(f"{path}: the file is empty; give one with requests")
    return text


def at_line(path: str, line: int, problem: str) -> WorkloadError:
    """Returns the error to raise for a line of a file, counted from 1."""
    return WorkloadError(f"{path}, line {line}: {problem}")


def json_objects(path: str, text: str) -> list[dict[str, Any]]:
    """Returns the JSON object of every line of a file. Raises WorkloadError for a line that holds none."""
    records = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise at_line(
                path, number, f"{shorten(repr(line))} is not JSON ({error}); every line must be a JSON object"
            ) from None
        if not isinstance(value, dict):
            raise at_line(path, number, f"{shorten(repr(line))} is not a JSON object, as every line must be")
        records.append(value)
    return records
