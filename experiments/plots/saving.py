"""Writes figures to files."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cbatch import ConfigError
from experiments.plots.style import print_style
from experiments.store.provenance import atomic_write


@print_style()
def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Writes a file in each format, or in the format at the end of the name, atomically. Closes the figure. Returns the paths.

    PNG, PDF and SVG files have the figure's label in their metadata. Equal figures give equal files. PDFs embed fonts as TrueType. Raises ConfigError if matplotlib does not know a format, or if the
    texts leave no room for the panels.
    """
    known = figure.canvas.get_supported_filetypes()
    if (ending := Path(name).suffix[1:]) in known:
        formats = (ending,)
    if other := next((suffix for suffix in formats if suffix not in known), None):
        raise ConfigError(f"format={other}: no such format; choose among {', '.join(known)}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied")
        try:
            figure.draw_without_rendering()
            room = not _labels_meet(figure)
        except UserWarning:
            room = False
    if not room:
        size = "{:g},{:g}".format(*figure.get_size_inches())
        notes = "the notes (notes=false prints them) or " * bool(figure.get_supxlabel())
        remedy = f"give a larger one, or leave out {notes}the title (title=)"
        raise ConfigError(f"size={size}: leaves no room for the panels; {remedy}")
    paths = [with_suffix(folder / name, suffix) for suffix in formats]
    label = str(figure.get_label())
    metadata = {
        "png": {"Description": label},
        "pdf": {"Subject": label, "CreationDate": None},
        "svg": {"Description": label, "Date": None},
    }
    for path in paths:
        content, suffix = BytesIO(), path.suffix[1:]  # a full disk breaks matplotlib's writers
        figure.savefig(content, format=suffix, dpi=220, metadata=metadata.get(suffix))
        with atomic_write(path) as partial:
            partial.write_bytes(content.getvalue())
    plt.close(figure)
    return paths


def _labels_meet(figure: Figure) -> bool:
    """Returns whether two labels on y, or one and a legend, lie on each other in a figure that has been drawn."""
    labels = [panel.yaxis.label for panel in figure.axes if panel.axison and panel.get_ylabel()]
    boxes = [artist.get_window_extent().padded(-1) for artist in (*labels, *figure.legends)]
    return any(one.overlaps(other) for one, other in combinations(boxes, 2))


def with_suffix(path: Path, suffix: str) -> Path:
    """Returns the path with the suffix added, unless the path ends with it."""
    return path if path.suffix == f".{suffix}" else path.with_name(f"{path.name}.{suffix}")
