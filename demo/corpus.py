"""Text and tokenizer of the demo checkpoint.

Reads CPython's standard library (of the running Python) and, where Debian's
``python3.11-doc`` is installed, its documentation sources. Both are under the PSF
licence. Files are split into training and held-out text by a hash of their name, so a
held-out file is never seen in part. Writes ``tokenizer.json``, ``train.bin`` and
``heldout.bin`` (uint16 token ids, documents separated by id 0).

    python demo/corpus.py --out demo/run
"""

import argparse
import hashlib
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DOCUMENTATION = Path("/usr/share/doc/python3.11/html/_sources")
SKIPPED_FOLDERS = {
    *("site-packages", "test", "tests", "idle_test", "encodings"),
    *("pydoc_data", "lib2to3", "__pycache__"),
}
MIN_CHARACTERS, MAX_CHARACTERS = 200, 600_000
HELD_OUT_SHARE = 10 / 256


def is_held_out(path: Path) -> bool:
    return hashlib.md5(path.name.encode()).digest()[0] < HELD_OUT_SHARE * 256


def read_corpus() -> tuple[list[str], list[str]]:
    """Return the training and the held-out documents."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in library.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(library).parts)
    ]
    paths += DOCUMENTATION.rglob("*.rst.txt")
    train, held_out = [], []
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            (held_out if is_held_out(path) else train).append(text)
    return train, held_out


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; special tokens take the first ids, so the end token is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the demo's training text.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    train, held_out = read_corpus()
    tokenizer = train_tokenizer(train, args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"))
    random.Random(0).shuffle(train)
    counts = {}
    for name, documents in (("train", train), ("heldout", held_out)):
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(documents):
            ids += [*encoding.ids, 0]
        np.array(ids, np.uint16).tofile(args.out / f"{name}.bin")
        counts[name] = {
            "files": len(documents),
            "characters": sum(map(len, documents)),
            "tokens": len(ids),
        }
    (args.out / "corpus.json").write_text(json.dumps(counts, indent=1))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
