"""exp, log and the moments of a rectified Gaussian in csrc/kernels/normal.hpp, against 50 digits of mpmath."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cffi
import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from cabi import CORE_FLAGS, INCLUDES, compiler, eigen, run

SOURCE = """
#include "normal.hpp"

template <class T>
void relu(int n, const T *mu, const T *var, T *out) {
  for (int i = 0; i < n; ++i) {
    const kbt::ReluUnit<T> z = kbt::relu_unit(mu[i], var[i]);
    const T all[] = {z.mean, z.var, z.gate, z.density};
    for (int k = 0; k < 4; ++k) out[4 * i + k] = all[k];
  }
}

extern "C" {
void relu_float(int n, const float *mu, const float *var, float *out) { relu(n, mu, var, out); }
void relu_double(int n, const double *mu, const double *var, double *out) { relu(n, mu, var, out); }
void exp_float(int n, const float *x, float *y) { for (int i = 0; i < n; ++i) y[i] = kbt::exp_negative(x[i]); }
void exp_double(int n, const double *x, double *y) { for (int i = 0; i < n; ++i) y[i] = kbt::exp_negative(x[i]); }
void log_float(int n, const float *x, float *y) { for (int i = 0; i < n; ++i) y[i] = kbt::log_positive(x[i]); }
void log_double(int n, const double *x, double *y) { for (int i = 0; i < n; ++i) y[i] = kbt::log_positive(x[i]); }
}
"""


@dataclass
class Gaussian:
    """The functions of normal.hpp in one precision."""

    name: str
    dtype: Any
    ffi: cffi.FFI
    lib: Any

    def _pointer(self, array: npt.NDArray[Any]) -> Any:
        return self.ffi.cast(f"{self.name} *", array.ctypes.data)

    def relu(self, mu: npt.ArrayLike, var: npt.ArrayLike) -> npt.NDArray[Any]:
        """Columns: mean, variance, gate, density."""
        pairs = np.broadcast_arrays(np.asarray(mu, self.dtype), np.asarray(var, self.dtype))
        m, v = (array.ravel().copy() for array in pairs)
        out = np.zeros((m.size, 4), self.dtype)
        getattr(self.lib, f"relu_{self.name}")(m.size, self._pointer(m), self._pointer(v), self._pointer(out))
        return out

    def map(self, function: str, x: npt.ArrayLike) -> npt.NDArray[Any]:
        x = np.ascontiguousarray(x, self.dtype)
        y = np.zeros_like(x)
        getattr(self.lib, f"{function}_{self.name}")(x.size, self._pointer(x), self._pointer(y))
        return y

    def ulps(self, got: npt.NDArray[Any], exact: Callable[[Any], Any], x: npt.NDArray[Any]) -> float:
        """Largest error of ``got`` against ``exact(x)``, in units of the last place of the exact value."""
        worst = mpmath.mpf(0)
        for value, at in zip(got, x, strict=True):
            true = exact(mpmath.mpf(float(at)))
            unit = mpmath.mpf(float(np.spacing(self.dtype(abs(float(true))))))
            worst = max(worst, abs(mpmath.mpf(float(value)) - true) / unit)
        return float(worst)


@pytest.fixture(scope="module", params=["float", "double"])
def gaussian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gaussian:
    cxx = compiler("c++", "g++", "clang++")
    if cxx is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("gaussian")
    (folder / "gaussian.cpp").write_text(SOURCE)
    flags = (*CORE_FLAGS, "-O3", "-fPIC", "-shared", "-isystem", str(eigen()), *INCLUDES)
    run(cxx, *flags, folder / "gaussian.cpp", "-o", folder / "gaussian.so")
    ffi, T = cffi.FFI(), request.param
    ffi.cdef(f"""void relu_{T}(int, const {T} *, const {T} *, {T} *);
                 void exp_{T}(int, const {T} *, {T} *); void log_{T}(int, const {T} *, {T} *);""")
    return Gaussian(T, np.float32 if T == "float" else np.float64, ffi, ffi.dlopen(str(folder / "gaussian.so")))


@pytest.fixture(autouse=True)
def _fifty_digits() -> Any:
    with mpmath.workdps(50):
        yield


def exact_moments(mu: float, var: float) -> tuple[Any, Any, Any]:
    """E z, Var z and Phi(alpha) of z = max(0, u), by the textbook form; 50 digits leave room for its cancellation."""
    m, v = mpmath.mpf(mu), mpmath.mpf(var)
    s = mpmath.sqrt(v)
    alpha = m / s
    gate, density = mpmath.ncdf(alpha), mpmath.npdf(alpha)
    mean = m * gate + s * density
    return mean, (m * m + v) * gate + m * s * density - mean**2, gate


def relative(got: float, exact: Any) -> float:
    return float(abs(mpmath.mpf(float(got)) - exact) / abs(exact))


LIMIT = {"float": 1e-5, "double": 1e-6}


def test_moments_are_accurate_for_alpha_from_minus_6_to_40(gaussian: Gaussian) -> None:
    rng = np.random.default_rng(0)
    alphas = np.concatenate([np.linspace(-6, 40, 461), rng.uniform(-6, 6, 400), [-6, -1e-6, -0.0, 0.0, 1e-6, 40]])
    sigmas = 10.0 ** rng.uniform(-4, 4, alphas.size)
    mu, var = (alphas * sigmas).astype(gaussian.dtype), (sigmas**2).astype(gaussian.dtype)
    worst = np.zeros(3)
    for (mean, variance, gate, _), m, v in zip(gaussian.relu(mu, var), mu, var, strict=True):
        exact = exact_moments(float(m), float(v))
        worst = np.maximum(worst, [relative(g, e) for g, e in zip((mean, variance, gate), exact, strict=True)])
    print(f"{gaussian.name}: worst relative error of mean {worst[0]:.1e}, variance {worst[1]:.1e}, gate {worst[2]:.1e}")
    assert worst[1] <= LIMIT[gaussian.name]
    assert worst[0] <= LIMIT[gaussian.name]
    assert worst[2] <= LIMIT[gaussian.name]


def test_below_minus_6_moments_are_accurate_where_the_type_can_hold_them(gaussian: Gaussian) -> None:
    tiny = float(np.finfo(gaussian.dtype).tiny)
    alphas = np.linspace(-40, -6, 341).astype(gaussian.dtype)
    kept = 0
    for alpha, (_, variance, gate, density) in zip(alphas, gaussian.relu(alphas, 1.0), strict=True):
        _, exact_variance, exact_gate = exact_moments(float(alpha), 1.0)
        # -alpha^2/2, up to 800, is rounded to half an ulp, which the exponential turns into relative error
        limit = LIMIT[gaussian.name] + float(alpha) ** 2 * np.finfo(gaussian.dtype).eps
        if density > 0 and exact_variance > tiny:
            assert relative(variance, exact_variance) <= limit
            assert relative(gate, exact_gate) <= limit
            kept += 1
        else:
            assert variance <= 2 * tiny
    assert kept >= (50 if gaussian.name == "float" else 300)


def test_everywhere_the_moments_are_finite_and_the_variance_is_not_negative(gaussian: Gaussian) -> None:
    info = np.finfo(gaussian.dtype)
    single = gaussian.name == "float"
    largest = [1e19, 1e30, 1e38, float(info.max)] if single else [1e150, 1e300, float(info.max)]
    smallest = [0.0, float(info.smallest_subnormal), float(info.tiny) / 3, float(info.tiny), float(info.tiny) * 3]
    var = np.array([*smallest, 1e-30, 1e-12, 1.0, 1e6, *largest])
    size = np.array([*smallest, 1e-30, 1e-12, 1e-3, 1.0, 7.0, 40.0, 41.0, 1e6, *largest])
    mu = np.concatenate([size, -size])
    with np.errstate(all="ignore"):
        M, V = (grid.ravel().astype(gaussian.dtype) for grid in np.meshgrid(mu, var))
    out = gaussian.relu(M, V)
    assert np.isfinite(out).all()
    mean, variance, gate, density = out.T
    assert (variance >= 0).all()
    assert (variance <= V).all()
    assert (mean >= 0).all()
    assert ((gate >= 0) & (gate <= 1)).all()
    assert (density >= 0).all()


def test_alpha_from_minus_40_to_40_never_gives_a_negative_variance(gaussian: Gaussian) -> None:
    alphas = np.linspace(-40, 40, 400_001).astype(gaussian.dtype)
    for scale in (1e-3, 1.0, 1e3):
        mu = (alphas * gaussian.dtype(scale)).astype(gaussian.dtype)
        mean, variance, gate, _ = gaussian.relu(mu, scale**2).T
        assert (variance >= 0).all()
        assert (mean >= np.maximum(mu, 0)).all()
        assert ((gate >= 0) & (gate <= 1)).all()
        assert (variance[alphas > -6] > 0).all()


def test_a_certain_input_passes_unchanged(gaussian: Gaussian) -> None:
    mu = np.array([-3.0, -1e-30, 0.0, 1e-30, 2.0, 1e30])
    mean, variance, _, _ = gaussian.relu(mu, 0.0).T
    np.testing.assert_array_equal(mean, np.maximum(mu, 0).astype(gaussian.dtype))
    np.testing.assert_array_equal(variance, 0)


def test_exp_is_accurate_to_a_few_ulp(gaussian: Gaussian) -> None:
    lowest = -87 if gaussian.name == "float" else -708
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [rng.uniform(lowest, 0, 1000), rng.uniform(-1, 0, 1000), -(10.0 ** rng.uniform(-30, 0, 300)), [0.0, lowest]]
    )
    x = x.astype(gaussian.dtype)
    worst = gaussian.ulps(gaussian.map("exp", x), mpmath.exp, x)
    print(f"{gaussian.name}: exp within {worst:.2f} ulp")
    assert worst <= 3
    assert gaussian.map("exp", [0.0])[0] == 1
    np.testing.assert_array_equal(gaussian.map("exp", [lowest * 1.01, -1e6, -1e30, -np.finfo(gaussian.dtype).max]), 0)


def test_exp_grows(gaussian: Gaussian) -> None:
    x = np.linspace(-20, 0, 200_001).astype(gaussian.dtype)
    y = gaussian.map("exp", x)
    assert (y[1:] >= y[:-1] * (1 - 4 * np.finfo(gaussian.dtype).eps)).all()
    assert (y <= 1).all()


def test_log_is_accurate_to_a_few_ulp(gaussian: Gaussian) -> None:
    info = np.finfo(gaussian.dtype)
    rng = np.random.default_rng(2)
    low, high = np.log10(float(info.tiny)), np.log10(float(info.max) / 4)
    near_1 = 10.0 ** rng.uniform(-6, -1, 300)
    edges = [float(info.tiny), 2**0.5, 0.5**0.5]
    x = np.concatenate([10.0 ** rng.uniform(low, high, 1000), rng.uniform(0.5, 2, 1000), 1 + near_1, 1 - near_1, edges])
    x = x[x != 1].astype(gaussian.dtype)
    worst = gaussian.ulps(gaussian.map("log", x), mpmath.log, x)
    print(f"{gaussian.name}: log within {worst:.2f} ulp")
    assert worst <= 3
    assert gaussian.map("log", [1.0])[0] == 0


def test_log_holds_up_to_the_largest_number(gaussian: Gaussian) -> None:
    top = np.finfo(gaussian.dtype).max
    x = np.array([top / 4, top / 2, top / 1.5, top], gaussian.dtype)
    assert gaussian.ulps(gaussian.map("log", x), mpmath.log, x) <= 3
