one = 1
none = one / 0
