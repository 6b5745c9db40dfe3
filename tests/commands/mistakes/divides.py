import zero
