"""
Bounds that several layers share.
"""

from typing import Final

#: Longer durations are taken for a mistake (seconds against milliseconds), in seconds.
LONGEST_S: Final = 10 * 366 * 86_400.0
#: Threads are made on demand; this only bounds what `max_workers` may be set to.
MAX_THREADS: Final = 1000
