from cbatch import Plan

class Base:
    def plan(self, view):
        return self.choose(view, [*view.running, *view.waiting])

class Raises(Base):
    def choose(self, view, requests):
        raise ValueError("two\nlines")

class Twice(Base):
    def choose(self, view, requests):
        return Plan([(requests[0], 1), (requests[0], 1)])

class Idle(Base):
    def choose(self, view, requests):
        return Plan()

class Forever(Base):
    def choose(self, view, requests):
        return Plan(wake_at=view.now + 1)

class NoPlan:
    pass

class Nothing(Base):
    def choose(self, view, requests):
        view.plan()

class Builder(Base):
    def choose(self, view, requests):
        return view.plan()

class Exits:
    def __init__(self):
        raise SystemExit(3)

class Negative:
    def __init__(self):
        import numpy
        numpy.zeros(-1)

def function(view):
    return Plan()

instance = Base()

class NeedsArgument(Base):
    def __init__(self, share):
        self.share = share

class OneColumn:
    def draw(self, generator, num):
        return [20] * num

class Ragged:
    def draw(self, generator, num):
        return [20] * num, [5]

class Halves:
    def draw(self, generator, num):
        return [20.5] * num, [5] * num

class DrawRaises:
    def draw(self, generator, num):
        return 1 / 0

class OneTime:
    def times(self, generator, num):
        return [0.0]

class Backwards:
    def __init__(self, rate: float = 1.0):
        self.rate = rate

    def times(self, generator, num):
        return [0.0, 2.0, *[1.0] * (num - 2)]

class Mean:
    def __init__(self, mean: "int"):
        self.mean = mean

class First:
    def __init__(self, weight: float):
        self.weight = weight
