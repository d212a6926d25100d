"""Peak memory and throughput of a conversion, on a synthetic source of several GB.

    python benchmarks/convert_bench.py --gigabytes 4 --directory /path/with/space

Writes a Qwen3.5-MoE-like source of random bytes in shards, copies its files as ``cp``
would, and converts it in a process of its own, unquantised and with 4 bits. Both ratios
of throughput are taken in one run on one disk. Everything is deleted afterwards. The
last line is one JSON document.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from byte_tokenizer import EOS_IDS, write_json, write_tokenizer  # noqa: E402

HIDDEN, EXPERT, VOCABULARY = 1024, 512, 32_000
LAYERS, INTERVAL = 4, 2
WIDTH = 2  # bytes of a bfloat16
Shape = tuple[int, ...]


def config(experts: int) -> dict:
    """Four layers, two of each kind; all weight is in the experts."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "full_attention_interval": INTERVAL,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": EXPERT,
        "intermediate_size": EXPERT,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5],
        },
        "eos_token_id": EOS_IDS,
    }
    return {"model_type": "qwen3_5_moe", "text_config": text}


def layer_shapes(experts: int, full: bool) -> dict[str, Shape]:
    """A layer's tensors; experts one by one, as most checkpoints have them."""
    shapes = {f"{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    if full:
        shapes |= {
            "self_attn.q_proj.weight": (2048, HIDDEN),
            "self_attn.k_proj.weight": (256, HIDDEN),
            "self_attn.v_proj.weight": (256, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, 1024),
            "self_attn.q_norm.weight": (128,),
            "self_attn.k_norm.weight": (128,),
        }
    else:
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (2048, HIDDEN),
            "linear_attn.in_proj_z.weight": (1024, HIDDEN),
            "linear_attn.in_proj_a.weight": (16, HIDDEN),
            "linear_attn.in_proj_b.weight": (16, HIDDEN),
            "linear_attn.conv1d.weight": (2048, 1, 4),
            "linear_attn.A_log": (16,),
            "linear_attn.dt_bias": (16,),
            "linear_attn.norm.weight": (64,),
            "linear_attn.out_proj.weight": (HIDDEN, 1024),
        }
    mlp = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN)}
    mlp["down_proj"] = (HIDDEN, EXPERT)
    owners = [f"experts.{e}" for e in range(experts)] + ["shared_expert"]
    shapes |= {f"mlp.{o}.{n}.weight": s for o in owners for n, s in mlp.items()}
    shapes["mlp.gate.weight"] = (experts, HIDDEN)
    shapes["mlp.shared_expert_gate.weight"] = (1, HIDDEN)
    return shapes


def shapes_of(experts: int) -> dict[str, Shape]:
    body = "model.language_model."
    shapes: dict[str, Shape] = {
        f"{body}embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{body}norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for i in range(LAYERS):
        layer = layer_shapes(experts, (i + 1) % INTERVAL == 0)
        shapes |= {f"{body}layers.{i}.{name}": shape for name, shape in layer.items()}
    # A small head: its experts are as many as the target's.
    head = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"{name}.weight"] = (HIDDEN,)
    head |= {f"layers.0.{n}": s for n, s in layer_shapes(experts, True).items()}
    return shapes | {f"mtp.{name}": shape for name, shape in head.items()}


def write_shard(file: Path, shapes: dict[str, Shape], rng: np.random.Generator) -> None:
    header, end = {}, 0
    for key, shape in shapes.items():
        size = WIDTH * int(np.prod(shape))
        offsets = [end, end + size]
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            # Exponents near that of 2**-6: finite numbers of a usual size.
            values = rng.integers(0x3C00, 0x3D00, int(np.prod(shape)), np.uint16)
            out.write(values.tobytes())


def write_source(path: Path, gigabytes: float, shard_gigabytes: float) -> int:
    """Returns the size of the largest shard."""
    expert = WIDTH * 3 * EXPERT * HIDDEN
    experts = max(4, int(gigabytes * 1e9 / expert / (LAYERS + 1)))
    path.mkdir(parents=True)
    write_json(path / "config.json", config(experts))
    write_tokenizer(path)
    shards: list[dict[str, Shape]] = [{}]
    size = 0
    for key, shape in shapes_of(experts).items():
        if size > shard_gigabytes * 1e9:
            shards.append({})
            size = 0
        shards[-1][key] = shape
        size += WIDTH * int(np.prod(shape))
    rng = np.random.default_rng(0)
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(path / name, shard, rng)
    return max(f.stat().st_size for f in path.glob("*.safetensors"))


def convert(source: Path, target: Path, *options: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of a conversion in a process of its own.

    The seconds are those of the conversion, without the imports before it.
    """
    code = (
        "import time; from convert_bench import peak_bytes; "
        "from mlx_mtp.convert_cli import main; start = time.perf_counter(); main(); "
        "print('DONE', time.perf_counter() - start, peak_bytes())"
    )
    paths = ["--hf-path", str(source), "--mlx-path", str(target)]
    os.sync()
    done = subprocess.run(
        [sys.executable, "-c", code, *paths, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, peak = done.stdout.split()[-2:]
    return float(seconds) + synced(), int(peak)


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands the other figure on from the parent
        line = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        return int(line[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def copy(source: Path, target: Path) -> float:
    os.sync()
    start = time.perf_counter()
    shutil.copytree(source, target)
    return time.perf_counter() - start + synced()


def synced() -> float:
    """The time until what was written is on the disk."""
    start = time.perf_counter()
    os.sync()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shard-gigabytes", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, required=True, help="Made, deleted.")
    args = parser.parse_args()
    root = args.directory / "convert_bench"
    try:
        largest = write_source(root / "source", args.gigabytes, args.shard_gigabytes)
        size = sum(f.stat().st_size for f in (root / "source").iterdir())
        result = measure(root, size, largest)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result))


def measure(root: Path, size: int, largest: int) -> dict[str, float]:
    """Copies before and after, so that neither side has the colder disk."""
    source, seconds = root / "source", {"copy": []}
    peaks = {}
    for name, options in (("plain", ()), ("4 bit", ("-q",))):
        seconds["copy"].append(copy(source, root / "copy"))
        shutil.rmtree(root / "copy")
        seconds[name], peaks[name] = convert(source, root / "out", *options)
        shutil.rmtree(root / "out")
    copied = min(seconds["copy"])
    for name in peaks:
        print(
            f"{name:>6}: {size / seconds[name] / 1e9:.2f} GB/s, "
            f"{copied / seconds[name]:.2f} of copying, peak {peaks[name] / 1e9:.2f} GB"
        )
    return {
        "source_gb": round(size / 1e9, 2),
        "largest_shard_gb": round(largest / 1e9, 2),
        "copy_gb_per_s": round(size / copied / 1e9, 2),
        "plain_ratio": round(copied / seconds["plain"], 2),
        "plain_peak_gb": round(peaks["plain"] / 1e9, 2),
        "q4_ratio": round(copied / seconds["4 bit"], 2),
        "q4_peak_gb": round(peaks["4 bit"] / 1e9, 2),
    }


if __name__ == "__main__":
    main()
