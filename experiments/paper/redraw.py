"""`python -m experiments.paper redraw figure=landscape/served [folder=results]`: draws a figure from the numbers in its .csv."""

from pathlib import Path

from experiments.paper import gallery


def main(figure: str, folder: str = "results") -> None:
    """Its .csv and .json stay as they are."""
    print(gallery.redraw(figure, Path(folder)))
