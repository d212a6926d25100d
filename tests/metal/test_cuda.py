"""The same Metal text is CUDA too: nvcc takes it for sm_90. Nothing runs here."""

import pytest

from . import BuildError, generated_source, parse
from .cases import gated_delta_step, row_sum
from .cuda import NO_NVCC, compile_cuda, nvcc

pytestmark = pytest.mark.skipif(not nvcc(), reason=NO_NVCC)


@pytest.mark.parametrize("case", [row_sum, gated_delta_step])
def test_compiles(case):
    call = case()
    path = compile_cuda(generated_source(call.pop("kernel"), **call), host=False)
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_rejects_nonsense():
    call = row_sum()
    text = generated_source(call.pop("kernel"), **call).text
    with pytest.raises(BuildError, match="nonsense"):
        compile_cuda(
            parse(text.replace("simd_sum(value)", "nonsense(value)")), host=False
        )
