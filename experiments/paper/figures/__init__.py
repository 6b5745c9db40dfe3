"""One module a figure or table: `measure` gives its data, `draw` the drawing, `text` the table; functions of `data` are quantities."""
