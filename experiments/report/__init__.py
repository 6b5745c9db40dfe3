"""What people read: headings, labels, notes, intervals and texts made from results."""
