"""python -m fullshard"""

from fullshard.tools.cli.start import main

if __name__ == "__main__":
    raise SystemExit(main())
