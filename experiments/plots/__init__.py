"""Plots of finished runs, a module each: `draw(folder, ...)` returns the figure that `experiments.plot` writes."""
