"""What the harness makes of inputs, types and calls, against MLX's own operations."""

import mlx.core as mx
import numpy as np
import pytest

from . import BuildError, clang, generated_source, lint, run_kernel


def kernel(source, inputs="a", outputs="o", **kwargs):
    return mx.fast.metal_kernel(
        name="kernel",
        input_names=inputs.split(),
        output_names=outputs.split(),
        source=source,
        **kwargs,
    )


def run(made, inputs, shape, dtype=mx.float32, threads=1, **kwargs):
    """One output, one threadgroup -> the output."""
    call = {
        "inputs": inputs,
        "grid": (threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
    }
    if clang():
        names = ("template", "init_value")
        given = {name: kwargs[name] for name in names if name in kwargs}
        lint(generated_source(made, **call, **given))
    return run_kernel(made, **call, **kwargs)[0]


def test_scalars_small_arrays_and_templates():
    """Python numbers come as constant references, tiny arrays as constant pointers."""
    made = kernel(
        """
        o[0] = n; o[1] = f; o[2] = flag ? 1 : 0; o[3] = tiny[1];
        o[4] = N + (F ? 10 : 0); o[5] = static_cast<T>(1.00390625f);
        o[6] = scalar; o[7] = square(n) + thread_position_in_grid.x;
        """,
        "n f flag tiny scalar",
        header="template <typename T> METAL_FUNC T square(T x) { return x * x; }\n",
    )
    tiny = mx.array([1, 2.5], mx.bfloat16)
    inputs = [-7, 0.5, True, tiny, mx.array(9, mx.int64)]
    template = [("T", mx.bfloat16), ("N", -3), ("F", True)]
    result = run(made, inputs, (8,), template=template)
    assert result.tolist() == [-7, 0.5, 1, 2.5, 7, 1, 9, 49]


@pytest.mark.parametrize("contiguous", [True, False])
def test_strides(contiguous):
    made = kernel(
        """
        uint i = thread_position_in_grid.x;
        o[i] = a[elem_to_loc(int64_t(i), a_shape, a_strides, a_ndim)];
        s[i] = i < uint(a_ndim) ? a_strides[i] : 0;
        """,
        outputs="o s",
        ensure_row_contiguous=contiguous,
    )
    base = mx.arange(48, dtype=mx.float32).reshape(6, 8)
    a = base.T[::2, ::-1]
    result, strides = run_kernel(
        made,
        inputs=[a],
        grid=(24, 1, 1),
        threadgroup=(24, 1, 1),
        output_shapes=[a.shape, (24,)],
        output_dtypes=[mx.float32, mx.int32],
        ensure_row_contiguous=contiguous,
    )
    assert mx.array_equal(result, a).item()
    assert strides.tolist()[:2] == ([6, 1] if contiguous else [2, -8])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_small_floats_round_as_mlx(dtype):
    made = kernel(
        """
        uint i = thread_position_in_grid.x;
        T x = static_cast<T>(a[i]), y = static_cast<T>(a[(i + 1) % 256]);
        o[4 * i] = x; o[4 * i + 1] = x * y; o[4 * i + 2] = x + y;
        o[4 * i + 3] = x / y;
        """
    )
    scale = 2.0 ** (mx.arange(256) % 40 - 24)
    x = mx.random.normal((256,), key=mx.random.key(0)) * scale
    given = [("T", dtype)]
    result = run(made, [x], (256, 4), dtype, threads=256, template=given)
    x = x.astype(dtype)
    y = mx.roll(x, -1)
    expected = mx.stack([x, x * y, x + y, x / y], axis=1)
    assert mx.array_equal(result, expected, equal_nan=True).item()


def test_half_conversions_are_numpys():
    """Every half to float and back, and floats next to the rounding borders."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        near = [
            np.nextafter(halves * 1.00048828125, np.float32(s)) for s in (-9e9, 9e9)
        ]
    x = np.concatenate([halves, *near]).astype(np.float32)
    x = mx.array(x[~np.isnan(x)].reshape(-1))
    made = kernel(
        """
        for (uint i = thread_position_in_grid.x; i < uint(a_shape[0]); i += 32)
            o[i] = static_cast<half>(a[i]);
        """
    )
    result = run(made, [x], x.shape, mx.float16, threads=32)
    with np.errstate(over="ignore"):
        expected = np.array(x).astype(np.float16)
    assert np.array_equal(np.array(result), expected)


def test_simd_functions():
    made = kernel(
        """
        uint i = thread_index_in_simdgroup;
        float x = a[i];
        device float* row = &o[i * 8];
        row[0] = simd_prefix_inclusive_sum(x);
        row[1] = simd_prefix_exclusive_sum(x);
        row[2] = simd_max(x) - simd_min(x);
        row[3] = simd_broadcast(x, 3) + simd_broadcast_first(x);
        row[4] = simd_shuffle_xor(x, 5);
        row[5] = simd_any(x > 30.5f) + 2 * simd_all(x > 0.5f) + 4 * simd_all(x >= 0.0f);
        row[6] = simd_sum(x);
        row[7] = simd_product(1 + x / 1024);
        """
    )
    x = mx.arange(32, dtype=mx.float32)
    result = np.array(run(made, [x], (32, 8), threads=32, order="shuffled"))
    n = np.arange(32)
    assert (result[:, 0] == n.cumsum()).all()
    assert (result[:, 1] == n.cumsum() - n).all()
    assert (result[:, 2:4] == [31, 3]).all()
    assert (result[:, 4] == n ^ 5).all()
    assert (result[:, 5:7] == [5, 496]).all()
    assert np.allclose(result[:, 7], np.prod(1 + n / 1024))


def test_vectors_and_wide_loads():
    made = kernel(
        """
        auto wide = (const device float4*)(a + 4);
        float4 x = wide[0];
        float2 low = reinterpret_cast<const device float2*>(a)[1];
        threadgroup float tile[2][4];
        tile[1][2] = 5; threadgroup float* cell = &tile[1][0];
        o[0] = dot(x, x); o[1] = low.y; o[2] = (x * 2.0f + x).w;
        o[3] = cell[2] + thread_position_in_grid.x;
        """
    )
    assert run(made, [mx.arange(8.0)], (4,)).tolist() == [16 + 25 + 36 + 49, 3, 21, 5]


def test_math_namespaces():
    made = kernel(
        """
        float x = a[thread_position_in_grid.x];
        o[0] = metal::exp(x); o[1] = metal::precise::log(x); o[2] = fast::rsqrt(x);
        o[3] = metal::precise::tanh(x); o[4] = log1p(x); o[5] = fma(x, x, 1.0f);
        o[6] = clamp(x, 0.0f, 0.25f); o[7] = select(x, 2.0f, x < 1.0f); o[8] = abs(-x);
        o[9] = max(x, 1.0f) - min(x, 1.0f);
        """
    )
    x = 0.5
    expected = [np.exp(x), np.log(x), x**-0.5, np.tanh(x), np.log1p(x), 1.25]
    expected += [0.25, 2, 0.5, 0.5]
    assert np.allclose(
        np.array(run(made, [mx.array([x] * 9)], (10,))), expected, rtol=1e-6
    )


def test_atomics_and_init_value():
    made = kernel(
        """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&o[i % 2], a[i], memory_order_relaxed);
        """,
        atomic_outputs=True,
    )
    a = mx.arange(9, dtype=mx.float32)
    assert run(made, [a], (2,), threads=9, init_value=1.0).tolist() == [21, 17]


def test_edge_threadgroups_are_smaller():
    """A grid of 70 in threadgroups of 64: the last has 6 threads, one partial group."""
    made = kernel(
        """
        uint i = thread_position_in_grid.x;
        o[i] = simd_sum(a[i]) * threads_per_grid.x;
        """
    )
    result = run_kernel(
        made,
        inputs=[mx.ones((70,))],
        grid=(70, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(70,)],
        output_dtypes=[mx.int32],
    )[0]
    assert result.tolist() == [32 * 70] * 64 + [6 * 70] * 6


def test_orders_differ():
    """Every thread notes its turn: 2 threadgroups of 2 SIMD groups."""
    made = kernel(
        """
        uint i = thread_position_in_grid.x;
        int turn = atomic_fetch_add_explicit(&o[128], 1, memory_order_relaxed);
        atomic_store_explicit(&o[i], turn, memory_order_relaxed);
        """,
        atomic_outputs=True,
    )

    def turns(order, seed=0):
        return run_kernel(
            made,
            inputs=[0],
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(129,)],
            output_dtypes=[mx.int32],
            init_value=0,
            order=order,
            seed=seed,
        )[0].tolist()[:128]

    assert turns("ascending") == list(range(128))
    assert turns("descending") == list(range(127, -1, -1))
    shuffled = turns("shuffled", 1)
    assert sorted(shuffled) == list(range(128))
    assert shuffled == turns("shuffled", 1)
    assert shuffled not in (turns("ascending"), turns("shuffled", 2))


def test_counters_of_a_kernel_that_reads_what_it_writes():
    made = kernel(
        """
        device float* p = o + thread_position_in_grid.x;
        *p = a[0]; auto x = p[0]; x += 1; *p += x; p[0] *= a[1];
        """
    )
    traffic = {}
    result = run(made, [mx.array([2.0, 10.0, 0.0])], (4,), threads=4, counters=traffic)
    assert result.tolist() == [50] * 4
    a, o = traffic["a"], traffic["o"]
    assert (a.read, a.read_once, a.size) == (32, 8, 12)
    assert (o.read, o.written) == (48, 48)
    assert (o.read_once, o.written_once) == (16, 16)


def test_rejected_text_names_the_line():
    made = kernel("o[0] = a[0]\n + nonsense + thread_position_in_grid.x;")
    with pytest.raises(BuildError, match=r"\.metal:\d+.*nonsense"):
        run_kernel(
            made,
            inputs=[mx.zeros((4,))],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )


def test_unknown_order():
    made = kernel("o[thread_position_in_grid.x] = a;")
    with pytest.raises(ValueError, match="'random': one of ascending, descending"):
        run(made, [1.0], (1,), order="random")


def test_helpers_for_each_space():
    made = kernel(
        """
        threadgroup float t[4];
        t[0] = head(a);
        o[0] = tail(t) + head(o + thread_position_in_grid.x);
        """,
        header="""
        template <typename T> T head(const device T* p) { return p[0]; }
        template <typename T> T tail(threadgroup T* p) { return p[0]; }
        """,
    )
    assert run(made, [mx.arange(8.0) + 3], (1,), init_value=2).item() == 5
