"""A good kernel passes; each fault planted in its text is noticed."""

import mlx.core as mx
import pytest

from . import (
    NO_CLANG,
    ORDERS,
    BuildError,
    KernelFault,
    clang,
    generated_source,
    lint,
    parse,
    run_kernel,
    run_source,
    unwritten,
)
from .cases import row_sum

SUM = "simd_sum(value)"
TOTAL = "float total = 0;"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
CALL = row_sum()
KERNEL = CALL.pop("kernel")
A = CALL["inputs"][0]


@pytest.fixture(scope="module")
def text():
    return generated_source(KERNEL, **CALL).text


def plant(text, old, new):
    assert old in text
    return parse(text.replace(old, new, 1))


def run(source, **kwargs):
    return run_source(source, **CALL, **kwargs)[0]


def right(output):
    return mx.allclose(output, A.sum(axis=1), atol=1e-4).item()


@pytest.mark.parametrize("order", ORDERS)
def test_good_kernel(text, order):
    output = run(parse(text), order=order, seed=3)
    assert right(output)
    assert unwritten(output) == 0


def test_missing_barrier(text):
    source = plant(text, BARRIER, "")
    assert not all(right(run(source, order=order)) for order in ORDERS)


def test_missing_barrier_that_one_order_hides():
    """Each thread takes its lower neighbour's value, which may not be there yet."""
    made = mx.fast.metal_kernel(
        name="neighbour",
        input_names=["a"],
        output_names=["o"],
        source="""
            threadgroup float t[64];
            uint i = thread_position_in_grid.x;
            t[i] = a[i];
            o[i] = i > 0 ? t[i - 1] : 0;
        """,
    )
    found = []
    for order in ORDERS:
        output = run_kernel(
            made,
            inputs=[A],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
            order=order,
        )[0]
        found.append(int(mx.isnan(output).sum().item()))
    assert found[:2] == [0, 63]
    assert 0 < found[2] < 63


@pytest.mark.parametrize(
    "wrong",
    [
        "value + simd_shuffle_down(value, 1)",  # past lane 31: poison
        "simd_shuffle(value, 32)",
        "simd_shuffle_up(simd_sum(value), 1)",  # lane 0 takes from lane -1
    ],
)
def test_wrong_lane(text, wrong):
    source = plant(text, SUM, wrong)
    source = parse(source.text.replace("group == 0", "group == 31", "down" in wrong))
    assert mx.isnan(run(source)).all().item()


def test_wrong_lane_that_exists(text):
    assert not right(run(plant(text, SUM, "simd_shuffle_xor(value, 1)")))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            BARRIER,
            f"if (i < 128) {BARRIER}",
            "divergent threadgroup_barrier: of the 25",
        ),
        (
            BARRIER,
            f"if (i < 8) {{ {BARRIER} }} else {{\n{BARRIER} }}",
            "another barrier",
        ),
        (SUM, f"i < 16 ? {SUM} : 0.0f", "16 wait at a barrier"),
        (SUM, f"i % 2 ? {SUM} : simd_max(value)", "at another SIMD function"),
        (SUM, f"{SUM}; if (i == 40) return", "divergent .* 1 have returned"),
        ("start[i]", "start[i + 1]", r"'a' is accessed past its end: .*\(1023, 0, 0"),
        ("start[i]", "start[int(i) - 1]", "'a' is accessed before its beginning"),
        ("o[row]", "o[row + 1]", "'o' is accessed past its end"),
        ("scale[0]", "scale[j]", "'scale' is accessed past its end"),
        ("j < 8", "j < 9", "'part' is accessed past its end"),
        ("part[8]", "part[9000]", "threadgroup memory of 36000 bytes"),
        (TOTAL, f"{TOTAL} float b[8]; b[i + 8] = 1; total += b[row];", "past a local"),
        (TOTAL, "float total = 7 / int(i);", "division by zero"),
    ],
)
def test_is_reported(text, old, new, says):
    with pytest.raises(KernelFault, match=says):
        run(plant(text, old, new))


def test_report_quotes_the_line(text):
    source = plant(text, BARRIER, f"if (i < 128) {BARRIER}")
    with pytest.raises(
        KernelFault, match=r"line \d+: if \(i < 128\) threadgroup_barrier"
    ):
        run(source)


def test_endless_loop(text):
    with pytest.raises(KernelFault, match="still running after 1 s"):
        run(plant(text, "++j", "j += 0"), timeout=1)


def test_wild_pointer_ends_the_kernel_only(text):
    source = plant(text, TOTAL, "float total = *(float*)(uint64_t(i) + 8);")
    with pytest.raises(KernelFault, match="access to address 0x8 "):
        run(source)


def test_unwritten_output(text):
    output = run(plant(text, "o[row] =", "if (row != 2) o[row] ="))
    assert unwritten(output) == 1
    assert mx.isnan(output[2]).item()


def test_never_set_variable(text):
    assert not right(run(plant(text, TOTAL, "float total;")))


ADDRESS_SPACES = [
    ("const device float* start", "const float* start"),  # drops `device`
    ("const device float* start", "const constant float* start"),
    ("const device float* start", "device float* start"),  # drops `const`
    ("float value", "const threadgroup float* t = a; float value"),
    ("float value", "const device float* s = scale; float value"),
    ("float value", "float* t = part; float value"),  # drops `threadgroup`
    ("o[row]", "a[row]"),  # writes an input
]


@pytest.mark.parametrize(("old", "new"), ADDRESS_SPACES)
def test_wrong_address_space(text, old, new):
    with pytest.raises(BuildError, match=r"row_sum\w*\.metal:\d+"):
        run(plant(text, old, new))


@pytest.mark.skipif(not clang(), reason=NO_CLANG)
@pytest.mark.parametrize(("old", "new"), ADDRESS_SPACES)
def test_lint_wrong_address_space(text, old, new):
    with pytest.raises(BuildError, match=r"row_sum\w*\.metal:\d+"):
        lint(plant(text, old, new))


@pytest.mark.skipif(not clang(), reason=NO_CLANG)
def test_lint_passes_good_text_and_warns(text):
    lint(parse(text))
    with pytest.raises(BuildError, match="uninitialized"):
        lint(plant(text, TOTAL, "float total;"))
