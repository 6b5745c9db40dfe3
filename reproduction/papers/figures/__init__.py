"""A module per figure: `measure` gives its data, `draw` the drawing (of a table its Markdown), `text` what is printed
beside a drawing; its quantities take `data`."""
