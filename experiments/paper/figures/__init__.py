"""A module per figure: `measure` gives its data, `draw` the drawing, `text` a table; its quantities take `data`."""
