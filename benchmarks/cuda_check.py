"""Run Metal kernels on an NVIDIA GPU and compare with the CPU harness.

    python benchmarks/cuda_check.py [MODULE:CASE ...]

A case is a function that returns the keywords of ``metal.run_kernel``, the kernel
included, as in tests/metal/cases.py. Needs nvcc and a GPU; the last line is JSON. Says
whether a text computes the same on hardware where 32 lanes do run at once, and nothing
of Apple's GPUs or of speed.
"""

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from metal import generated_source, run_kernel
from metal.cuda import NO_NVCC, gpus, nvcc, run_cuda

CASES = (
    "metal.cases:row_sum",
    "metal.cases:gated_delta_step",
    "metal.project_cases:delta_verify",
    "metal.project_cases:delta_prologue",
    "metal.project_cases:gated_norm",
    "metal.project_cases:greedy",
    "metal.project_cases:greedy_quantized",
)


def worst(a: mx.array, b: mx.array) -> float:
    """Largest difference, relative to the largest value; NaN where either has one."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30)).item()


def check(case: str) -> dict:
    module, _, function = case.partition(":")
    call = getattr(importlib.import_module(module), function)()
    expected = run_kernel(**call)
    source = generated_source(call.pop("kernel"), **call)
    call.pop("template", None)
    outputs = run_cuda(source, **call)
    return {
        "case": case,
        "difference": [worst(a, b) for a, b in zip(outputs, expected, strict=True)],
    }


def main(cases: list[str]) -> int:
    if not nvcc() or not gpus():
        print("no NVIDIA GPU here" if nvcc() else NO_NVCC, file=sys.stderr)
        return 1
    mx.set_default_device(mx.cpu)
    results = [check(case) for case in cases or CASES]
    for result in results:
        print(f"{result['case']}: {result['difference']}")
    print(json.dumps(results))
    # Outputs are bfloat16 at the coarsest; not <= also catches NaN.
    return int(not all(d <= 1e-2 for r in results for d in r["difference"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
