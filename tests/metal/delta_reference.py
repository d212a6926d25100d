"""The kernels of a Gated DeltaNet layer in float64, and random inputs for them."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels.gated_delta_prologue import Columns, Sizes, Weights
from mlx_mtp.kernels.gated_delta_verify import MAX_ROWS, Rows


def f64(x):
    return np.array(x.astype(mx.float32), np.float64)


def numpy_steps(state, rows, q=None):
    """The delta rule for one row of a batch -> outputs, last state."""
    k, v, g, beta = rows
    group = v.shape[1] // k.shape[1]
    outputs = []
    for t in range(len(k)):
        keys = np.repeat(k[t], group, axis=0)[:, None]
        state = state * g[t][:, None, None]
        delta = (v[t] - (state * keys).sum(-1)) * beta[t][:, None]
        state = state + keys * delta[..., None]
        if q is not None:
            queries = np.repeat(q[t], group, axis=0)[:, None]
            outputs.append((state * queries).sum(-1))
    return outputs, state


def numpy_verify(state, previous, n_prev, q, rows):
    outputs, states = [], []
    for b, n in enumerate(np.array(n_prev)):
        _, before = numpy_steps(f64(state)[b], [f64(x)[b, :n] for x in previous])
        block = [f64(x)[b, : q.shape[1]] for x in rows]
        y, _ = numpy_steps(before, block, f64(q)[b])
        outputs.append(y)
        states.append(before)
    return np.array(outputs), np.array(states)


def numpy_prologue(window, previous, n_prev, qkv, a, b, weights, sizes):
    Hk, Hv, Dk, Dv, W, _ = sizes
    conv, A_log, dt_bias = (f64(x) for x in weights)
    strip = np.concatenate([f64(window), f64(previous.sliced())], axis=1)
    kept = np.array(n_prev)
    window = np.stack([s[n : n + W - 1] for s, n in zip(strip, kept)])
    x = np.concatenate([window, f64(qkv.sliced())], axis=1)
    B, T = x.shape[0], x.shape[1] - W + 1
    out = sum(x[:, i : i + T] * conv[:, i, 0] for i in range(W))
    out = out / (1 + np.exp(-out))
    q, k, v = np.split(out, [Hk * Dk, 2 * Hk * Dk], axis=-1)

    def unit(y):
        y = y.reshape(B, T, Hk, Dk)
        return y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)

    g = np.exp(-np.exp(A_log) * np.logaddexp(f64(a.sliced()) + dt_bias, 0))
    beta = 1 / (1 + np.exp(-f64(b.sliced())))
    v = v.reshape(B, T, Hv, Dv)
    return window, unit(q) * Dk**-0.5, (unit(k), v, g, beta)


@dataclass
class Case:
    """A layer's inputs: a block of T rows behind one of ``previous_rows`` rows."""

    B: int
    T: int
    previous_rows: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    W: int = 4

    def __str__(self) -> str:
        return "-".join(f"{k}{v}" for k, v in vars(self).items())

    def sizes(self, dtype) -> Sizes:
        return Sizes(self.Hk, self.Hv, self.Dk, self.Dv, self.W, dtype)

    def columns(self, dtype, rows, normal) -> list[Columns]:
        """qkv, z, b, a in one matrix, as a layer with joined projections has them."""
        qkv, z = 2 * self.Hk * self.Dk + self.Hv * self.Dv, self.Hv * self.Dv
        array = normal(self.B, rows, qkv + z + 2 * self.Hv).astype(dtype)
        ends = [0, qkv, qkv + z, qkv + z + self.Hv]
        return [
            Columns(array, start, size)
            for start, size in zip(ends, [qkv, z, self.Hv, self.Hv])
        ]

    def prologue(self, dtype, n_prev, seed=0):
        """Arguments of ``gated_delta_prologue``."""
        normal = normals(seed)
        qkv, _, b, a = self.columns(dtype, self.T, normal)
        previous = self.columns(dtype, self.previous_rows, normal)[0]
        window = normal(self.B, self.W - 1, qkv.size).astype(dtype)
        weights = Weights(
            normal(qkv.size, self.W, 1).astype(dtype),
            mx.log(mx.abs(normal(self.Hv)) * 8 + 0.01),
            normal(self.Hv).astype(dtype),
        )
        return (window, previous, n_prev, qkv, a, b, weights, self.sizes(dtype))

    def verify(self, dtype, n_prev, seed=0):
        """Arguments of ``gated_delta_verify``."""
        normal = normals(seed)

        def rows() -> Rows:
            k = normal(self.B, MAX_ROWS, self.Hk, self.Dk)
            k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
            v = normal(self.B, MAX_ROWS, self.Hv, self.Dv)
            g = mx.sigmoid(normal(self.B, MAX_ROWS, self.Hv) + 1)
            beta = mx.sigmoid(normal(self.B, MAX_ROWS, self.Hv))
            return Rows(k.astype(dtype), v.astype(dtype), g, beta.astype(dtype))

        state = normal(self.B, self.Hv, self.Dv, self.Dk)
        q = normal(self.B, self.T, self.Hk, self.Dk) / self.Dk
        return state, rows(), n_prev, q.astype(dtype), rows()


def normals(seed):
    key = mx.random.key(seed)

    def normal(*shape):
        nonlocal key
        key, own = mx.random.split(key)
        return mx.random.normal(shape, key=own)

    return normal
