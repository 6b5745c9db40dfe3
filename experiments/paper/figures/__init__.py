"""One module per figure or table: `measure` gives its data, `draw` the drawing, `text` a table; functions of `data` are quantities."""
