"""Text files, plain or gzipped, and one-line errors that name file and line."""

import gzip
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cbatch import WorkloadError


@dataclass(frozen=True)
class TextFile:
    """A file that has been read.

    name: its path, as given. text: not empty, with LF as line ends, the last one removed. section: the settings that name it.
    """

    name: str
    text: str
    section: str = "workload"

    @cached_property
    def lines(self) -> list[str]:
        """The lines without their ends, at least one."""
        return self.text.split("\n")

    def fail(self, line: int, problem: str) -> WorkloadError:
        """The error to raise for a line, counted from 1."""
        return WorkloadError(f"{self.name}, line {line}: {problem}")


def read_lines(path: str, key: str = "workload.path") -> TextFile:
    """Reads a UTF-8 text file with LF or CRLF; one whose name ends in .gz is decompressed. key: the setting, for messages.

    Raises:
        WorkloadError: the file is missing, unreadable, empty, not text, or not gzip although its name says so.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise WorkloadError(f"{key}={path!r}: give the path of a file")
    try:
        text = _read(Path(path).expanduser())
    except FileNotFoundError:
        raise no_such_file(key, path) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        problem = f"not a valid gzip file although its name ends in .gz ({error})"
        raise WorkloadError(f"{path}: {problem}; copy it again, or rename it if it is plain text") from None
    except EOFError:
        raise WorkloadError(f"{path}: the gzip file is truncated; copy it again") from None
    except UnicodeDecodeError as error:
        remedy = "convert it, or end its name in .gz if it is compressed"
        raise WorkloadError(f"{path}: not UTF-8 text (byte {error.start}); {remedy}") from None
    except OSError as error:
        raise WorkloadError(f"{key}={path}: cannot be read ({error.strerror}); give a file that can") from None
    if not text:
        raise WorkloadError(f"{path}: the file is empty; give one with requests")
    return TextFile(str(path), text.removesuffix("\n"), key.rpartition(".")[0])


def no_such_file(key: str, path: str) -> WorkloadError:
    """The error to raise for a setting that names no file."""
    return WorkloadError(f"{key}={path}: no such file; a relative path begins in the current folder")


def _read(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    return path.read_text(encoding="utf-8-sig")


def shorten(value: object) -> str:
    """The value, quoted, as it fits into a one-line message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
