"""What each rank of `fullshard doctor` runs: python -m fullshard.tools.cli.examined FOLDER STEPS HOW WORDS

It records what the script does and writes that into the folder, whether the script ends, fails or has taken
enough steps. HOW is 'compare', or 'watch' without an unsharded copy.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.environment import launch
from fullshard.errors import FullshardError
from fullshard.text_files import replace_text
from fullshard.tools.cli import launched


def main(words: Sequence[str]) -> None:
    folder, steps, how, *script = words
    from fullshard.doctor.recorder import Enough, Recorder
    from fullshard.hugging_face import turn_on

    turn_on()
    recorder = Recorder(int(steps), how == "compare", Path(folder).parent / "written")
    result: dict[str, Any] = {"error": None}
    recorder.start()
    try:
        launched.become(script)
    except Enough:
        pass
    except SystemExit as error:
        result["error"] = None if error.code in (None, 0) else f"it exits with {error.code}"
    except FullshardError as error:
        traceback.print_exc()
        recorder.note("refused", error=type(error).__name__, what=error.what, remedy=error.remedy)
        result["error"] = f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001  of the script: reported by the doctor
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    recorder.note_standing()
    result["events"] = recorder.events
    place = Path(folder) / f"rank-{launch().rank}.json"
    replace_text(place, json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the usual end: threads and process groups of a script that was left in the middle may wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
