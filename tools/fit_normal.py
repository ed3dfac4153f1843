#!/usr/bin/env python3
"""Fit the one special function of the core and print its coefficient tables for csrc/kernels/normal.hpp.

With G_n(-t) = E[max(0, x - t)^n] for a standard normal x, everything a ReLU needs for t >= 0 follows from the ratio
rho(t) = G_2(-t) / G_1(-t) without a single subtraction (see normal.hpp). rho falls from 1.2533 at 0 towards 2/t, so
(t + 2) rho(t) is smooth and bounded, and in s = (t - 4)/(t + 4) a short polynomial represents it.

Maintainers only: needs mpmath. The output goes into normal.hpp by hand.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np

mp.mp.dps = 60
CENTRE, SHIFT, T_MAX = mp.mpf(4), mp.mpf(2), mp.mpf(40)
DEGREES = {"float": 15, "double": 28}


def rho(t: mp.mpf) -> mp.mpf:
    tail, density = mp.erfc(t / mp.sqrt(2)) / 2, mp.exp(-t * t / 2) / mp.sqrt(2 * mp.pi)
    return ((t * t + 1) * tail - t * density) / (density - t * tail)


def coefficients(degree: int) -> list[mp.mpf]:
    """Monomial coefficients, lowest first, of the polynomial through Chebyshev nodes in s on [-1, s(T_MAX)]."""
    low, high = mp.mpf(-1), (T_MAX - CENTRE) / (T_MAX + CENTRE)
    nodes = [mp.cos(mp.pi * (2 * i + 1) / (2 * (degree + 1))) for i in range(degree + 1)]
    s = [(high - low) / 2 * x + (high + low) / 2 for x in nodes]
    t = [CENTRE * (1 + x) / (1 - x) for x in s]
    vandermonde = mp.matrix([[x**j for j in range(degree + 1)] for x in s])
    values = mp.matrix([rho(x) * (x + SHIFT) for x in t])
    return list(mp.lu_solve(vandermonde, values))


def worst_error(table: np.ndarray) -> float:
    """Largest relative error of rho when the table is evaluated in its own precision, over t in [0, T_MAX]."""
    dtype = table.dtype.type
    worst = 0.0
    for t in np.concatenate([np.linspace(0, 8, 400), np.linspace(8, 40, 200)]).astype(dtype):
        s = (t - dtype(4)) / (t + dtype(4))
        value = dtype(0)
        for c in table[::-1]:
            value = value * s + c
        exact = rho(mp.mpf(float(t)))
        worst = max(worst, abs(float((mp.mpf(float(value / (t + dtype(2)))) - exact) / exact)))
    return worst


def main() -> None:
    for name, degree in DEGREES.items():
        dtype, digits = (np.float32, 9) if name == "float" else (np.float64, 17)
        table = np.array([float(c) for c in coefficients(degree)]).astype(dtype)
        print(f"// {name}: degree {degree}, largest relative error {worst_error(table):.1e}")
        suffix = "F" if name == "float" else ""
        print(",\n".join(f"    {float(c):.{digits}g}{suffix}" for c in table))


if __name__ == "__main__":
    main()
