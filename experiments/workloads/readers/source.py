"""Text files, plain or gzipped, and one-line errors that name file and line."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from cbatch.errors import WorkloadError


@dataclass(frozen=True)
class TextFile:
    """A file that has been read.

    Attributes:
        name: its path, as given.
        lines: without line ends; at least one.
    """

    name: str
    lines: list[str]

    def fail(self, line: int, problem: str) -> WorkloadError:
        """The error to raise for a line, counted from 1."""
        return WorkloadError(f"{self.name}, line {line}: {problem}")


def read_lines(path: str) -> TextFile:
    """Read a UTF-8 text file; one whose name ends in .gz is decompressed. Line ends may be LF or CRLF.

    Raises:
        WorkloadError: the file is missing, unreadable, empty, not text, or not the gzip file that its name promises.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise WorkloadError(f"path={path!r}: give the path of a file")
    try:
        text = _read(Path(path).expanduser())
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file: check the path, which is taken from the working folder") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise WorkloadError(
            f"{path}: not a valid gzip file although its name ends in .gz ({error}): "
            "copy it again, or rename it if it is plain text"
        ) from None
    except EOFError:
        raise WorkloadError(f"{path}: the gzip file is truncated: copy it again") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path}: not UTF-8 text (byte {error.start}): convert it, or end its name in .gz if it is compressed"
        ) from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror}): give a file that can") from None
    if not text:
        raise WorkloadError(f"{path}: the file is empty: give one with requests")
    return TextFile(str(path), text.removesuffix("\n").split("\n"))


def _read(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    return path.read_text(encoding="utf-8-sig")
