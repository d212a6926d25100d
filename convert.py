"""Convert a Hugging Face checkpoint with its MTP head: ``python convert.py --help``."""

from mlx_mtp.convert_cli import main

if __name__ == "__main__":
    main()
