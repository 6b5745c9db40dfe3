"""`python -m reproduction.papers redraw figure=landscape/served [folder=results]`: draws a figure from the numbers in its .csv."""

from pathlib import Path

from reproduction import RESULTS
from reproduction.papers import gallery


def main(figure: str, folder: str = RESULTS) -> None:
    """Its .csv and .json stay as they are."""
    print(gallery.redraw(figure, Path(folder)))
