"""
Bounds that several rooms share.
"""

from typing import Final

#: Longer durations are taken for a mistake (seconds against milliseconds), in seconds.
LONGEST_S: Final = 10 * 366 * 86_400.0
