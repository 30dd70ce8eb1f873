"""How often Python's collector of cyclic garbage looks for some."""

from __future__ import annotations

import gc

# Containers that are made before the collector looks at the youngest. Python's 700 are some ten requests, of which
# nothing is garbage yet. Requests leave next to nothing in cycles, and that waits a little longer.
YOUNG_MAX = 5000


def settle() -> None:
    """Call it once all that lives as long as the process is there: it need not be looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])
