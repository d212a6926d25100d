"""Metal kernels of a Gated DeltaNet layer and of greedy drafting, one per file.

Each file holds the Metal source, a reference in MLX operations and a function that
launches the kernel. ``dispatch`` decides where the kernels run; everywhere else the
references do. The kernels know no cache and no model.
"""
