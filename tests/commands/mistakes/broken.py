class P(:
