"""Generate text: ``python generate.py --mtp --prompt "def "``."""

from mlx_mtp.generate import main

if __name__ == "__main__":
    main()
