"""Run a module of this package with OpenBLAS in front of the BLAS inside MLX's wheel.

    OPENBLAS_NUM_THREADS=1 python benchmarks/with_openblas.py mlx_mtp.benchmark …

For measurements in float32 on Linux: with the wheel's own BLAS a verification of T rows
costs T steps, with OpenBLAS little more than one, as on a GPU. Rows of different widths
then differ by rounding, so ``--check-exact`` is not for this backend.
"""

import ctypes
import runpy
import sys

LIBRARY = "libopenblas.so.0"  # Debian: libopenblas0-pthread


def main() -> None:
    if len(sys.argv) < 2:
        print(__doc__.splitlines()[2].strip(), file=sys.stderr)
        sys.exit(2)
    try:
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)  # before mlx is imported
    except OSError:
        sys.exit(f"error: {LIBRARY} is missing; on Debian install libopenblas0-pthread")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
