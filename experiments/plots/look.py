"""What the user chooses of any plot. Does not load matplotlib."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, Field

from cbatch.validation import Give

Inches = Annotated[float, Field(gt=0)]


def _read_labels(text: str) -> dict[str, str]:
    labels = dict(part.rpartition("=")[::2] for part in text.split(";") if part)
    if "" in labels:
        raise ValueError
    return labels


@dataclass(frozen=True)
class Look:
    """How a plot looks, and of which runs it is.

    Args:
        labels: texts in place of labels, LABEL=TEXT;LABEL=TEXT.
        order: the labels that come first, LABEL;LABEL.
        size: width,height in inches.
        title: the text above the plot; an empty one for none.
        notes: whether the origin of the figures stands below the plot; if not, it is printed.
        format: of the files, such as pdf,png,svg.
        runs: only runs whose folder names contain this.
    """

    labels: Annotated[Mapping[str, str], BeforeValidator(_read_labels), Give("LABEL=TEXT;LABEL=TEXT")] = field(
        default_factory=dict
    )
    order: Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(filter(None, text.split(";"))))] = ()
    size: Annotated[
        tuple[Inches, Inches] | None,
        BeforeValidator(lambda text: tuple(map(float, text.split(",")))),
        Give("width and height in inches, as in size=3.5,2.5"),
    ] = None
    title: str | None = None
    notes: bool = True
    format: tuple[str, ...] = ("pdf", "png")
    runs: str = ""


PLAIN = Look()
