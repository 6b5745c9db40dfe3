"""A module per figure: `measure` gives its data, `draw` the drawing (without it, or of a table: Markdown); its quantities take `data`."""
