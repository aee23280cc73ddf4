"""Built-in problems of the replay: data, initial parameters and losses, in numpy or torch."""

import numpy as np

from trace_file import Trace


class Problem:
    """A problem: `spec` is its entry in the trace's spec, `start` the initial parameter, `data` the data in the trace."""

    def trace(self, optimizer, steps, rtol, source):
        """Returns the trace without expected values."""
        spec = {
            "optimizer": optimizer,
            "steps": steps,
            "ranks": 1,
            "reduce": "mean",
            "clip": None,
            "lrs": None,
            "groups": None,
            "problem": self.spec,
            "tolerance": {"rtol": rtol, "atol": rtol * 1e-3},
            "source": source,
        }
        data = {f"data/{key}": array for key, array in self.data.items()}
        return Trace(spec, {"param/x": self.start, **data})

    def nudged(self, seed):
        """Changes the last bits of `start` and `data` at random; returns the problem."""
        random = np.random.Generator(np.random.PCG64(seed))

        def nudge(array):
            return array * (1 + random.uniform(-1, 1, array.shape) * 2.0**-52)

        self.start = nudge(self.start)
        self.data = {key: array if key == "y" else nudge(array) for key, array in self.data.items()}
        return self


class Rosenbrock(Problem):
    spec = {"name": "rosenbrock"}

    def __init__(self, size=10):
        self.start, self.data = np.resize([-1.2, 1.0], size), {}

    def loss(self, lib, x):
        rise, run = x[1:] - x[:-1] ** 2, 1.0 - x[:-1]
        return (100.0 * rise**2 + run**2).sum()


class LeastSquares(Problem):
    spec = {"name": "least_squares"}

    def __init__(self, rows=23, size=8, seed=3):
        random = np.random.Generator(np.random.PCG64(seed))
        # Scales of the columns from 1 to 1/10, so that plain gradient descent is slow.
        a = random.normal(size=(rows, size)) * 10.0 ** -np.linspace(0, 1, size)
        self.start, self.data = np.zeros(size), {"A": a, "b": random.normal(size=rows)}

    def loss(self, lib, x):
        a, b = (lib.as_tensor(self.data[key]) if lib is not np else self.data[key] for key in "Ab")
        return ((a @ x - b) ** 2).sum() / (2 * len(b))


class Logistic(Problem):
    spec = {"name": "logistic", "l2": 0.01}

    def __init__(self, rows=41, size=6, seed=4):
        random = np.random.Generator(np.random.PCG64(seed))
        a, truth = random.normal(size=(rows, size)), random.normal(size=size)
        y = np.where(a @ truth + random.normal(size=rows) > 0, 1.0, -1.0)
        self.start, self.data = np.zeros(size), {"A": a, "y": y}

    def loss(self, lib, x):
        a, y = (lib.as_tensor(self.data[key]) if lib is not np else self.data[key] for key in "Ay")
        zero = lib.zeros_like(y)
        return lib.logaddexp(zero, -y * (a @ x)).mean() + 0.5 * self.spec["l2"] * (x * x).sum()


PROBLEMS = {"rosenbrock": Rosenbrock, "least_squares": LeastSquares, "logistic": Logistic}
