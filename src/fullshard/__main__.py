"""python -m fullshard"""

from fullshard.cli.start import main

if __name__ == "__main__":
    raise SystemExit(main())
