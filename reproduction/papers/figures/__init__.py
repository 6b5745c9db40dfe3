"""A module per figure: `measure` gives its data, `draw` the drawing (of a table its Markdown); its quantities take `data`."""
